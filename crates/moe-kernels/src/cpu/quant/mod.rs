//! Products with quantised weights.
//!
//! There are two forms, chosen by dtype and number format alone, so that a row's bits depend on nothing but its
//! sequence:
//!
//! - [`ints`]: weights that are integers, or values of a table that stands for integers, with bf16 or f16 activations.
//!   A block of x (up to 128 columns of one group) becomes 16-bit fixed point with a scale that is a power of two,
//!   finer than the rounding of its largest value; integer products are exact in any order, and only the sums of
//!   blocks are f32. Weights are unpacked in registers for a few rows of x, and into cache for more ([`unpacked`]),
//!   for AMX as bytes ([`matrix_registers`]).
//! - [`floats`]: f32 activations, and FP8. Weights become f32 as they are defined and
//!   [`super::product`]
//!   multiplies them, with the bits of the dequantised f32 matrix.
//!
//! Matrices of several formats under each other ([`stacked`]) are multiplied panel by panel, each in its form.
//!
//! Work is cut as in [`super::gemm`]: rows of x are packed in waves, and a task is a unit of 32 rows of w for one piece
//! of the rows of x.

mod block;
mod fixed;
mod floats;
mod form;
mod ints;
#[cfg(target_arch = "x86_64")]
mod matrix_registers;
mod one_row;
mod panel;
mod quants;
mod row;
mod shift;
mod stacked;
mod unpacked;

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{DType, Result};

use super::parallel::{for_each, for_each_item};
use super::simd::{LANES, Lanes};
use super::tile::{CACHE_LINE, UNIT, UnitSums};
use super::units::{Epilogue, Units, even_parts};
use crate::exec::Exec;
pub(crate) use form::QuantProducts;
use form::{Form, Rows, Unit};
use stacked::{FormOf, Stacked, form_of};

/// The most rows of x that share the weights of a unit; sums and packed rows stay in the second-level cache.
const PIECE_ROWS: usize = 264;

/// Rows after which a wave is computed.
const WAVE_ROWS: usize = 4 * PIECE_ROWS;

/// Computes the products and hands them to the epilogue.
pub(crate) fn products<T: Lanes>(p: &QuantProducts<T>, ex: &Exec, epilogue: &impl Epilogue) -> Result<()> {
    let [w] = p.w.matrices() else {
        return Driver { p, ex, epilogue, form: Stacked::new(p, ex.isa()) }.run();
    };
    match form_of::<T>(w, p.segments.clone(), ex.isa()) {
        FormOf::Ints(form) => Driver { p, ex, epilogue, form }.run(),
        FormOf::Floats(form) => Driver { p, ex, epilogue, form }.run(),
    }
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
}

impl<T: Lanes, E: Epilogue, F: Form<T>> Driver<'_, T, E, F> {
    fn run(&self) -> Result<()> {
        let mut wave = Vec::new();
        let mut rows = 0;
        let mut words = 0;
        for (group, bounds) in self.p.offsets.windows(2).enumerate() {
            let first = bounds[0] as usize;
            let count = (bounds[1] - bounds[0]) as usize;
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
        let row = |piece: &Piece| self.p.index.map_or(piece.row, |index| index[piece.row] as usize);
        a.rows == 1 && b.rows == 1 && row(a) == row(b) && self.form.packs_alike(a.group, b.group)
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
        let mut rest = &mut *packed;
        let mut jobs = Vec::new();
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
            let piece = pieces[task / units];
            let unit = task % units;
            let row_words = piece.row_words;
            let words = &packed[piece.word..][..piece.rows * piece.row_words];
            let x = Rows { words, row_words, first: 0, are_in_range };
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
        let row = (0..self.p.w.dims()[0]).map(|e| self.form.row_words(e)).max().unwrap_or(0);
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
        let k = self.p.w.dims()[2];
        std::array::from_fn(|j| {
            let i = row + j.min(m - 1);
            let i = self.p.index.map_or(i, |index| index[i] as usize);
            &self.p.x[i * k..][..k]
        })
    }
}
