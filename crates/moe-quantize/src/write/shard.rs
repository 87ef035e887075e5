//! A safetensors file whose header is written first. Its tensors may then be written in any order.
//!
//! The format is: 8 bytes with the header's length, the header in JSON, then the tensors' bytes without gaps
//! (<https://github.com/huggingface/safetensors>).

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use moe_quant::write::StoredSpec;
use serde_json::{Map, json};

/// The number of bytes that are buffered before they are written.
const BUFFER: usize = 1 << 20;

pub struct Shard {
    path: PathBuf,
    name: String,
    file: File,
    /// The places of the tensors that have not been written: first byte and number of bytes.
    waiting: BTreeMap<String, (u64, u64)>,
    bytes: u64,
}

impl Shard {
    pub fn create(path: &Path, name: &str, tensors: &[(String, StoredSpec)]) -> Result<Self> {
        // Wider elements come first, so that each tensor begins at a multiple of its element size.
        let mut tensors: Vec<&(String, StoredSpec)> = tensors.iter().collect();
        tensors.sort_by(|(a, x), (b, y)| y.dtype.bitsize().cmp(&x.dtype.bitsize()).then_with(|| a.cmp(b)));
        let mut header = Map::new();
        let mut places = Vec::new();
        let mut at = 0u64;
        header.insert("__metadata__".into(), json!({"format": "pt"}));
        for (name, spec) in tensors {
            let bytes = spec.len() as u64;
            let range = [at, at + bytes];
            let entry = json!({"dtype": spec.dtype.to_string(), "shape": spec.shape, "data_offsets": range});
            header.insert(name.clone(), entry);
            places.push((name.clone(), (at, bytes)));
            at += bytes;
        }
        let mut text = serde_json::to_vec(&header)?;
        text.resize(text.len().next_multiple_of(8), b' ');
        let first = 8 + text.len() as u64;
        let cannot = || format!("cannot write {}", path.display());
        let mut file = File::create(path).with_context(cannot)?;
        file.write_all(&(text.len() as u64).to_le_bytes()).with_context(cannot)?;
        file.write_all(&text).with_context(cannot)?;
        file.set_len(first + at).with_context(cannot)?;
        let waiting = places.into_iter().map(|(name, (at, bytes))| (name, (first + at, bytes))).collect();
        Ok(Self { path: path.to_path_buf(), name: name.to_string(), file, waiting, bytes: at })
    }

    /// Returns the file's name.
    pub fn file(&self) -> &str {
        &self.name
    }

    pub fn write(&mut self, name: &str, fill: impl FnOnce(&mut dyn Write) -> Result<()>) -> Result<()> {
        let Some((at, bytes)) = self.waiting.remove(name) else { bail!("tensor {name} is written twice") };
        let cannot = || format!("cannot write tensor {name} to {}", self.path.display());
        self.file.seek(SeekFrom::Start(at)).with_context(cannot)?;
        let mut out = Counted { out: BufWriter::with_capacity(BUFFER, &mut self.file), bytes: 0 };
        fill(&mut out).with_context(cannot)?;
        out.flush().with_context(cannot)?;
        if out.bytes != bytes {
            bail!("tensor {name}: expected {bytes} bytes, got {}", out.bytes)
        }
        Ok(())
    }

    /// Returns the number of bytes of the tensors, if all have been written.
    pub fn finish(self) -> Result<u64> {
        if let Some(name) = self.waiting.keys().next() {
            bail!("{}: {} tensors were not written, such as {name}", self.name, self.waiting.len())
        }
        self.file.sync_all().with_context(|| format!("cannot write {}", self.path.display()))?;
        Ok(self.bytes)
    }
}

/// Counts the bytes that are written through it.
struct Counted<W> {
    out: W,
    bytes: u64,
}

impl<W: Write> Write for Counted<W> {
    fn write(&mut self, buf: &[u8]) -> std::io::Result<usize> {
        let written = self.out.write(buf)?;
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use safetensors::{Dtype, SafeTensors};

    use super::*;

    #[test]
    fn tensors_in_any_order_make_a_file_that_reads_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.safetensors");
        let spec = |dtype, shape: &[usize]| StoredSpec { suffix: "", dtype, shape: shape.to_vec() };
        let tensors = [("a".to_string(), spec(Dtype::F16, &[3])), ("b".to_string(), spec(Dtype::I64, &[1]))];
        let mut shard = Shard::create(&path, "x", &tensors).unwrap();
        shard.write("a", |out| Ok(out.write_all(&[1, 2, 3, 4, 5, 6])?)).unwrap();
        let error = shard.write("a", |_| Ok(())).unwrap_err().to_string();
        assert!(error.contains("written twice"), "{error}");
        let error = shard.write("b", |out| Ok(out.write_all(&[0; 7])?)).unwrap_err().to_string();
        assert!(error.contains("expected 8 bytes, got 7"), "{error}");

        let mut shard = Shard::create(&path, "x", &tensors).unwrap();
        shard.write("a", |out| Ok(out.write_all(&[1, 2, 3, 4, 5, 6])?)).unwrap();
        shard.write("b", |out| Ok(out.write_all(&7i64.to_le_bytes())?)).unwrap();
        assert_eq!(shard.finish().unwrap(), 14);
        let bytes = std::fs::read(&path).unwrap();
        let read = SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(read.tensor("a").unwrap().data(), [1, 2, 3, 4, 5, 6]);
        assert_eq!(read.tensor("b").unwrap().data(), 7i64.to_le_bytes());

        let unfinished = Shard::create(&path, "x", &tensors).unwrap();
        let error = unfinished.finish().unwrap_err().to_string();
        assert!(error.contains("2 tensors were not written"), "{error}");
    }
}
