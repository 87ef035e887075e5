//! The driver of all products: dense and grouped by expert, for one row or thousands.
//!
//! Work is divided into units of 32 rows of w for one piece of the rows of x. Rows of x are packed before, in waves of
//! bounded size, so that scratch does not grow with the number of tokens. A [`Method`] says how they are packed and how
//! a unit is computed: on vector registers ([`super::vectors`], [`super::pairs`]) or on matrix registers
//! ([`super::amx`]).

use candle_core::{DType, Result};

#[cfg(target_arch = "x86_64")]
use super::amx::Amx;
#[cfg(target_arch = "x86_64")]
use super::pairs::Pairs;
use super::parallel::{for_each, for_each_item};
use super::simd::{LANES, Lanes};
use super::tile::{CACHE_LINE, UNIT};
use super::units::{Epilogue, Method, UnitWeights, Units, Work, even_parts};
use super::vectors::Vectors;
#[cfg(target_arch = "x86_64")]
use crate::exec::CpuIsa;
use crate::exec::Exec;
use crate::storage::Element;
use crate::weight::WeightOrder;

/// Pieces of the largest size whose rows are packed at a time.
const WAVE_PIECES: usize = 4;

/// Products of groups of rows, each group with a matrix of its own.
pub(crate) struct Products<'a, T> {
    /// Rows of x, `stride` values each.
    pub x: &'a [T],
    /// The row of x that row i of the groups reads; `None`: row i.
    pub index: Option<&'a [u32]>,
    /// One matrix per group, [matrix_rows, stride] each.
    pub w: &'a [T],
    /// The order of the values of each matrix. In panels, the number of rows of units is a multiple of 16, and the
    /// number of columns is even.
    pub order: WeightOrder,
    /// Rows of a matrix.
    pub matrix_rows: usize,
    /// Length of the products.
    pub k: usize,
    /// Values from a row of x or w to the next: k, unless only some columns are multiplied.
    pub stride: usize,
    /// First column that is multiplied.
    pub start: usize,
    /// Segments of k; see [`super::product`].
    pub segments: usize,
    /// Rows of group g: `offsets[g]..offsets[g + 1]`.
    pub offsets: &'a [u32],
    /// How a matrix is cut.
    pub units: Units,
}

/// Computes the products and hands them to the epilogue.
pub(crate) fn products<T: Lanes>(p: &Products<T>, ex: &Exec, epilogue: &impl Epilogue) -> Result<()> {
    let isa = ex.isa();
    let panels = p.order == WeightOrder::Panels;
    match (isa, <T as Element>::DTYPE) {
        #[cfg(target_arch = "x86_64")]
        (CpuIsa::AmxBf16, DType::BF16) if panels => {
            candle_core::bail!("weights of bf16 in panels were packed for another path than {}", isa.name())
        }
        #[cfg(target_arch = "x86_64")]
        (CpuIsa::AmxBf16, DType::BF16) => Driver { p, ex, epilogue, method: Amx }.run(),
        #[cfg(target_arch = "x86_64")]
        (CpuIsa::Avx512Dot, DType::BF16) => Driver { p, ex, epilogue, method: Pairs }.run(),
        _ => Driver { p, ex, epilogue, method: Vectors { isa, panels } }.run(),
    }
}

/// Consecutive rows of one group.
#[derive(Clone, Copy)]
struct Piece {
    group: usize,
    row: usize,
    rows: usize,
    /// First packed row within the wave.
    packed: usize,
}

struct Driver<'a, T, E, M> {
    p: &'a Products<'a, T>,
    ex: &'a Exec,
    epilogue: &'a E,
    method: M,
}

impl<T: Lanes, E: Epilogue, M: Method<T>> Driver<'_, T, E, M> {
    fn run(&self) -> Result<()> {
        if self.p.units.count() == 0 {
            return Ok(());
        }
        let mut wave = Vec::new();
        let mut packed = 0;
        for (group, bounds) in self.p.offsets.windows(2).enumerate() {
            let first = bounds[0] as usize;
            let rows = (bounds[1] - bounds[0]) as usize;
            for (start, rows) in even_parts(rows, rows.div_ceil(M::PIECE_ROWS)) {
                wave.push(Piece { group, row: first + start, rows, packed });
                packed += rows;
                if packed >= WAVE_PIECES * M::PIECE_ROWS {
                    self.wave(&wave, packed)?;
                    wave.clear();
                    packed = 0;
                }
            }
        }
        if packed > 0 { self.wave(&wave, packed) } else { Ok(()) }
    }

    /// Packs the rows of the pieces and computes all their units.
    fn wave(&self, pieces: &[Piece], rows: usize) -> Result<()> {
        let words = self.method.row_words(self.p.k, self.p.segments);
        // The buffer has the size of the largest possible wave, so that waves of all sizes share one buffer.
        let most = self.num_rows().min((WAVE_PIECES + 1) * M::PIECE_ROWS);
        let mut scratch = self.ex.scratch(DType::U32, &[most * words + LANES])?;
        let mut view = scratch.view_mut();
        // It begins at a cache line, so that 16 words are never in two lines.
        let packed = view.cpu_mut::<u32>()?;
        let first = packed.as_ptr().align_offset(CACHE_LINE).min(LANES);
        let packed = &mut packed[first..];
        let mut rest = &mut *packed;
        let mut tiles = Vec::with_capacity(rows);
        for piece in pieces {
            for (start, m) in self.method.tiles(piece.rows) {
                let (panel, tail) = rest.split_at_mut(m * words);
                rest = tail;
                tiles.push((piece.row + start, m, panel));
            }
        }
        for_each_item(self.ex, tiles, rows * words, |(row, m, panel)| {
            self.method.pack(&self.x_rows(row, m), m, self.p.segments, panel);
        });
        let packed = &*packed;
        let units = self.p.units.count();
        for_each(self.ex, pieces.len() * units, rows * words * units * UNIT, |task| {
            let piece = pieces[task / units];
            let unit = task % units;
            let rows;
            let weights = match self.p.order {
                WeightOrder::Rows => {
                    rows = self.unit_rows(piece.group, unit);
                    UnitWeights::Rows(&rows)
                }
                WeightOrder::Panels => UnitWeights::Panels(self.unit_panels(piece.group, unit)),
            };
            let work = Work {
                weights,
                next: self.p.units.stride() * self.p.stride,
                x: &packed[piece.packed * words..][..piece.rows * words],
                m: piece.rows,
                segments: self.p.segments,
            };
            self.method.unit(&work, |sums| self.epilogue.take(piece.group, piece.row, unit, sums));
        });
        Ok(())
    }

    /// Rows of all groups.
    fn num_rows(&self) -> usize {
        match self.p.offsets {
            [first, .., last] => (last - first) as usize,
            _ => 0,
        }
    }

    /// The rows of a tile of x.
    fn x_rows(&self, row: usize, m: usize) -> [&[T]; LANES] {
        std::array::from_fn(|j| {
            let i = row + j.min(m - 1);
            let i = self.p.index.map_or(i, |index| index[i] as usize);
            &self.p.x[i * self.p.stride + self.p.start..][..self.p.k]
        })
    }

    /// The matrix of a group.
    fn matrix(&self, group: usize) -> &[T] {
        let len = self.p.matrix_rows * self.p.stride;
        &self.p.w[group * len..(group + 1) * len]
    }

    fn unit_rows(&self, group: usize, unit: usize) -> [&[T]; UNIT] {
        let Products { k, stride, start, units, .. } = *self.p;
        let w = self.matrix(group);
        std::array::from_fn(|j| &w[units.row(unit, j) * stride + start..][..k])
    }

    fn unit_panels(&self, group: usize, unit: usize) -> [&[T]; 2] {
        let Products { k, stride, start, units, .. } = *self.p;
        let w = self.matrix(group);
        [0, LANES].map(|j| {
            let first = units.row(unit, j) / LANES * LANES;
            &w[first * stride + start * LANES..][..k * LANES]
        })
    }
}
