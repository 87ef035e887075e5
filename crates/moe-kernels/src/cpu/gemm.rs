//! The driver of all products: dense and grouped by expert, for one row or thousands.
//!
//! Work is cut into units of 32 rows of w for one group of rows of x. A unit with few rows
//! streams its weights ([`super::stream`]); one with more packs each chain of its weights once
//! and multiplies it with every tile of x ([`super::tile`]). Rows of x are packed before, in
//! waves of bounded size, so that scratch does not grow with the number of tokens.

use std::cell::RefCell;
use std::marker::PhantomData;

use candle_core::{DType, Result};

use super::dispatch;
use super::pack::Pack;
use super::parallel::{for_each, for_each_item};
use super::product::{Chain, K_BLOCK, Pair, Single, Step, chains, row_words};
use super::simd::{LANES, Lanes};
use super::stream::{Next, Stream};
use super::tile::{Ahead, CACHE_LINE, MAX_ROWS, Shape, Tile, UNIT, UnitSums};
use crate::element::Element;
use crate::exec::{CpuIsa, Exec};

/// The most rows of x that share a packed chain of weights. The panel costs about as much as
/// eight rows; the sums of a unit and the tiles of x stay in the second-level cache.
const PIECE_ROWS: usize = 240;

/// Rows of x that are packed at a time.
const WAVE_ROWS: usize = 960;

/// Which rows of a matrix form a unit.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Units {
    /// 32 consecutive rows of n.
    Rows(usize),
    /// 16 consecutive gate rows and the 16 up rows that belong to them, of a matrix of
    /// `width` gate rows and then `width` up rows.
    GateUp(usize),
}

impl Units {
    fn count(self) -> usize {
        match self {
            Self::Rows(n) => n.div_ceil(UNIT),
            Self::GateUp(width) => width.div_ceil(LANES),
        }
    }

    /// The matrix row of place j of a unit; places past the end repeat the last row.
    fn row(self, unit: usize, j: usize) -> usize {
        match self {
            Self::Rows(n) => (unit * UNIT + j).min(n - 1),
            Self::GateUp(width) => j / LANES * width + (unit * LANES + j % LANES).min(width - 1),
        }
    }

    /// Rows from a unit to the next.
    fn stride(self) -> usize {
        match self {
            Self::Rows(_) => UNIT,
            Self::GateUp(_) => LANES,
        }
    }
}

/// Products of groups of rows, each group with a matrix of its own.
pub(crate) struct Products<'a, T> {
    /// Rows of x, `k` values each.
    pub x: &'a [T],
    /// The row of x that row i of the groups reads; `None`: row i.
    pub index: Option<&'a [u32]>,
    /// One matrix per group, [matrix_rows, k] each.
    pub w: &'a [T],
    /// Rows of a matrix.
    pub matrix_rows: usize,
    /// Length of the products.
    pub k: usize,
    /// Segments of k; see [`super::product`].
    pub segments: usize,
    /// Rows of group g: `offsets[g]..offsets[g + 1]`.
    pub offsets: &'a [u32],
    /// How a matrix is cut.
    pub units: Units,
}

/// What becomes of the sums.
pub(crate) trait Epilogue: Sync {
    /// Takes the sums of consecutive rows, from `row`, with one unit of the matrix of `group`.
    /// Called once per row and unit, from any thread.
    fn take(&self, group: usize, row: usize, unit: usize, sums: &[UnitSums]);
}

/// Computes the products and hands them to the epilogue.
pub(crate) fn products<T: Lanes>(p: &Products<T>, ex: &Exec, epilogue: &impl Epilogue) -> Result<()> {
    if ex.isa() == CpuIsa::Avx512Bf16 && <T as Element>::DTYPE == DType::BF16 {
        Driver { p, ex, epilogue, step: PhantomData::<Pair> }.run()
    } else {
        Driver { p, ex, epilogue, step: PhantomData::<Single> }.run()
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

impl Piece {
    /// First row and number of rows of tile i: as even as `most` rows per tile allow.
    fn tiles(self, most: usize) -> impl Iterator<Item = (usize, usize)> {
        even_parts(self.rows, self.rows.div_ceil(most))
    }
}

/// Start and length of `parts` parts of `total`, which differ by one at most.
fn even_parts(total: usize, parts: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..parts).scan(0, move |start, i| {
        let len = total / parts + usize::from(i < total % parts);
        *start += len;
        Some((*start - len, len))
    })
}

struct Driver<'a, T, E, P> {
    p: &'a Products<'a, T>,
    ex: &'a Exec,
    epilogue: &'a E,
    step: PhantomData<P>,
}

thread_local! {
    /// Panel and sums of the unit that this thread works on; kept so that steps do not allocate.
    static LOCAL: RefCell<(Vec<u32>, Vec<UnitSums>)> = const { RefCell::new((Vec::new(), Vec::new())) };
}

impl<T: Lanes, E: Epilogue, P: Step> Driver<'_, T, E, P> {
    fn run(&self) -> Result<()> {
        if self.p.units.count() == 0 {
            return Ok(());
        }
        let mut wave = Vec::new();
        let mut packed = 0;
        for (group, bounds) in self.p.offsets.windows(2).enumerate() {
            let (first, rows) = (bounds[0] as usize, (bounds[1] - bounds[0]) as usize);
            for (start, rows) in even_parts(rows, rows.div_ceil(PIECE_ROWS)) {
                wave.push(Piece { group, row: first + start, rows, packed });
                packed += rows;
                if packed >= WAVE_ROWS {
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
        let (_, most) = dispatch(self.ex.isa(), Shape);
        let words = row_words(self.p.k, self.p.segments, P::DEPTH);
        let mut scratch = self.ex.scratch(DType::U32, &[rows, words])?;
        let mut view = scratch.view_mut();
        let packed = view.cpu_mut::<u32>()?;
        let mut rest = &mut *packed;
        let mut tiles = Vec::with_capacity(rows.div_ceil(most) + pieces.len());
        for piece in pieces {
            for (start, m) in piece.tiles(most) {
                let (panel, tail) = rest.split_at_mut(m * words);
                rest = tail;
                tiles.push((piece.row + start, m, panel));
            }
        }
        for_each_item(self.ex, tiles, rows * words, |(row, m, panel)| self.pack_x(row, m, panel));
        let packed = &*packed;
        let units = self.p.units.count();
        for_each(self.ex, pieces.len() * units, rows * words * units * UNIT, |task| {
            let piece = pieces[task / units];
            let x = &packed[piece.packed * words..][..piece.rows * words];
            if piece.rows <= most {
                self.stream(piece, task % units, x);
            } else {
                LOCAL.with_borrow_mut(|(panel, sums)| self.tiled(piece, task % units, x, panel, sums));
            }
        });
        Ok(())
    }

    fn chains(&self) -> impl Iterator<Item = Chain> {
        chains(self.p.k, self.p.segments, P::DEPTH)
    }

    /// Packs a tile of x.
    fn pack_x(&self, row: usize, m: usize, panel: &mut [u32]) {
        let rows: [&[T]; LANES] = std::array::from_fn(|j| {
            let i = row + j.min(m - 1);
            let i = self.p.index.map_or(i, |index| index[i] as usize);
            &self.p.x[i * self.p.k..(i + 1) * self.p.k]
        });
        for chain in self.chains() {
            let out = &mut panel[chain.word * m..];
            let range = chain.start..chain.start + chain.len;
            dispatch(self.ex.isa(), Pack { rows: &rows, range, stride: m, out, step: self.step });
        }
    }

    fn unit_rows(&self, group: usize, unit: usize) -> [&[T]; UNIT] {
        let (k, matrix_rows) = (self.p.k, self.p.matrix_rows);
        let w = &self.p.w[group * matrix_rows * k..(group + 1) * matrix_rows * k];
        std::array::from_fn(|j| {
            let row = self.p.units.row(unit, j);
            &w[row * k..(row + 1) * k]
        })
    }

    /// One unit for a piece of one tile.
    fn stream(&self, piece: Piece, unit: usize, x: &[u32]) {
        let mut sums = [[0.0; UNIT]; MAX_ROWS];
        let out = &mut sums[..piece.rows];
        dispatch(
            self.ex.isa(),
            Stream {
                rows: &self.unit_rows(piece.group, unit),
                next: Next::Unit(self.p.units.stride() * self.p.k),
                x,
                m: piece.rows,
                segments: self.p.segments,
                out,
                step: self.step,
            },
        );
        self.epilogue.take(piece.group, piece.row, unit, &sums[..piece.rows]);
    }

    /// One unit for a piece of several tiles.
    fn tiled(&self, piece: Piece, unit: usize, x: &[u32], panel: &mut Vec<u32>, sums: &mut Vec<UnitSums>) {
        let (vectors, _) = dispatch(self.ex.isa(), Shape);
        panel.resize(K_BLOCK * LANES * vectors, 0);
        sums.clear();
        sums.resize(2 * piece.rows, [0.0; UNIT]);
        let (total, segment) = sums.split_at_mut(piece.rows);
        let rows = self.unit_rows(piece.group, unit);
        for vector in (0..2).step_by(vectors) {
            let rows = &rows[vector * LANES..(vector + vectors) * LANES];
            for chain in self.chains() {
                let panel = &mut panel[..chain.len.div_ceil(P::DEPTH) * LANES * vectors];
                for (i, rows) in rows.as_chunks().0.iter().enumerate() {
                    let (out, range) = (&mut panel[i * LANES..], chain.start..chain.start + chain.len);
                    let stride = LANES * vectors;
                    dispatch(self.ex.isa(), Pack { rows, range, stride, out, step: self.step });
                }
                let to = if chain.to_segment { &mut *segment } else { &mut *total };
                self.tiles(piece, x, panel, rows, vector, chain, to);
                if let Some(add) = chain.flush {
                    flush(segment, total, add, vector * LANES..(vector + vectors) * LANES);
                }
            }
        }
        self.epilogue.take(piece.group, piece.row, unit, total);
    }

    /// All tiles of a piece over one packed chain, while the weights of the next one are fetched.
    #[allow(clippy::too_many_arguments)]
    fn tiles(
        &self,
        piece: Piece,
        x: &[u32],
        w: &[u32],
        rows: &[&[T]],
        vector: usize,
        chain: Chain,
        to: &mut [UnitSums],
    ) {
        let (_, most) = dispatch(self.ex.isa(), Shape);
        let (words, chain_words) =
            (row_words(self.p.k, self.p.segments, P::DEPTH), chain.len.div_ceil(P::DEPTH));
        let end = chain.start + chain.len;
        let next = if end < self.p.k { end } else { self.p.units.stride() * self.p.k };
        let mut starts = [std::ptr::null(); UNIT];
        for (start, row) in starts.iter_mut().zip(rows) {
            *start = row.as_ptr().wrapping_add(next).cast();
        }
        let lines = rows.len() * (chain.len * size_of::<T>()).div_ceil(CACHE_LINE);
        let parts = even_parts(lines, piece.rows.div_ceil(most));
        for ((start, m), (first, count)) in piece.tiles(most).zip(parts) {
            let tile = Tile {
                x: &x[start * words + chain.word * m..][..chain_words * m],
                w,
                m,
                vector,
                out: &mut to[start..start + m],
                add: chain.add,
                ahead: Ahead { rows: &starts[..rows.len()], first, count },
                step: self.step,
            };
            dispatch(self.ex.isa(), tile);
        }
    }
}

/// Adds the sums of a segment to the totals, or starts the totals with them.
fn flush(segment: &[UnitSums], total: &mut [UnitSums], add: bool, lanes: std::ops::Range<usize>) {
    for (total, segment) in total.iter_mut().zip(segment) {
        for (total, segment) in total[lanes.clone()].iter_mut().zip(&segment[lanes.clone()]) {
            *total = if add { *total + segment } else { *segment };
        }
    }
}
