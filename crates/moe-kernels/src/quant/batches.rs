//! The bytes of a file from which a device packs a matrix, buffer by buffer.
//!
//! A batch is a run of tile rows of a pack. Its buffer begins with a table. For every run of rows, the table says where
//! their integers, zero points and scales are in the buffer. The bytes themselves follow the table, unchanged from the
//! file.

use std::ops::Range;

use candle_core::Result;

use super::stored::{StoredPart, StoredTensor, Window};
use super::{QuantRows, StoredMatrix, StoredWords, Tiles};
use crate::plan::ColumnOrder;

/// Words of 8 bytes of an entry of the table, `StoredRows` of `cuda/load/pack_stored.cu`.
const ENTRY_WORDS: usize = 12;
/// Tensors begin at multiples of this number of bytes in a buffer.
const ALIGNED: usize = 16;

/// The batches of a pack.
pub(crate) struct StoredBatches<'a> {
    tiles: &'a Tiles,
    /// The parts of each matrix, with the first row of each part.
    stacks: Vec<Vec<(usize, StoredPart<'a>)>>,
    /// The layout that all parts have in common. Strides and first rows describe a single part.
    pub form: StoredMatrix,
    /// Tile rows of each batch.
    pub list: Vec<Range<usize>>,
}

/// Rows that follow each other in a file: their entry in the table, and the bytes to read.
struct Rows<'a> {
    entry: [i64; ENTRY_WORDS],
    part: StoredPart<'a>,
    reads: Vec<(StoredTensor, Window, usize)>,
}

impl<'a> StoredBatches<'a> {
    /// Decides whether a device packs from the file's bytes, in buffers of `buffer` bytes. If not, the error is the
    /// reason. No other code makes this decision.
    pub(crate) fn choose(
        matrices: &[&'a dyn QuantRows],
        tiles: &'a Tiles,
        buffer: usize,
    ) -> std::result::Result<Self, String> {
        if tiles.order() != ColumnOrder::Input {
            return Err("act-order: columns are sorted on the host".to_string());
        }
        let mut stacks = Vec::with_capacity(matrices.len());
        for matrix in matrices {
            let mut first = 0;
            let mut stack = Vec::new();
            for part in matrix.stored()? {
                stack.push((first, part));
                first += part.rows;
            }
            stacks.push(stack);
        }
        let Some((_, first)) = stacks.first().and_then(|stack| stack.first()) else {
            return Err("there are no matrices".to_string());
        };
        let form = first.matrix;
        if tiles.dims.contains(&0) {
            return Err("there are no weights".to_string());
        }
        let alike = |stack: &Vec<(usize, StoredPart)>| {
            stack.len() == stacks[0].len() && stack.iter().all(|(_, part)| form.is_alike(&part.matrix))
        };
        if !stacks.iter().all(alike) {
            return Err("its matrices are stored in several ways".to_string());
        }
        let words = [Some(form.codes), form.zeros];
        if words.iter().flatten().any(|words| !words.is_whole()) {
            return Err("words hold numbers of integers that are no powers of two".to_string());
        }
        let mut batches = Self { tiles, stacks, form, list: Vec::new() };
        batches.list = batches.cut(buffer)?;
        Ok(batches)
    }

    /// Cuts the tile rows into batches: as many whole matrices as a buffer holds, or equal runs of the tile rows of one
    /// matrix.
    fn cut(&self, buffer: usize) -> std::result::Result<Vec<Range<usize>>, String> {
        let count = self.tiles.n_tiles();
        let mut list = Vec::<Range<usize>>::new();
        let mut open = 0;
        for e in 0..self.stacks.len() {
            let all = e * count..(e + 1) * count;
            let len = self.len(&all);
            if len <= buffer - open && open > 0 {
                list.last_mut().into_iter().for_each(|last| last.end = all.end);
                open += len;
                continue;
            }
            let mut runs = len.div_ceil(buffer);
            let mut parts = vec![all.clone()];
            while parts.iter().any(|part| self.len(part) > buffer) {
                if runs > count {
                    return Err(format!("16 of its rows do not fit a buffer of {buffer} bytes"));
                }
                let each = count.div_ceil(runs);
                let run = |first: usize| all.start + first..all.end.min(all.start + first + each);
                parts = (0..count).step_by(each).map(run).collect();
                runs += 1;
            }
            open = if parts.len() == 1 { len } else { buffer };
            list.extend(parts);
        }
        Ok(list)
    }

    /// The number of entries of the table for each matrix of a batch.
    pub(crate) fn entries(&self) -> usize {
        self.stacks[0].len() * if self.tiles.gate_up { 2 } else { 1 }
    }

    /// Bytes of a batch.
    pub(crate) fn len(&self, batch: &Range<usize>) -> usize {
        let rows = self.rows(batch);
        let end = rows.iter().flat_map(|rows| &rows.reads).map(|(_, window, at)| at + window.len()).max();
        end.unwrap_or(rows.len() * ENTRY_WORDS * 8).next_multiple_of(ALIGNED)
    }

    /// Reads a batch into `out`, which has [`len`](Self::len) bytes. `scratch` keeps its memory from call to call.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub(crate) fn fill(&self, batch: &Range<usize>, scratch: &mut Vec<u8>, out: &mut [u8]) -> Result<()> {
        let rows = self.rows(batch);
        let table = rows.iter().flat_map(|rows| rows.entry);
        for (to, word) in out.as_chunks_mut::<8>().0.iter_mut().zip(table) {
            *to = word.to_le_bytes();
        }
        for Rows { part, reads, .. } in &rows {
            for (tensor, window, at) in reads {
                window.read(part.bytes, *tensor, scratch, &mut out[*at..*at + window.len()])?;
            }
        }
        Ok(())
    }

    /// The rows of a batch in the order of the table: the parts of each matrix. For gate and up, each matrix comes
    /// twice.
    fn rows(&self, batch: &Range<usize>) -> Vec<Rows<'a>> {
        let count = self.tiles.n_tiles();
        let matrices = batch.start / count..batch.end.div_ceil(count);
        let mut all = Vec::with_capacity(matrices.len() * self.entries());
        let mut at = matrices.len() * self.entries() * ENTRY_WORDS * 8;
        for e in matrices {
            let first = batch.start.max(e * count);
            let last = batch.end.min((e + 1) * count);
            let halves = self.tiles.rows(first - e * count..last - e * count);
            for half in &halves[..if self.tiles.gate_up { 2 } else { 1 }] {
                for (first, part) in &self.stacks[e] {
                    let start = half.start.max(*first);
                    let end = half.end.min(first + part.rows);
                    all.push(self.place(*first, *part, start..end.max(start), &mut at));
                }
            }
        }
        all
    }

    /// Assigns the next free bytes from `at` on to `rows` of a matrix, for the part whose first row is `first`.
    fn place(&self, first: usize, part: StoredPart<'a>, rows: Range<usize>, at: &mut usize) -> Rows<'a> {
        let mut placed = Rows { entry: [0; ENTRY_WORDS], part, reads: Vec::new() };
        if rows.is_empty() {
            return placed;
        }
        let matrix = part.matrix;
        let stored = matrix.first_row + rows.start - first..matrix.first_row + rows.end - first;
        let columns = self.columns();
        let groups = self.groups();
        placed.entry[..3].copy_from_slice(&[
            rows.start as i64,
            rows.end as i64,
            matrix.first_row as i64 - first as i64,
        ]);
        let tensors = [
            (StoredTensor::Codes, Some(matrix.codes.grid), &columns),
            (StoredTensor::Zeros, matrix.zeros.map(|zeros| zeros.grid), &groups),
            (StoredTensor::Scales, Some(matrix.scales), &groups),
        ];
        for (tensor, (name, grid, across)) in tensors.into_iter().enumerate() {
            let Some(grid) = grid else { continue };
            let window = grid.window(stored.clone(), across.clone());
            let place = (*at / grid.bytes) as i64 + window.origin;
            let words = [place, window.row_stride as i64, window.column_stride as i64];
            placed.entry[3 + 3 * tensor..][..3].copy_from_slice(&words);
            placed.reads.push((name, window, *at));
            *at = (*at + window.len()).next_multiple_of(ALIGNED);
        }
        placed
    }

    /// Stored columns of the pack.
    pub(crate) fn columns(&self) -> Range<usize> {
        let first = self.form.first_column + self.tiles.start;
        first..first + self.tiles.dims[2]
    }

    /// Stored groups of the pack.
    pub(crate) fn groups(&self) -> Range<usize> {
        let first = self.form.first_group + self.tiles.first_group();
        first..first + self.tiles.groups
    }
}

impl StoredMatrix {
    /// Whether a kernel reads both parts in the same way, given the strides and the first row of each.
    fn is_alike(&self, other: &Self) -> bool {
        let form = |matrix: &Self| {
            let words = |mut words: StoredWords| {
                (words.grid.row_stride, words.grid.column_stride) = (0, 0);
                words
            };
            let scales = matrix.scales;
            (
                (words(matrix.codes), matrix.zeros.map(words)),
                (scales.bytes, scales.rows, scales.columns, matrix.scale_dtype),
                (matrix.first_column, matrix.first_group),
            )
        };
        form(self) == form(other)
    }
}

impl StoredWords {
    /// Whether the places of elements can be computed by shifts and masks.
    fn is_whole(&self) -> bool {
        self.grid.rows.is_power_of_two() && self.grid.columns.is_power_of_two()
    }
}

#[cfg(test)]
#[path = "batches_tests.rs"]
mod tests;
