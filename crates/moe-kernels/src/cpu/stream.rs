//! Products of a few rows of x: weights stream from memory once, straight into registers.
//!
//! A decode step reads each weight once, so memory is the bound and the kernel must not delay it: it transposes 16
//! words of 32 rows at a time in registers and multiplies at once, while the lines a few groups ahead are already being
//! loaded. The chains are the chains of [`super::tile`], so a row's bits are the same.

use super::Kernel;
use super::pack::{GROUP_OUT, GROUP_WORDS, transpose_group};
use super::product::chains;
use super::simd::{LANES, Lanes, Simd};
use super::tile::{Ahead, MAX_ROWS, UNIT, UnitSums, advance, store_sums, with_rows};

/// Groups between the line in use and the line that is prefetched: 8 groups of 32 lines are 16 KiB, which covers the
/// latency of memory at several tens of GB/s per core.
const PREFETCH_GROUPS: usize = 8;

/// What a stream fetches while it computes.
#[derive(Clone, Copy)]
pub(crate) enum Next<'a> {
    /// The rows in use, further on. After their end, the rows that begin this number of values later: the unit that
    /// this thread is likely to take next.
    Unit(usize),
    /// Other rows.
    Rows(Ahead<'a>),
}

impl Next<'_> {
    /// Asks for the share of the group at `at`, of one vector of rows of length k.
    #[inline(always)]
    fn ask<S: Simd, T: Lanes>(&self, s: S, rows: &[&[T]; LANES], at: usize, k: usize) {
        let group = GROUP_WORDS * T::PER_WORD;
        match self {
            Self::Unit(next) => {
                let ahead = at + PREFETCH_GROUPS * group;
                let offset = if ahead < k { ahead } else { ahead - k + next };
                for row in rows {
                    s.prefetch(row.as_ptr().wrapping_add(offset));
                }
            }
            Self::Rows(ahead) => {
                let groups = k.div_ceil(group);
                let share = ahead.count.div_ceil(groups);
                for i in 0..share {
                    ahead.ask(s, at / group * share + i);
                }
            }
        }
    }
}

/// Multiplies `m` packed rows of x with the rows of one unit.
pub(crate) struct Stream<'a, T> {
    /// Rows of w; missing rows repeat another.
    pub rows: &'a [&'a [T]; UNIT],
    /// What to fetch meanwhile.
    pub next: Next<'a>,
    /// [words]\[m\], all chains.
    pub x: &'a [u32],
    /// Rows of x, at most TILE_ROWS.
    pub m: usize,
    /// Segments of K.
    pub segments: usize,
    /// Sums of the m rows.
    pub out: &'a mut [UnitSums],
}

impl<T: Lanes> Kernel for Stream<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        if S::TILE_VECTORS == 2 {
            with_rows!(self.m, stream::<S, T; 2>(s, self))
        } else {
            with_rows!(self.m, stream::<S, T; 1>(s, self))
        }
    }
}

#[inline(always)]
fn stream<S: Simd, T: Lanes, const M: usize, const N: usize>(s: S, t: Stream<T>) {
    if M > S::TILE_ROWS || N != S::TILE_VECTORS {
        return; // Never taken; keeps tiles that this path does not use out of the binary.
    }
    let Some((out, _)) = t.out.split_first_chunk_mut::<M>() else { return };
    let k = t.rows[0].len();
    let x = t.x.as_chunks::<M>().0;
    let (rows, _) = t.rows.as_chunks::<LANES>();
    *out = [[0.0; UNIT]; M];
    let mut panel = [[[0; LANES]; N]; GROUP_OUT];
    // Whole passes over the unit, N vectors at a time.
    for vector in (0..2).step_by(N) {
        let mut segment = [[0.0; UNIT]; M];
        for chain in chains(k, t.segments) {
            let mut acc = [[s.splat(0.0); N]; M];
            let mut word = chain.start;
            let end = chain.start + chain.len;
            let mut at = chain.start;
            while at < end {
                let mut words = 0;
                for i in 0..N {
                    let rows = &rows[vector + i];
                    let out = &mut panel.as_flattened_mut().as_flattened_mut()[i * LANES..];
                    words = transpose_group::<S, T, 1>(s, rows, at, end, N * LANES, out);
                    if i == 0 || matches!(t.next, Next::Unit(_)) {
                        t.next.ask(s, rows, at, k);
                    }
                }
                for (x, w) in x[word..word + words].iter().zip(&panel) {
                    advance::<S, M, N>(s, &mut acc, x, w);
                }
                word += words;
                at += GROUP_WORDS * T::PER_WORD;
            }
            for m in 0..M {
                let to = if chain.to_segment { &mut segment[m] } else { &mut out[m] };
                store_sums(s, &acc[m], chain.add, &mut to.as_chunks_mut().0[vector..]);
                if let Some(add) = chain.flush {
                    let sums: [S::V; N] =
                        std::array::from_fn(|n| s.load(&segment[m].as_chunks().0[vector + n]));
                    store_sums(s, &sums, add, &mut out[m].as_chunks_mut().0[vector..]);
                }
            }
        }
    }
    debug_assert!(M <= MAX_ROWS);
}
