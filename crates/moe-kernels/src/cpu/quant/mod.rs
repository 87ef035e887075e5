//! Products with quantised weights.
//!
//! There are two forms, chosen by dtype and number format alone, so that a row's bits depend on nothing but its sequence:
//!
//! - [`ints`]: integer weights with bf16 or f16 activations. A block of x (up to 128 columns of one group) becomes 16-bit
//!   fixed point with a scale that is a power of two, finer than the rounding of its largest value; integer products are
//!   exact in any order, and only the sums of blocks are f32. Weights are unpacked in registers for a few rows of x, and
//!   into cache for more ([`unpacked`]), for AMX as bytes ([`matrix_registers`]).
//! - [`floats`]: f32 activations, codes that stand for floats, and minima. Weights become f32 as they are defined and [`super::product`]
//!   multiplies them, with the bits of the dequantised f32 matrix.
//!
//! Work is cut as in [`super::gemm`]: rows of x are packed in waves, and a task is a unit of 32 rows of w for one piece of
//! the rows of x.

mod fixed;
mod floats;
mod ints;
#[cfg(target_arch = "x86_64")]
mod matrix_registers;
mod one_row;
mod shift;
mod unpacked;

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{DType, Result};

use super::dispatch;
use super::gemm::{Epilogue, Units, even_parts};
use super::parallel::{for_each, for_each_item};
use super::product::K_BLOCK;
use super::simd::{LANES, Lanes, Simd};
use super::tile::{CACHE_LINE, Shape, UNIT, UnitSums};
use crate::element::Element;
use crate::exec::{CpuIsa, Exec};
use crate::quant::{Block, Columns, QuantMatrix};
use crate::scheme::Offset;

/// The most rows of x that share the weights of a unit; sums and packed rows stay in the second-level cache.
const PIECE_ROWS: usize = 264;

/// Rows after which a wave is computed.
const WAVE_ROWS: usize = 4 * PIECE_ROWS;

/// How far ahead weights are asked for, bytes.
const PREFETCH: usize = 4096;

/// Products of groups of rows, each group with a matrix of its own.
pub(crate) struct QuantProducts<'a, T> {
    /// Rows of x, K values each.
    pub x: &'a [T],
    /// The row of x that row i of the groups reads; `None`: row i.
    pub index: Option<&'a [u32]>,
    /// One matrix per group.
    pub w: &'a QuantMatrix,
    /// The segments of K that are multiplied.
    pub segments: Range<usize>,
    /// Rows of group g: `offsets[g]..offsets[g + 1]`.
    pub offsets: &'a [u32],
    /// How a matrix is cut.
    pub units: Units,
}

/// Computes the products and hands them to the epilogue.
pub(crate) fn products<T: Lanes>(p: &QuantProducts<T>, ex: &Exec, epilogue: &impl Epilogue) -> Result<()> {
    let (isa, w, segments) = (ex.isa(), p.w, p.segments.clone());
    match (p.w.scheme.offset, <T as Element>::DTYPE) {
        (Offset::Middle | Offset::Zero, DType::BF16 | DType::F16) => {
            Driver { p, ex, epilogue, form: ints::Ints { isa, w, segments } }.run()
        }
        _ => Driver { p, ex, epilogue, form: floats::Floats { isa, w, segments } }.run(),
    }
}

/// How rows of x are packed and a unit is computed.
trait Form<T>: Sync {
    /// Words of a packed row for matrix `e`.
    fn row_words(&self, e: usize) -> usize;
    /// Rows of a tile, at most, where a matrix multiplies `m` rows.
    fn tile_rows(&self, e: usize, m: usize) -> usize;
    /// Packs a tile of rows, of `m` that matrix `e` multiplies, as [`unit`](Self::unit) wants them. Returns whether their scales
    /// are [in range](shift).
    fn pack(&self, e: usize, m: usize, rows: &[&[T]], panel: &mut [u32]) -> bool;
    /// The sums of packed rows with one unit of matrix `e`. All of `sums` are written if there are columns.
    fn unit(&self, e: usize, unit: Unit, x: Rows, sums: &mut [UnitSums]);
}

/// Packed rows of x.
#[derive(Clone, Copy)]
struct Rows<'a> {
    words: &'a [u32],
    /// Words of a row.
    row_words: usize,
    /// Whether all scales are [in range](shift).
    are_in_range: bool,
}

/// Panels of a unit: the second one may be missing.
#[derive(Clone, Copy)]
struct Unit {
    first: usize,
    second: Option<usize>,
}

/// Tiles of m rows, as even as can be: first row and rows.
fn tiles(isa: CpuIsa, m: usize) -> impl Iterator<Item = (usize, usize)> {
    even_parts(m, m.div_ceil(dispatch(isa, Shape).1))
}

/// The chains of a segment: its blocks, 256 columns at a time.
fn chains(columns: &Columns, segment: usize) -> impl Iterator<Item = &[Block]> {
    let blocks = &columns.blocks[columns.segments[segment].clone()];
    let first = blocks.first().map_or(0, |block| block.start);
    blocks.chunk_by(move |a, b| (a.start - first) / K_BLOCK == (b.start - first) / K_BLOCK)
}

/// Adds the sums of a segment to the totals, or starts the totals with them.
fn add(segment: &[UnitSums], total: &mut [UnitSums], add: bool, lanes: Range<usize>) {
    for (total, segment) in total.iter_mut().zip(segment) {
        for (total, segment) in total[lanes.clone()].iter_mut().zip(&segment[lanes.clone()]) {
            *total = if add { *total + segment } else { *segment };
        }
    }
}

/// The words of packed integers, 8 columns of 16 rows, as four vectors of pairs of columns.
trait Quants: Copy + Send + Sync {
    /// Bytes of a step of a panel.
    const STEP_BYTES: usize;
    /// Whether a step holds nibbles, which [`Simd::nibbles_in_place`] gives with fewer shifts.
    const NIBBLES: bool;
    /// The pairs of a step.
    fn pairs<S: Simd>(s: S, step: &[u8]) -> [S::Raw; 4];
}

/// Integers of 4 bits.
#[derive(Clone, Copy)]
struct Nibbles;

/// Integers of 8 bits, or FP8.
#[derive(Clone, Copy)]
struct Bytes;

impl Quants for Nibbles {
    const STEP_BYTES: usize = CACHE_LINE;
    const NIBBLES: bool = true;
    #[inline(always)]
    fn pairs<S: Simd>(s: S, step: &[u8]) -> [S::Raw; 4] {
        s.nibbles(words(s, step))
    }
}

impl Quants for Bytes {
    const STEP_BYTES: usize = 2 * CACHE_LINE;
    const NIBBLES: bool = false;
    #[inline(always)]
    fn pairs<S: Simd>(s: S, step: &[u8]) -> [S::Raw; 4] {
        let (first, second) = step.split_at(CACHE_LINE);
        let ([a, b], [c, d]) = (s.bytes(words(s, first)), s.bytes(words(s, second)));
        [a, b, c, d]
    }
}

/// The words of a cache line.
#[inline(always)]
fn words<S: Simd>(s: S, bytes: &[u8]) -> S::Raw {
    let bytes: &[u8; CACHE_LINE] = &bytes.as_chunks().0[0];
    s.load_bytes(bytes)
}

/// Consecutive rows of one group.
#[derive(Clone, Copy)]
struct Piece {
    group: usize,
    row: usize,
    rows: usize,
    /// First word of its packed rows within the wave.
    word: usize,
    /// Words of a packed row.
    row_words: usize,
    /// Whether it shares its packed row with the piece before.
    shares: bool,
}

struct Driver<'a, T, E, F> {
    p: &'a QuantProducts<'a, T>,
    ex: &'a Exec,
    epilogue: &'a E,
    form: F,
}

thread_local! {
    /// Sums of the unit that this thread works on; kept so that steps do not allocate.
    static SUMS: RefCell<Vec<UnitSums>> = const { RefCell::new(Vec::new()) };
    /// A chain of unpacked weights and the sums of a segment, of the same unit.
    static LOCAL: RefCell<(Vec<u32>, Vec<UnitSums>)> = const { RefCell::new((Vec::new(), Vec::new())) };
}

impl<T: Lanes, E: Epilogue, F: Form<T>> Driver<'_, T, E, F> {
    fn run(&self) -> Result<()> {
        let (mut wave, mut rows, mut words) = (Vec::new(), 0, 0);
        for (group, bounds) in self.p.offsets.windows(2).enumerate() {
            let (first, count) = (bounds[0] as usize, (bounds[1] - bounds[0]) as usize);
            let row_words = if count > 0 { self.form.row_words(group) } else { 0 };
            for (start, rows_of) in even_parts(count, count.div_ceil(PIECE_ROWS)) {
                let piece =
                    Piece { group, row: first + start, rows: rows_of, word: words, row_words, shares: false };
                let same = wave.last().filter(|last| self.have_same_words(last, &piece));
                let piece = same.map_or(piece, |same| Piece { word: same.word, shares: true, ..piece });
                words = piece.word + rows_of * row_words;
                rows += rows_of;
                wave.push(piece);
                if rows >= WAVE_ROWS {
                    self.wave(&wave, words)?;
                    wave.clear();
                    (rows, words) = (0, 0);
                }
            }
        }
        if rows > 0 { self.wave(&wave, words) } else { Ok(()) }
    }

    /// Whether both are the same row of x, in the same order of columns: a token for one expert after the other.
    fn have_same_words(&self, a: &Piece, b: &Piece) -> bool {
        let columns = |piece: &Piece| &self.p.w.parts[piece.group].columns;
        let row = |piece: &Piece| self.p.index.map_or(piece.row, |index| index[piece.row] as usize);
        a.rows == 1 && b.rows == 1 && row(a) == row(b) && Arc::ptr_eq(columns(a), columns(b))
    }

    /// Packs the rows of the pieces and computes all their units.
    fn wave(&self, pieces: &[Piece], words: usize) -> Result<()> {
        let units = self.p.units.count();
        if units == 0 {
            return Ok(());
        }
        let mut scratch = self.ex.scratch(DType::U32, &[self.most_words() + LANES])?;
        let mut view = scratch.view_mut();
        // From a cache line on, so that words of a row do not lie across two more than they must.
        let packed = view.cpu_mut::<u32>()?;
        let first = packed.as_ptr().align_offset(CACHE_LINE).min(LANES);
        let packed = &mut packed[first..][..words];
        let (mut rest, mut jobs) = (&mut *packed, Vec::new());
        for piece in pieces.iter().filter(|piece| !piece.shares) {
            let most = self.form.tile_rows(piece.group, piece.rows);
            for (start, m) in even_parts(piece.rows, piece.rows.div_ceil(most)) {
                let (panel, tail) = rest.split_at_mut(m * piece.row_words);
                rest = tail;
                jobs.push((piece, piece.row + start, m, panel));
            }
        }
        let are_in_range = AtomicBool::new(true);
        for_each_item(self.ex, jobs, words, |(piece, row, m, panel)| {
            if !self.form.pack(piece.group, piece.rows, &self.x_rows(row, m)[..m], panel) {
                are_in_range.store(false, Ordering::Relaxed);
            }
        });
        let are_in_range = are_in_range.into_inner();
        let packed = &*packed;
        let words: usize = pieces.iter().map(|piece| piece.rows * piece.row_words).sum();
        for_each(self.ex, pieces.len() * units, words * units * UNIT, |task| {
            let (piece, unit) = (pieces[task / units], task % units);
            let (row_words, words) = (piece.row_words, &packed[piece.word..][..piece.rows * piece.row_words]);
            let x = Rows { words, row_words, are_in_range };
            SUMS.with_borrow_mut(|sums| {
                sums.resize(sums.len().max(piece.rows), [0.0; UNIT]);
                let sums = &mut sums[..piece.rows];
                if row_words == 0 {
                    sums.fill([0.0; UNIT]);
                }
                self.form.unit(piece.group, self.panels(unit), x, sums);
                self.epilogue.take(piece.group, piece.row, unit, sums);
            });
        });
        Ok(())
    }

    /// Words of the largest wave that there can be: waves of many sizes share one buffer.
    fn most_words(&self) -> usize {
        let rows = self.p.offsets.last().zip(self.p.offsets.first()).map_or(0, |(last, first)| last - first);
        let row = (0..self.p.w.parts.len()).map(|e| self.form.row_words(e)).max().unwrap_or(0);
        (rows as usize).min(WAVE_ROWS + PIECE_ROWS) * row
    }

    /// The panels of a unit.
    fn panels(&self, unit: usize) -> Unit {
        let all = self.p.w.panels();
        match self.p.units {
            Units::Rows(_) => Unit { first: 2 * unit, second: (2 * unit + 1 < all).then_some(2 * unit + 1) },
            Units::GateUp(_) => Unit { first: unit, second: Some(all / 2 + unit) },
        }
    }

    /// The rows of a tile of x; places past the end repeat the last.
    fn x_rows(&self, row: usize, m: usize) -> [&[T]; LANES] {
        let k = self.p.w.dims[2];
        std::array::from_fn(|j| {
            let i = row + j.min(m - 1);
            let i = self.p.index.map_or(i, |index| index[i] as usize);
            &self.p.x[i * k..][..k]
        })
    }
}
