//! The order of a quantised pack on a device. `cuda/quant/args.cuh` defines the order, and this file packs in it on the
//! host.
//!
//! Sixteen rows of a matrix are a *tile row*. Its integers are in tiles of 512 bytes, in the order in which the lanes
//! of a warp hold the A operand of the tensor cores. Its scales and zero points are by group. Tile rows are packed
//! independently, so that many threads fill the buffers from which they are copied to the device.

// Only CUDA builds have a device to pack for; the order is tested in all.
#![cfg_attr(not(feature = "cuda"), allow(dead_code))]

use std::ops::Range;

use candle_core::{Result, bail};

use super::fp4;
use super::packing::check_rows;
use super::q4k;
use super::sorted::{NO_COLUMN, Sorted};
use super::tile_rows::TILE_ROWS;
use super::{LogicalRows, QuantRows};
use crate::codes::e4m3;
use crate::plan::ColumnOrder;
use crate::scheme::{Codes, Levels, QuantScheme};

/// Bytes of a tile.
const TILE_BYTES: usize = 512;
/// Columns of a k-step of the tensor cores.
const K_STEP: usize = 16;
/// Columns of a packed group if a rank holds only some columns of each group.
const PART_GROUP: usize = 32;

/// The order of the matrices [E, N, K] of a pack.
#[derive(Clone, Debug)]
pub(crate) struct Tiles {
    /// E, N and K.
    pub dims: [usize; 3],
    pub scheme: QuantScheme,
    /// Whether a tile holds eight gate rows and their eight up rows.
    pub gate_up: bool,
    /// Packed columns, a multiple of the columns of a tile.
    pub k_packed: usize,
    /// Packed columns that share a scale.
    pub group: usize,
    /// Groups of the packed columns, at least one.
    pub groups: usize,
    /// Columns of a logical row.
    width: usize,
    /// The first logical column of the pack; not used with act-order.
    pub start: usize,
    /// With act-order: the columns of each matrix.
    columns: Vec<Sorted>,
}

/// Memory for rows on their way into a tile row, which is reused for the next one.
#[derive(Default)]
pub(crate) struct TileScratch {
    rows: [LogicalRows; 2],
    /// [16, `k_packed`] integers in packed order.
    coded: Vec<u8>,
}

/// The memory for a tile row: for its tiles, and for its scales and zero points [groups, 16].
pub(crate) struct TileRow<'a> {
    pub q: &'a mut [u8],
    /// [[`scale_lines`](Tiles::scale_lines), 16]. Of NVFP4, the first line has the floats that groups share, and the
    /// others the bytes of their factors, as numbers; of Q4_K the lines of its units (`quant/q4k.rs`).
    pub scales: &'a mut [f32],
    /// Empty where all zero points are the same.
    pub zeros: &'a mut [u8],
}

impl Tiles {
    /// The order of matrices of one shape and scheme, whose products take `inputs` of x.
    ///
    /// # Errors
    /// Inputs that do not exist; an order of columns that does not name each column once.
    pub(crate) fn new(matrices: &[&dyn QuantRows], inputs: &Range<usize>, gate_up: bool) -> Result<Self> {
        let Some(first) = matrices.first() else { bail!("expected at least one quantised matrix to pack") };
        let (n, width) = first.shape();
        let scheme = first.scheme();
        if inputs.start > inputs.end || inputs.end > width {
            bail!("inputs {inputs:?} are asked for, but there are {width}")
        }
        let dims = [matrices.len(), n, inputs.len()];
        let step = tile_columns(scheme);
        let size = scheme.group_size(width);
        let start = inputs.start;
        let columns = Vec::new();
        if matrices.iter().all(|m| m.perm().is_none()) {
            if !start.is_multiple_of(size) {
                bail!("inputs {inputs:?} cut a group of {size} columns")
            }
            let k_packed = inputs.len().next_multiple_of(step);
            let groups = inputs.len().div_ceil(size).max(1);
            let group = if groups == 1 { k_packed.max(1) } else { size };
            return Ok(Self { dims, scheme, gate_up, k_packed, group, groups, width, start, columns });
        }
        // Whole groups keep their size. If a rank has a part of each group, it pads its columns to smaller groups.
        let is_part = *inputs != (0..width) && size.is_multiple_of(PART_GROUP);
        let group = if is_part { PART_GROUP } else { size };
        let mut columns = Vec::with_capacity(matrices.len());
        for matrix in matrices {
            let Some(perm) = matrix.perm() else {
                bail!("some matrices have an order of columns, others none")
            };
            columns.push(Sorted::new(perm, width, inputs, size, group)?);
        }
        let longest = columns.iter().map(|c| c.logical.len()).max().unwrap_or(0);
        let k_packed = longest.next_multiple_of(step);
        let groups = columns.iter().map(|c| c.groups.len()).max().unwrap_or(0).max(1);
        for sorted in &mut columns {
            sorted.logical.resize(k_packed, NO_COLUMN);
            sorted.x.resize(k_packed, NO_COLUMN);
            // A group without a column may have any scale.
            sorted.groups.resize(groups, 0);
        }
        Ok(Self { dims, scheme, gate_up, k_packed, group, groups, width, start, columns })
    }

    /// Tile rows of a matrix.
    pub(crate) fn n_tiles(&self) -> usize {
        let n = self.dims[1];
        if self.gate_up { (n / 2).div_ceil(TILE_ROWS / 2) } else { n.div_ceil(TILE_ROWS) }
    }

    /// Bytes of the tiles of a tile row.
    pub(crate) fn row_bytes(&self) -> usize {
        self.k_packed / tile_columns(self.scheme) * TILE_BYTES
    }

    /// Lines of 16 numbers that are the scales of a tile row: one for each group, and before them, of scales that keep
    /// their two levels, one for all groups.
    pub(crate) fn scale_lines(&self) -> usize {
        if self.scheme.is_q4k() {
            return q4k::lines(self.groups);
        }
        self.groups + usize::from(self.scheme.levels == Levels::Fp8)
    }

    /// Whether each group has its own zero point.
    pub(crate) fn own_zeros(&self) -> bool {
        self.scheme.has_zero_points()
    }

    /// The column of x for each packed column of all matrices, [E, `k_packed`]; `None` if the columns are in the order
    /// of x.
    pub(crate) fn perm(&self) -> Option<Vec<u32>> {
        if self.columns.is_empty() {
            return None;
        }
        Some(self.columns.iter().flat_map(|sorted| &sorted.x).copied().collect())
    }

    /// The rows of the matrix in these tile rows: one range for all rows, or one range for the first and one for the
    /// second eight rows of each.
    pub(crate) fn rows(&self, tiles: Range<usize>) -> [Range<usize>; 2] {
        let n = self.dims[1];
        let of = |first: usize, each: usize, end: usize| {
            (first + tiles.start * each).min(end)..(first + tiles.end * each).min(end)
        };
        match self.gate_up {
            false => [of(0, TILE_ROWS, n), 0..0],
            true => [of(0, TILE_ROWS / 2, n / 2), of(n / 2, TILE_ROWS / 2, n)],
        }
    }

    /// Whether columns are sorted by group, and how.
    pub(crate) fn order(&self) -> ColumnOrder {
        let is_whole = self.dims[2] == self.width && self.k_packed == self.width;
        match self.columns.is_empty() {
            true => ColumnOrder::Input,
            false if is_whole => ColumnOrder::Sorted,
            false => ColumnOrder::Filled,
        }
    }

    /// The logical group of the first column, without act-order.
    pub(crate) fn first_group(&self) -> usize {
        self.start / self.scheme.group_size(self.width)
    }

    /// Reads the rows of tile row `tile` of matrix `e` and packs them.
    ///
    /// # Errors
    /// Rows of a reader that are wrong; the reader's own errors.
    pub(crate) fn pack(
        &self,
        (e, tile): (usize, usize),
        matrix: &dyn QuantRows,
        scratch: &mut TileScratch,
        to: TileRow,
    ) -> Result<()> {
        let TileRow { q, scales, zeros } = to;
        let groups = self.scheme.groups(self.width);
        // Rows that do not exist get weights of zero, with the scales of other rows.
        scratch.coded.clear();
        scratch.coded.resize(TILE_ROWS * self.k_packed, self.scheme.middle());
        scales.fill(0.0);
        zeros.fill(self.scheme.middle());
        let halves = if self.gate_up { TILE_ROWS / 2 } else { TILE_ROWS };
        for (half, range) in self.rows(tile..tile + 1).into_iter().enumerate() {
            let rows = &mut scratch.rows[half];
            if range.is_empty() {
                continue;
            }
            matrix.read(range.clone(), rows)?;
            check_rows(self.scheme, self.width, rows, range.len())
                .map_err(|error| error.context(format!("rows {range:?} of matrix {e}")))?;
            for i in 0..range.len() {
                let lane = half * TILE_ROWS / 2 + i;
                let zero = rows.zero.get(i * groups..).unwrap_or_default();
                if self.scheme.levels == Levels::Fp8 {
                    scales[lane] = rows.scale_levels.shared.get(i).copied().unwrap_or(0.0);
                }
                if self.scheme.is_q4k() {
                    let first = self.first_group();
                    let row = q4k::Row { rows, row: i, groups, lane };
                    q4k::put(self.scheme, &row, first..first + self.groups, scales)?;
                }
                let lines = if self.scheme.is_q4k() { 0 } else { self.groups };
                for group in 0..lines {
                    let from = self.logical_group(e, group).min(groups.max(1) - 1);
                    let line = self.scale_lines() - self.groups + group;
                    scales[line * TILE_ROWS + lane] = self.scale(rows, i * groups + from);
                    if let (Some(to), Some(zero)) = (zeros.get_mut(group * TILE_ROWS + lane), zero.get(from))
                    {
                        *to = *zero;
                    }
                }
                let coded = &mut scratch.coded[lane * self.k_packed..(lane + 1) * self.k_packed];
                self.code(e, &rows.q[i * self.width..(i + 1) * self.width], coded, |group| {
                    zeros.get(group * TILE_ROWS + lane).copied().unwrap_or(self.scheme.middle())
                });
                if self.scheme.codes == Codes::E2m1 {
                    let columns = coded.len().min(self.dims[2]);
                    for (group, codes) in coded[..columns].chunks_mut(self.group).enumerate() {
                        let from = self.logical_group(e, group.min(self.groups - 1)).min(groups.max(1) - 1);
                        fp4::take_scale(codes, self.sign_of_scale(rows, i * groups + from));
                    }
                }
            }
            for scales in scales.chunks_exact_mut(TILE_ROWS) {
                let scales = &mut scales[half * TILE_ROWS / 2..][..halves];
                let last = scales[range.len() - 1];
                scales[range.len()..].fill(last);
            }
        }
        match tile_columns(self.scheme) {
            64 => {
                four_bits(&scratch.coded, self.k_packed, q);
                if self.scheme.codes == Codes::E2m1 {
                    fp4::order_bits(q);
                }
            }
            _ => eight_bits(&scratch.coded, self.k_packed, q),
        }
        Ok(())
    }

    /// What stands for scale `i` of the rows in a line of [`TileRow::scales`].
    fn scale(&self, rows: &LogicalRows, i: usize) -> f32 {
        let scale = match self.scheme.levels {
            Levels::Fp8 => rows.scale_levels.factor.get(i).map(|byte| f32::from(*byte)),
            Levels::One | Levels::Two(_) => rows.scale.get(i).copied(),
        };
        scale.unwrap_or(0.0)
    }

    /// A number with the sign of scale `i` of the rows. It is zero, or NaN, where the scale is. A product of two
    /// levels may be zero although none of them is.
    fn sign_of_scale(&self, rows: &LogicalRows, i: usize) -> f32 {
        match self.scheme.levels {
            Levels::Fp8 => rows.scale_levels.factor.get(i).map_or(0.0, |factor| e4m3(*factor)),
            Levels::One | Levels::Two(_) => rows.scale.get(i).copied().unwrap_or(0.0),
        }
    }

    /// The logical group, counted from the group of the first input, of a packed group of matrix `e`.
    fn logical_group(&self, e: usize, group: usize) -> usize {
        match self.columns.get(e) {
            Some(sorted) => sorted.groups[group] as usize,
            None => self.first_group() + group,
        }
    }

    /// Writes a row in packed order. Columns that do not exist get the zero point of their group, which is a weight of
    /// zero.
    fn code(&self, e: usize, row: &[u8], coded: &mut [u8], zero: impl Fn(usize) -> u8) {
        let group = |column: usize| (column / self.group).min(self.groups - 1);
        match self.columns.get(e) {
            None => {
                let k = self.dims[2];
                coded[..k].copy_from_slice(&row[self.start..self.start + k]);
                (k..self.k_packed).for_each(|column| coded[column] = zero(group(column)));
            }
            Some(sorted) => {
                for (column, (to, from)) in coded.iter_mut().zip(&sorted.logical).enumerate() {
                    *to = match *from {
                        NO_COLUMN => zero(group(column)),
                        from => row[from as usize],
                    };
                }
            }
        }
    }
}

/// Columns of a tile.
pub(crate) fn tile_columns(scheme: QuantScheme) -> usize {
    if scheme.bits() == 4 { 64 } else { 32 }
}

/// The k-steps of a tile for r = 0 .. 7: 16 columns of row r and 16 columns of row r + 8, as two halves of eight
/// integers each.
fn steps(
    coded: &[u8],
    k: usize,
    (tile, columns): (usize, usize),
) -> impl Iterator<Item = [[[u64; 2]; 2]; 8]> {
    let eight = move |row: usize, column: usize| {
        u64::from_le_bytes(coded[row * k + column..].first_chunk().copied().unwrap_or_default())
    };
    (tile * columns..(tile + 1) * columns).step_by(K_STEP).map(move |first| {
        std::array::from_fn(|row| [row, row + 8].map(|row| [eight(row, first), eight(row, first + 8)]))
    })
}

/// The two bytes of a lane, out of eight bytes.
fn pair(bytes: u64, lane: usize) -> u32 {
    u32::from((bytes >> (16 * lane)) as u16)
}

/// In each k-step, lane 4 r + t of a warp holds the columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of the rows r and r + 8.
/// Here (row, column) = (r, 2 t), (r + 8, 2 t), (r, 2 t + 8), (r + 8, 2 t + 8) are at the bits 0, 4, 8 and 12 of a
/// word, and the odd columns are 16 bits higher. The four lanes of a row are computed at once, with 16 bits each.
fn four_bits(coded: &[u8], k: usize, q: &mut [u8]) {
    for (tile, q) in q.chunks_exact_mut(TILE_BYTES).enumerate() {
        let (words, _) = q.as_chunks_mut::<4>();
        for (step, rows) in steps(coded, k, (tile, 64)).enumerate() {
            for (row, [[a, c], [b, d]]) in rows.into_iter().enumerate() {
                let half = |shift: u32| {
                    let of = |x: u64| x >> shift & 0x00ff_00ff_00ff_00ff;
                    of(a) | of(b) << 4 | of(c) << 8 | of(d) << 12
                };
                let even = half(0);
                let odd = half(8);
                for lane in 0..4 {
                    let word = pair(even, lane) | pair(odd, lane) << 16;
                    words[(4 * row + lane) * 4 + step] = word.to_le_bytes();
                }
            }
        }
    }
}

/// [`four_bits`] for integers of 8 bits: bytes of row r are at even places, bytes of row r + 8 at odd ones.
fn eight_bits(coded: &[u8], k: usize, q: &mut [u8]) {
    let apart = |x: u32| {
        let x = u64::from(x);
        let x = (x | x << 16) & 0x0000_ffff_0000_ffff;
        (x | x << 8) & 0x00ff_00ff_00ff_00ff
    };
    for (tile, q) in q.chunks_exact_mut(TILE_BYTES).enumerate() {
        let (words, _) = q.as_chunks_mut::<8>();
        for (step, rows) in steps(coded, k, (tile, 32)).enumerate() {
            for (row, [[a, c], [b, d]]) in rows.into_iter().enumerate() {
                for lane in 0..4 {
                    let low = pair(a, lane) | pair(c, lane) << 16;
                    let high = pair(b, lane) | pair(d, lane) << 16;
                    words[(4 * row + lane) * 2 + step] = (apart(low) | apart(high) << 8).to_le_bytes();
                }
            }
        }
    }
}

#[cfg(test)]
#[path = "tiles_tests.rs"]
mod tests;
