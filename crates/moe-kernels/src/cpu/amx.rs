//! Units of a product on the matrix registers of AMX, for bf16.
//!
//! A tile instruction multiplies 16 rows of w with 16 columns of x over 32 values of k. Rows of w are loaded in the
//! order of the checkpoint; only x is packed, pairs of k by columns.

mod tiles;

use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
use std::cell::RefCell;
use std::ops::Range;

pub(crate) use self::tiles::release;
pub(crate) use self::tiles::{
    ByteSums, PEAK_FLOP, configure_bytes, is_supported, is_supported_int8, multiply_bytes, peak, take_bytes,
};
use self::tiles::{EMPTY, STEP, STEP_WORDS, TileSums, configure, multiply, store, zero};
use super::pack::Pack;
use super::simd::{LANES, Lanes, Simd};
use super::tile::{UNIT, UnitSums};
use super::units::{Method, UnitWeights, Work, even_parts};
use super::{Kernel, avx512};

/// Steps between the cache line in use and the line that is prefetched while weights stream. The processor prefetches
/// by itself, too; this additional lead keeps the loads of a tile from waiting.
const STREAM_LEAD: usize = 2;

/// The matrix registers. They are used only on the path `CpuIsa::AmxBf16` and for T = bf16. That path is chosen only
/// where [`is_supported`] is true; every `SAFETY` line below relies on that.
pub(crate) struct Amx;

/// Buffers of a unit. Tiles start at cache lines: rows across two are stored at half the speed.
#[repr(C, align(64))]
struct Local {
    /// Sums of the tiles of a block, and of its current segment.
    total: [TileSums; 4],
    partial: [TileSums; 4],
    /// Sums of all rows.
    sums: Vec<UnitSums>,
}

thread_local! {
    /// The buffers are kept per thread, so that units neither allocate nor clear them.
    static LOCAL: RefCell<Local> =
        const { RefCell::new(Local { total: [EMPTY; 4], partial: [EMPTY; 4], sums: Vec::new() }) };
}

/// Steps of a segment of K; the last one is padded with zeros.
fn segment_steps(k: usize, segments: usize) -> usize {
    (k / segments).div_ceil(STEP)
}

impl<T: Lanes> Method<T> for Amx {
    /// The packed rows stay in the second-level cache.
    const PIECE_ROWS: usize = 256;

    /// All tiles but the last are full, because only their rows are whole cache lines.
    fn tiles(&self, m: usize) -> impl Iterator<Item = (usize, usize)> {
        (0..m).step_by(LANES).map(move |start| (start, LANES.min(m - start)))
    }

    fn row_words(&self, k: usize, segments: usize) -> usize {
        segments * segment_steps(k, segments) * STEP_WORDS
    }

    fn pack(&self, rows: &[&[T]; LANES], m: usize, segments: usize, panel: &mut [u32]) {
        let k = rows[0].len();
        let length = k / segments;
        let words = segment_steps(k, segments) * STEP_WORDS;
        for segment in 0..segments {
            let range = segment * length..(segment + 1) * length;
            let out = &mut panel[segment * words * m..];
            let pack = Pack::<T, 2> { rows, range, stride: m, out };
            // SAFETY: the path has what AVX-512 with VNNI has.
            unsafe { avx512::run_vnni(pack) };
            panel[segment * words * m..][length.div_ceil(2) * m..words * m].fill(0);
        }
    }

    fn unit(&self, work: &Work<T>, take: impl FnOnce(&[UnitSums])) {
        let UnitWeights::Rows(rows) = work.weights else {
            unreachable!("products refuse panels on this path")
        };
        LOCAL.with_borrow_mut(|local| {
            local.sums.resize(work.m, [0.0; UNIT]);
            let blocks = work.m.div_ceil(2 * LANES);
            let mut tiles = Method::<T>::tiles(self, work.m);
            for (first_row, count) in even_parts(UNIT, blocks) {
                let Some(first) = tiles.next() else { break };
                let second = tiles.next().unwrap_or((first.0 + first.1, 0));
                let ahead =
                    if blocks == 1 { Ahead::Stream } else { Ahead::Next(first_row..first_row + count) };
                let block = Block { work, rows, tiles: [first, second], ahead, local: &mut *local };
                // SAFETY: as above.
                unsafe { avx512::run_vnni(block) };
            }
            take(&local.sums);
        });
    }
}

/// What a block fetches while it computes.
enum Ahead {
    /// The lines of w that the block needs soon; after the end of its rows, the lines of the next unit.
    Stream,
    /// The block's share of the next unit: these rows, one line of each per step.
    Next(Range<usize>),
}

/// A unit times one or two tiles of x.
struct Block<'a, T> {
    work: &'a Work<'a, T>,
    rows: &'a [&'a [T]; UNIT],
    /// First row and number of rows of each tile of x; the second may be empty.
    tiles: [(usize, usize); 2],
    ahead: Ahead,
    local: &'a mut Local,
}

impl<T: Lanes> Kernel for Block<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let rows = self.rows;
        let segments = self.work.segments;
        let steps = segment_steps(rows[0].len(), segments);
        let x = self.work.x;
        let tiles = self.tiles;
        let all = segments * steps;
        let m = tiles.map(|(_, m)| m);
        let Local { sums, total, partial } = &mut *self.local;
        let mut w = Rows::new(rows);
        configure(m);
        for segment in 0..segments {
            zero(m[1] > 0);
            for step in segment * steps..(segment + 1) * steps {
                self.ahead.ask(rows, step, all, self.work.next);
                let x = [x_words(x, tiles[0], all, step), x_words(x, tiles[1], all, step)];
                // SAFETY: the registers are configured for these tiles, and w gives readable rows.
                unsafe { multiply(w.step(segment, step - segment * steps, segments), x) };
            }
            if segment == 0 {
                store(total, m);
            } else {
                store(partial, m);
                add(s, total, partial, m);
            }
        }
        release();
        for (i, tile) in total.iter().enumerate() {
            let (start, m) = tiles[i / 2];
            put(s, tile, i % 2, &mut sums[start..start + m]);
        }
    }
}

/// The words of a tile of x from a step on, and the rows of the tile.
#[inline(always)]
fn x_words(x: &[u32], (first, m): (usize, usize), steps: usize, step: usize) -> (&[u32], usize) {
    (&x[(first * steps + step * m) * STEP_WORDS..], m)
}

/// The rows of a unit, step by step.
struct Rows<'a, T> {
    rows: &'a [&'a [T]; UNIT],
    /// Whether the rows of a vector are a constant distance apart in memory. Rows that repeat the last one are not.
    strided: [bool; 2],
    /// A copy of the rows' steps at the end of a segment or of the matrix, where they are not whole in memory.
    staged: Option<[[T; STEP]; UNIT]>,
}

impl<'a, T: Lanes> Rows<'a, T> {
    fn new(rows: &'a [&'a [T]; UNIT]) -> Self {
        let strided = [0, LANES].map(|first| {
            let end = rows[first].as_ptr().wrapping_add((LANES - 1) * rows[first].len());
            rows[first + LANES - 1].as_ptr() == end
        });
        Self { rows, strided, staged: None }
    }

    /// For both vectors: the address at which the 16 rows of a step begin, and the bytes from row to row.
    #[inline(always)]
    fn step(&mut self, segment: usize, step: usize, segments: usize) -> [(*const T, usize); 2] {
        let k = self.rows[0].len();
        let at = segment * (k / segments) + step * STEP;
        let len = STEP.min((segment + 1) * (k / segments) - at);
        [self.vector(0, at, len), self.vector(1, at, len)]
    }

    #[inline(always)]
    fn vector(&mut self, v: usize, at: usize, len: usize) -> (*const T, usize) {
        let rows = &self.rows[v * LANES..(v + 1) * LANES];
        if len == STEP && self.strided[v] {
            (rows[0][at..].as_ptr(), size_of_val(rows[0]))
        } else {
            self.stage(v, at, len)
        }
    }

    #[inline(never)]
    fn stage(&mut self, v: usize, at: usize, len: usize) -> (*const T, usize) {
        let rows = &self.rows[v * LANES..(v + 1) * LANES];
        let staged = self.staged.get_or_insert([[T::default(); STEP]; UNIT]);
        let staged = &mut staged[v * LANES..(v + 1) * LANES];
        for (to, row) in staged.iter_mut().zip(rows) {
            to[..len].copy_from_slice(&row[at..at + len]);
            to[len..].fill(T::default());
        }
        (staged.as_ptr().cast(), STEP * size_of::<T>())
    }
}

impl Ahead {
    #[inline(always)]
    fn ask<T>(&self, rows: &[&[T]; UNIT], step: usize, steps: usize, next: usize) {
        match self {
            Self::Stream => {
                let step = step + STREAM_LEAD;
                let offset = if step < steps { step * STEP } else { (step - steps) * STEP + next };
                for row in rows {
                    // SAFETY: a prefetch of an address that is not valid does nothing.
                    unsafe { _mm_prefetch::<_MM_HINT_T0>(row.as_ptr().wrapping_add(offset).cast()) }
                }
            }
            Self::Next(range) => {
                for row in &rows[range.clone()] {
                    // SAFETY: as above.
                    unsafe {
                        _mm_prefetch::<_MM_HINT_T1>(row.as_ptr().wrapping_add(step * STEP + next).cast())
                    }
                }
            }
        }
    }
}

/// total += partial, for tiles of x with `m` rows.
#[inline(always)]
fn add<S: Simd>(s: S, total: &mut [TileSums; 4], partial: &[TileSums; 4], m: [usize; 2]) {
    for i in 0..4 {
        let total = total[i].as_chunks_mut::<LANES>().0;
        let partial = partial[i].as_chunks().0;
        for (total, partial) in total.iter_mut().zip(partial).take(m[i / 2]) {
            s.store(s.add(s.load(total), s.load(partial)), total);
        }
    }
}

/// Turns a tile of sums and puts it into one vector of the rows' units.
#[inline(always)]
fn put<S: Simd>(s: S, tile: &TileSums, vector: usize, sums: &mut [UnitSums]) {
    let m = sums.len();
    if m == 0 {
        return;
    }
    let mut columns = [s.words_f32(&[0.0; LANES]); LANES];
    for j in 0..LANES {
        if let Some(row) = tile[j * m..].first_chunk() {
            columns[j] = s.words_f32(row);
        }
    }
    columns = s.transpose(columns);
    for (sums, column) in sums.iter_mut().zip(columns) {
        s.store(s.as_f32(column), &mut sums.as_chunks_mut().0[vector]);
    }
}
