//! What both forms of a product share: packed rows, units, and how sums of segments become totals.

use std::cell::RefCell;
use std::ops::Range;

use crate::cpu::dispatch;
use crate::cpu::product::K_BLOCK;
use crate::cpu::tile::{Shape, UnitSums};
use crate::cpu::units::{Units, even_parts};
use crate::exec::CpuIsa;
use crate::quant::{Block, Columns, QuantStack};

/// How far ahead weights are asked for, bytes.
pub(super) const PREFETCH: usize = 4096;

/// Products of groups of rows, each group with a matrix of its own.
pub(crate) struct QuantProducts<'a, T> {
    /// Rows of x, K values each.
    pub x: &'a [T],
    /// The row of x that row i of the groups reads; `None`: row i.
    pub index: Option<&'a [u32]>,
    /// One matrix per group.
    pub w: &'a QuantStack,
    /// The segments of K that are multiplied.
    pub segments: Range<usize>,
    /// Rows of group g: `offsets[g]..offsets[g + 1]`.
    pub offsets: &'a [u32],
    /// How a matrix is cut.
    pub units: Units,
}

/// How rows of x are packed and a unit is computed.
pub(super) trait Form<T>: Sync {
    /// Words of a packed row for matrix `e`.
    fn row_words(&self, e: usize) -> usize;
    /// Whether a row is packed alike for two matrices.
    fn packs_alike(&self, a: usize, b: usize) -> bool;
    /// Rows of a tile, at most, where a matrix multiplies `m` rows.
    fn tile_rows(&self, e: usize, m: usize) -> usize;
    /// Packs a tile of rows, of `m` that matrix `e` multiplies, as [`unit`](Self::unit) wants them. Returns whether
    /// their scales are [in range](super::shift).
    fn pack(&self, e: usize, m: usize, rows: &[&[T]], panel: &mut [u32]) -> bool;
    /// The sums of packed rows with one unit of matrix `e`. All of `sums` are written if there are columns.
    fn unit(&self, e: usize, unit: Unit, x: Rows, sums: &mut [UnitSums]);
}

/// Packed rows of x.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    pub words: &'a [u32],
    /// Words of a row.
    pub row_words: usize,
    /// Words of a row before the words of the matrix that is multiplied.
    pub first: usize,
    /// Whether all scales are [in range](super::shift).
    pub are_in_range: bool,
}

/// Panels of a unit: the second one may be missing. Then the upper half of the sums is not read.
#[derive(Clone, Copy)]
pub(super) struct Unit {
    pub first: usize,
    pub second: Option<usize>,
}

/// Tiles of m rows, as even as can be: first row and rows.
pub(super) fn tiles(isa: CpuIsa, m: usize) -> impl Iterator<Item = (usize, usize)> {
    even_parts(m, m.div_ceil(dispatch(isa, Shape).1))
}

/// The chains of a segment: its blocks, 256 columns at a time.
pub(super) fn chains(columns: &Columns, segment: usize) -> impl Iterator<Item = &[Block]> {
    let blocks = &columns.blocks[columns.segments[segment].clone()];
    let first = blocks.first().map_or(0, |block| block.start);
    blocks.chunk_by(move |a, b| (a.start - first) / K_BLOCK == (b.start - first) / K_BLOCK)
}

/// Adds the sums of a segment to the totals, or starts the totals with them.
pub(super) fn add(segment: &[UnitSums], total: &mut [UnitSums], add: bool, lanes: Range<usize>) {
    for (total, segment) in total.iter_mut().zip(segment) {
        for (total, segment) in total[lanes.clone()].iter_mut().zip(&segment[lanes.clone()]) {
            *total = if add { *total + segment } else { *segment };
        }
    }
}

thread_local! {
    /// A chain of unpacked weights and the sums of a segment, of the unit that this thread works on; kept so that steps
    /// do not allocate.
    pub(super) static LOCAL: RefCell<(Vec<u32>, Vec<UnitSums>)> = const { RefCell::new((Vec::new(), Vec::new())) };
}
