//! Boxes of stored tensors, cut into chunks that a buffer holds, and the reading of a chunk.

use std::ops::Range;

use candle_core::DType;

use super::file::{Entry, TensorFile};
use super::{CheckpointError, decode};

/// A box of a stored tensor.
pub(super) struct Part<'a> {
    pub file: &'a TensorFile,
    pub entry: &'a Entry,
    /// The runs of neighbouring elements that it has, ascending.
    pub runs: Vec<Range<usize>>,
}

impl Part<'_> {
    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.runs.iter().map(Range::len).sum()
    }

    /// Bytes of an element in the file.
    pub fn size(&self) -> usize {
        let elements: usize = self.entry.shape.iter().product();
        self.entry.range.len().checked_div(elements).unwrap_or(0)
    }

    /// The runs in chunks, none of which spans more than `most` elements of the file.
    pub fn chunks(&self, most: usize) -> Vec<Vec<Range<usize>>> {
        let (mut chunks, mut chunk) = (Vec::new(), Vec::<Range<usize>>::new());
        for run in &self.runs {
            let mut start = run.start;
            while start < run.end {
                let end = run.end.min(chunk.first().map_or(start, |first| first.start) + most);
                if start < end {
                    chunk.push(start..end);
                    start = end;
                } else {
                    chunks.push(std::mem::take(&mut chunk));
                }
            }
        }
        chunks.extend(Some(chunk).filter(|chunk| !chunk.is_empty()));
        chunks
    }

    /// Reads the runs of a chunk, one behind the other, into `out`: directly where there is one and no
    /// dtype to convert, else through `scratch`, with one read for all.
    pub fn read(
        &self,
        chunk: &[Range<usize>],
        wanted: DType,
        scratch: &mut Vec<u8>,
        mut out: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let (Some(first), Some(last)) = (chunk.first(), chunk.last()) else { return Ok(()) };
        let (size, start, stored) = (self.size(), self.entry.range.start, self.entry.dtype);
        let span = start + first.start * size..start + last.end * size;
        if chunk.len() == 1 && decode::dtype_of(stored) == Some(wanted) {
            return self.file.read_at(&span, out);
        }
        scratch.resize(span.len(), 0);
        self.file.read_at(&span, scratch)?;
        for run in chunk {
            let (here, behind) = out.split_at_mut(run.len() * wanted.size_in_bytes());
            let bytes = &scratch[(run.start - first.start) * size..(run.end - first.start) * size];
            decode::into_bytes(bytes, stored, wanted, here);
            out = behind;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use candle_core::{Device, Tensor};
    use proptest::prelude::*;

    use super::super::files::{TensorFiles, runs};
    use super::*;

    /// The little-endian bytes of a float tensor.
    fn bytes(t: &Tensor) -> Vec<u8> {
        let t = t.flatten_all().unwrap();
        match t.dtype() {
            DType::BF16 => t.to_vec1::<half::bf16>().unwrap().iter().flat_map(|x| x.to_le_bytes()).collect(),
            DType::F16 => t.to_vec1::<half::f16>().unwrap().iter().flat_map(|x| x.to_le_bytes()).collect(),
            DType::F64 => t.to_vec1::<f64>().unwrap().iter().flat_map(|x| x.to_le_bytes()).collect(),
            _ => t.to_vec1::<f32>().unwrap().iter().flat_map(|x| x.to_le_bytes()).collect(),
        }
    }

    /// A file with `x` [4, 6, 5] in a dtype.
    fn file(dir: &tempfile::TempDir, dtype: DType) -> std::path::PathBuf {
        let x = Tensor::arange(-60f32, 60., &Device::Cpu).unwrap().affine(1.001, 1e-4).unwrap();
        let x = x.reshape((4, 6, 5)).unwrap().to_dtype(dtype).unwrap();
        let path = dir.path().join("x.safetensors");
        candle_core::safetensors::save(&[("x", x)].into(), &path).unwrap();
        path
    }

    fn float() -> impl Strategy<Value = DType> {
        prop::sample::select(vec![DType::F32, DType::BF16, DType::F16])
    }

    proptest! {
        /// Whatever the box, the chunks and the dtypes, chunks give the bytes that a slice has.
        #[test]
        fn chunks_hold_the_bytes_of_the_slice(
            cuts in prop::collection::vec((0usize..7, 0usize..7), 3),
            stored in prop_oneof![float(), Just(DType::F64)],
            wanted in float(),
            most in 1usize..80,
        ) {
            let dir = tempfile::tempdir().unwrap();
            let files = TensorFiles::open_file(file(&dir, stored)).unwrap();
            let ranges: Vec<_> = cuts
                .iter()
                .zip([4, 6, 5])
                .map(|(&(a, b), dim)| a.min(b).min(dim)..a.max(b).min(dim))
                .collect();
            let (file, entry) = files.stored("x").unwrap();
            let part = Part { file, entry, runs: runs(&ranges, &entry.shape) };
            prop_assert!(decode::converts(entry.dtype, wanted));
            let (mut got, mut scratch) = (Vec::new(), vec![7; 3]);
            for chunk in part.chunks(most) {
                prop_assert!(chunk.last().unwrap().end - chunk[0].start <= most);
                let len: usize = chunk.iter().map(Range::len).sum();
                let mut out = vec![0; len * wanted.size_in_bytes()];
                part.read(&chunk, wanted, &mut scratch, &mut out).unwrap();
                got.extend(out);
            }
            let want = files.load_slice("x", &ranges, wanted, &Device::Cpu).unwrap();
            prop_assert_eq!(part.elements(), want.elem_count());
            prop_assert!(got == bytes(&want));
        }
    }

    #[test]
    fn a_file_that_became_shorter_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = file(&dir, DType::F32);
        let files = TensorFiles::open_file(&path).unwrap();
        let len = fs::metadata(&path).unwrap().len();
        fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(len - 4).unwrap();
        let (file, entry) = files.stored("x").unwrap();
        let part = Part { file, entry, runs: runs(&[0..4, 0..6, 0..5], &entry.shape) };
        let e = part.read(&part.chunks(120)[0], DType::F32, &mut Vec::new(), &mut [0; 480]).unwrap_err();
        let e = e.to_string();
        assert!(e.contains("is truncated") && e.contains(&format!("needs {len} bytes")), "{e}");
        assert!(e.contains(&format!("the file has {}", len - 4)), "{e}");
    }
}
