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
}

/// The part of consecutive boxes that one buffer holds.
#[derive(Default)]
pub(super) struct Chunk<'a>(Vec<Piece<'a>>);

/// Runs of one box that are read together.
struct Piece<'a> {
    part: &'a Part<'a>,
    runs: Vec<Range<usize>>,
}

/// Divides the boxes into chunks of `most` elements; a chunk may end in the middle of a box. Only the last chunk may be
/// shorter. No read spans more than `most` elements of a file.
pub(super) fn chunks<'a>(parts: &'a [Part<'a>], most: usize) -> Vec<Chunk<'a>> {
    let mut chunks = Vec::new();
    let mut chunk = Chunk::default();
    let mut free = most;
    for part in parts {
        for run in &part.runs {
            let mut start = run.start;
            while start < run.end {
                let end = run.end.min(start + free);
                chunk.push(part, start..end, most);
                free -= end - start;
                start = end;
                if free == 0 {
                    chunks.push(std::mem::take(&mut chunk));
                    free = most;
                }
            }
        }
    }
    chunks.extend(Some(chunk).filter(|chunk| !chunk.0.is_empty()));
    chunks
}

impl<'a> Chunk<'a> {
    fn push(&mut self, part: &'a Part<'a>, run: Range<usize>, most: usize) {
        let is_near = |piece: &Piece| {
            std::ptr::eq(piece.part, part)
                && piece.runs.first().is_some_and(|first| run.end - first.start <= most)
        };
        match self.0.last_mut().filter(|piece| is_near(piece)) {
            Some(piece) => piece.runs.push(run),
            None => self.0.push(Piece { part, runs: vec![run] }),
        }
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.0.iter().map(Piece::elements).sum()
    }

    /// Reads the elements and converts them to `wanted`. `out` has room for exactly these elements.
    pub fn read(
        &self,
        wanted: DType,
        scratch: &mut Vec<u8>,
        mut out: &mut [u8],
    ) -> Result<(), CheckpointError> {
        for piece in &self.0 {
            let (here, after) = out.split_at_mut(piece.elements() * wanted.size_in_bytes());
            piece.read(wanted, scratch, here)?;
            out = after;
        }
        Ok(())
    }
}

impl Piece<'_> {
    fn elements(&self) -> usize {
        self.runs.iter().map(Range::len).sum()
    }

    /// Reads the runs, one after the other: straight into `out` if there is only one and no dtype to convert, otherwise
    /// through `scratch`, with one read for all.
    fn read(&self, wanted: DType, scratch: &mut Vec<u8>, mut out: &mut [u8]) -> Result<(), CheckpointError> {
        let (Some(first), Some(last)) = (self.runs.first(), self.runs.last()) else { return Ok(()) };
        let Part { file, entry, .. } = self.part;
        let size = self.part.size();
        let start = entry.range.start;
        let stored = entry.dtype;
        let span = start + first.start * size..start + last.end * size;
        if self.runs.len() == 1 && decode::dtype_of(stored) == Some(wanted) {
            return file.read_at(&span, out);
        }
        scratch.resize(span.len(), 0);
        file.read_at(&span, scratch)?;
        for run in &self.runs {
            let (here, after) = out.split_at_mut(run.len() * wanted.size_in_bytes());
            let bytes = &scratch[(run.start - first.start) * size..(run.end - first.start) * size];
            decode::into_bytes(bytes, stored, wanted, here);
            out = after;
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
        /// For any boxes, chunks and dtypes, full chunks have the same bytes as slices.
        #[test]
        fn chunks_hold_the_bytes_of_the_slices(
            boxes in prop::collection::vec(prop::collection::vec((0usize..7, 0usize..7), 3), 1..4),
            stored in prop_oneof![float(), Just(DType::F64)],
            wanted in float(),
            most in 1usize..80,
        ) {
            let dir = tempfile::tempdir().unwrap();
            let files = TensorFiles::open_file(file(&dir, stored)).unwrap();
            let ranges = |cuts: &Vec<(usize, usize)>| -> Vec<_> {
                let cut = |(&(a, b), dim): (&(usize, usize), usize)| a.min(b).min(dim)..a.max(b).min(dim);
                cuts.iter().zip([4, 6, 5]).map(cut).collect()
            };
            let (file, entry) = files.stored("x").unwrap();
            prop_assert!(decode::converts(entry.dtype, wanted));
            let part = |cuts| Part { file, entry, runs: runs(&ranges(cuts), &entry.shape) };
            let parts: Vec<_> = boxes.iter().map(part).collect();
            let chunks = chunks(&parts, most);
            let mut got = Vec::new();
            let mut scratch = vec![7; 3];
            for (number, chunk) in chunks.iter().enumerate() {
                prop_assert!(chunk.elements() == most || number + 1 == chunks.len() && chunk.elements() > 0);
                for Piece { runs, .. } in &chunk.0 {
                    prop_assert!(runs.last().unwrap().end - runs[0].start <= most);
                }
                let mut out = vec![0; chunk.elements() * wanted.size_in_bytes()];
                chunk.read(wanted, &mut scratch, &mut out).unwrap();
                got.extend(out);
            }
            let slice = |cuts| files.load_slice("x", &ranges(cuts), wanted, &Device::Cpu).unwrap();
            let want: Vec<u8> = boxes.iter().flat_map(|cuts| bytes(&slice(cuts))).collect();
            prop_assert_eq!(parts.iter().map(Part::elements).sum::<usize>() * wanted.size_in_bytes(), want.len());
            prop_assert!(got == want);
        }
    }

    #[test]
    fn neighbours_share_a_read_and_boxes_share_a_chunk() {
        let dir = tempfile::tempdir().unwrap();
        let files = TensorFiles::open_file(file(&dir, DType::F32)).unwrap();
        let (file, entry) = files.stored("x").unwrap();
        let part = |ranges: [Range<usize>; 3]| Part { file, entry, runs: runs(&ranges, &entry.shape) };
        // 24 rows of which 2 elements each are wanted, and a box without gaps.
        let parts = [part([0..4, 0..6, 1..3]), part([1..2, 0..6, 0..5])];
        let shape = |most| -> Vec<Vec<usize>> {
            let pieces = |chunk: &Chunk| chunk.0.iter().map(|piece| piece.runs.len()).collect();
            chunks(&parts, most).iter().map(pieces).collect()
        };
        assert_eq!(shape(200), [[24, 1]]);
        // A read spans at most 20 elements, so it takes four rows: 17 elements from the first one to the last one.
        assert_eq!(shape(20), [vec![4, 4, 2], vec![4, 4, 2], vec![4, 1], vec![1]]);
    }

    #[test]
    fn a_file_that_became_shorter_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = file(&dir, DType::F32);
        let files = TensorFiles::open_file(&path).unwrap();
        let len = fs::metadata(&path).unwrap().len();
        fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(len - 4).unwrap();
        let (file, entry) = files.stored("x").unwrap();
        let parts = [Part { file, entry, runs: runs(&[0..4, 0..6, 0..5], &entry.shape) }];
        let e = chunks(&parts, 120)[0].read(DType::F32, &mut Vec::new(), &mut [0; 480]).unwrap_err();
        let e = e.to_string();
        assert!(e.contains("is truncated") && e.contains(&format!("needs {len} bytes")), "{e}");
        assert!(e.contains(&format!("the file has {}", len - 4)), "{e}");
    }
}
