//! The layout of quantised matrices in their files, as plain data: which element of which tensor belongs to a row and a
//! column.
//!
//! A device packs from the file's own bytes (`cuda/load/pack_stored.cu`). Only the reader knows the format of a file.
//! It describes the layout by these types, and neither the copy nor the kernel knows more.

use std::ops::Range;

use candle_core::{DType, Result};

/// Runs of at least this number of bytes are read one by one. Shorter runs are read together, from the first to the
/// last.
const READ_ALONE: usize = 1024;

/// A tensor of a quantised matrix.
// This enum is exhaustive: a reader must know the suffix of each tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoredTensor {
    /// Integers or FP8 bytes.
    Codes,
    /// Zero points.
    Zeros,
    /// Scales.
    Scales,
}

/// The bytes of a matrix' tensors, from any thread.
pub trait StoredBytes: Sync {
    /// Reads as many bytes as `out` has, from byte `first` of a tensor on.
    ///
    /// # Errors
    /// A file that cannot be read.
    fn read_bytes(&self, tensor: StoredTensor, first: usize, out: &mut [u8]) -> Result<()>;
}

/// Which element of a tensor belongs to a row and a column (for scales and zero points: to a row and a group). Its
/// index is `row / rows * row_stride + column / columns * column_stride`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredGrid {
    /// Bytes of an element: of a scale, or of a word of packed integers, which has 4.
    pub bytes: usize,
    /// Rows that share an element.
    pub rows: usize,
    /// Columns, or groups, that share an element.
    pub columns: usize,
    /// Elements from one row to the next; 0 if all rows share the elements.
    pub row_stride: usize,
    /// Elements from one column to the next; 0 if all columns share the elements.
    pub column_stride: usize,
}

/// Integers packed into words of 32 bits, little-endian. The integer of a row and a column is number `place[row % rows
/// + column % columns]`, counted from the lowest bits; one of `rows` and `columns` is 1, the other 8 at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredWords {
    /// The words.
    pub grid: StoredGrid,
    /// Bits of an integer: 4 or 8.
    pub bits: u8,
    /// The place, within a word, of each integer that shares it.
    pub place: [u8; 8],
    /// A number that is added to a whole word, wrapping, before its integers are taken.
    pub plus: u32,
}

/// The layout of a matrix in its tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredMatrix {
    /// Integers, or FP8 bytes four to a word.
    pub codes: StoredWords,
    /// Zero points; `None`: no tensor has them.
    pub zeros: Option<StoredWords>,
    /// Scales.
    pub scales: StoredGrid,
    /// The dtype of the scales: f32, bf16 or f16.
    pub scale_dtype: DType,
    /// The stored row that is row 0 of this matrix.
    pub first_row: usize,
    /// The stored column that is column 0 of this matrix.
    pub first_column: usize,
    /// The stored group of that column.
    pub first_group: usize,
}

/// A matrix and the bytes of its tensors.
#[derive(Clone, Copy)]
pub struct StoredPart<'a> {
    /// Rows of the matrix.
    pub rows: usize,
    /// The layout of the matrix in its tensors.
    pub matrix: StoredMatrix,
    /// The reader of the bytes.
    pub bytes: &'a dyn StoredBytes,
}

/// The elements of a tensor that a range of rows and columns needs: `lines` of `run` neighbouring elements each. A copy
/// has only these elements, so its strides are shorter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Window {
    bytes: usize,
    /// The first element.
    first: usize,
    lines: usize,
    run: usize,
    /// Elements from line to line.
    stride: usize,
    /// Strides of the copy.
    pub row_stride: usize,
    pub column_stride: usize,
    /// The index that row 0 and column 0 would have in the copy. It may be negative.
    pub origin: i64,
}

impl StoredGrid {
    /// The element of a row and a column.
    pub fn element(&self, row: usize, column: usize) -> usize {
        row / self.rows * self.row_stride + column / self.columns * self.column_stride
    }

    /// The elements that rows and columns, at least one each, need.
    pub(crate) fn window(&self, rows: Range<usize>, columns: Range<usize>) -> Window {
        // If all rows share an element there is one line, or a run of one element.
        let cut = |range: Range<usize>, shared: usize, stride: usize| match stride {
            0 => (0, 1),
            _ => (range.start / shared, range.end.div_ceil(shared) - range.start / shared),
        };
        let (row, row_count) = cut(rows, self.rows, self.row_stride);
        let (column, column_count) = cut(columns, self.columns, self.column_stride);
        let first = row * self.row_stride + column * self.column_stride;
        let by_rows = self.row_stride > self.column_stride;
        let (lines, run, stride) = match by_rows {
            true => (row_count, column_count, self.row_stride),
            false => (column_count, row_count, self.column_stride),
        };
        let of_copy = |stride: usize, across: bool| match stride {
            0 => 0,
            _ if across => run,
            _ => 1,
        };
        let row_stride = of_copy(self.row_stride, by_rows);
        let column_stride = of_copy(self.column_stride, !by_rows);
        let origin = -((row * row_stride + column * column_stride) as i64);
        Window { bytes: self.bytes, first, lines, run, stride, row_stride, column_stride, origin }
    }
}

impl StoredWords {
    /// The integer of a row and a column in its word.
    pub fn integer(&self, word: u32, row: usize, column: usize) -> u8 {
        let place = self.place[row % self.grid.rows + column % self.grid.columns];
        (word.wrapping_add(self.plus) >> (place * self.bits) & ((1 << self.bits) - 1)) as u8
    }
}

impl Window {
    /// Bytes of a copy.
    pub(crate) fn len(&self) -> usize {
        self.lines * self.run * self.bytes
    }

    /// Reads a copy into `out`, which has [`len`](Self::len) bytes. `scratch` keeps its memory from call to call.
    pub(crate) fn read(
        &self,
        from: &dyn StoredBytes,
        tensor: StoredTensor,
        scratch: &mut Vec<u8>,
        out: &mut [u8],
    ) -> Result<()> {
        let first = self.first * self.bytes;
        let run = self.run * self.bytes;
        let stride = self.stride * self.bytes;
        if self.lines <= 1 || run == stride {
            return from.read_bytes(tensor, first, out);
        }
        if run >= READ_ALONE {
            let mut lines = out.chunks_exact_mut(run).enumerate();
            return lines.try_for_each(|(line, out)| from.read_bytes(tensor, first + line * stride, out));
        }
        scratch.resize((self.lines - 1) * stride + run, 0);
        from.read_bytes(tensor, first, scratch)?;
        for (out, line) in out.chunks_exact_mut(run).zip(scratch.chunks(stride)) {
            out.copy_from_slice(&line[..run]);
        }
        Ok(())
    }
}
