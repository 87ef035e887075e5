//! Writes one GGUF file of version 3: metadata, the places of all tensors, then their bytes. Until it is complete its
//! name is `NAME.incomplete`.
//!
//! The format: `docs/gguf.md` of the ggml project.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::outputs::Output;
use crate::write::check_space;

/// The version of the format.
const VERSION: u32 = 3;
/// Tensors begin at multiples of this number of bytes.
const ALIGNMENT: u64 = 32;

/// A value of the metadata.
#[derive(Clone, Debug, PartialEq)]
pub enum Meta {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    I32s(Vec<i32>),
}

impl Meta {
    /// Returns the number of the type: of the value itself, or of the values in a list.
    fn id(&self) -> u32 {
        match self {
            Self::U32(_) => 4,
            Self::I32s(_) => 5,
            Self::F32(_) => 6,
            Self::Bool(_) => 7,
            Self::Text(_) | Self::Texts(_) => 8,
        }
    }

    fn write(&self, out: &mut Vec<u8>) {
        const LIST: u32 = 9;
        let list = |out: &mut Vec<u8>, len: usize| {
            out.extend(LIST.to_le_bytes());
            out.extend(self.id().to_le_bytes());
            out.extend((len as u64).to_le_bytes());
        };
        match self {
            Self::Texts(texts) => {
                list(out, texts.len());
                texts.iter().for_each(|text| put_text(out, text));
                return;
            }
            Self::I32s(numbers) => {
                list(out, numbers.len());
                numbers.iter().for_each(|number| out.extend(number.to_le_bytes()));
                return;
            }
            _ => out.extend(self.id().to_le_bytes()),
        }
        match self {
            Self::U32(number) => out.extend(number.to_le_bytes()),
            Self::F32(number) => out.extend(number.to_le_bytes()),
            Self::Bool(flag) => out.push(u8::from(*flag)),
            Self::Text(text) => put_text(out, text),
            Self::Texts(_) | Self::I32s(_) => {}
        }
    }
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// Returns everything before the first tensor.
fn header(metadata: &[(String, Meta)], outputs: &[Output]) -> Vec<u8> {
    let mut out = b"GGUF".to_vec();
    out.extend(VERSION.to_le_bytes());
    out.extend((outputs.len() as u64).to_le_bytes());
    out.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata {
        put_text(&mut out, key);
        value.write(&mut out);
    }
    let mut offset = 0u64;
    for output in outputs {
        put_text(&mut out, &output.name);
        out.extend((output.shape.len() as u32).to_le_bytes());
        // The first dimension in files is the one whose elements are neighbours.
        output.shape.iter().rev().for_each(|dim| out.extend((*dim as u64).to_le_bytes()));
        out.extend(output.type_id().to_le_bytes());
        out.extend(offset.to_le_bytes());
        offset = (offset + output.bytes() as u64).next_multiple_of(ALIGNMENT);
    }
    out.resize(out.len().next_multiple_of(ALIGNMENT as usize), 0);
    out
}

/// A GGUF file that is being written.
pub struct GgufFile {
    out: PathBuf,
    incomplete: PathBuf,
    file: BufWriter<File>,
    is_done: bool,
}

impl GgufFile {
    /// Writes the header, and makes the file as long as all tensors need.
    ///
    /// # Errors
    /// `out` exists or does not end with `.gguf`, an unfinished run has left its file, or there is too little space.
    pub fn create(out: &Path, metadata: &[(String, Meta)], outputs: &[Output]) -> Result<Self> {
        if out.exists() {
            bail!("{} exists already; choose another name, or remove it first", out.display())
        }
        let name = out.file_name().filter(|_| out.extension().is_some_and(|extension| extension == "gguf"));
        let Some(name) = name else {
            bail!("{}: expected the name of a file that ends with .gguf", out.display())
        };
        let mut unfinished = name.to_os_string();
        unfinished.push(".incomplete");
        let incomplete = out.with_file_name(unfinished);
        let folder = out.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        std::fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
        let header = header(metadata, outputs);
        let tensors: u64 =
            outputs.iter().map(|output| (output.bytes() as u64).next_multiple_of(ALIGNMENT)).sum();
        let len = header.len() as u64 + tensors;
        check_space(folder, out, len)?;
        let cannot = || format!("cannot write {}", incomplete.display());
        let file = File::create_new(&incomplete).with_context(|| {
            format!(
                "cannot create {}; if it is there, another run is writing it, or one was killed: in that case remove it \
                 and run again",
                incomplete.display()
            )
        })?;
        let mut file = Self {
            out: out.to_path_buf(),
            incomplete: incomplete.clone(),
            file: BufWriter::new(file),
            is_done: false,
        };
        file.file.get_ref().set_len(len).with_context(cannot)?;
        file.file.write_all(&header).with_context(cannot)?;
        file.file.flush().with_context(cannot)?;
        Ok(file)
    }

    /// Returns the name of the file until it is complete.
    pub fn path(&self) -> &Path {
        &self.incomplete
    }

    /// Writes bytes of the next tensor.
    ///
    /// # Errors
    /// Writing fails.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).with_context(|| format!("cannot write {}", self.incomplete.display()))
    }

    /// Ends a tensor of this number of bytes: the next one begins at a multiple of the alignment.
    ///
    /// # Errors
    /// Writing fails.
    pub fn end_tensor(&mut self, bytes: usize) -> Result<()> {
        let padding = (bytes as u64).next_multiple_of(ALIGNMENT) - bytes as u64;
        self.write(&[0; ALIGNMENT as usize][..padding as usize])
    }

    /// Gives the file its name.
    ///
    /// # Errors
    /// Writing fails.
    pub fn finish(mut self) -> Result<()> {
        let cannot = || format!("cannot write {}", self.incomplete.display());
        self.file.flush().with_context(cannot)?;
        self.file.get_ref().sync_all().with_context(cannot)?;
        std::fs::rename(&self.incomplete, &self.out).with_context(|| {
            format!("cannot rename {} to {}", self.incomplete.display(), self.out.display())
        })?;
        self.is_done = true;
        Ok(())
    }
}

impl Drop for GgufFile {
    /// A run that fails leaves no file.
    fn drop(&mut self) {
        if !self.is_done {
            let _ = std::fs::remove_file(&self.incomplete);
        }
    }
}
