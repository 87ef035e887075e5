//! Kernels that do nothing but read, or nothing but multiply: see [`crate::roof`].

use super::Kernel;
use super::simd::{LANES, Simd};

/// Chains of a round: more than latency times throughput of a multiply-add, so that the units are always busy, and no
/// more than the registers of a path hold.
const CHAINS: usize = 12;

/// Parts of the values that are read at the same time.
const STREAMS: usize = 4;

/// Sums values; returns the sum so that they are read.
pub(crate) struct Read<'a>(pub &'a [f32]);

impl Kernel for Read<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        // Four lines of each stream at a time.
        let lines = self.0.as_chunks::<LANES>().0.as_chunks::<STREAMS>().0;
        let (a, rest) = lines.split_at(lines.len() / STREAMS);
        let (b, rest) = rest.split_at(a.len());
        let (c, d) = rest.split_at(a.len());
        let mut sums = [s.splat(0.0); STREAMS];
        for (((a, b), c), d) in a.iter().zip(b).zip(c).zip(d) {
            for lines in [a, b, c, d] {
                for i in 0..STREAMS {
                    sums[i] = s.add(sums[i], s.load(&lines[i]));
                }
            }
        }
        s.fold_add(s.add(s.add(sums[0], sums[1]), s.add(sums[2], sums[3])))
    }
}

/// Chains of f32 multiply-adds.
pub(crate) struct Fma {
    pub rounds: usize,
}

impl Fma {
    /// FLOP of a round.
    pub(crate) const FLOP: usize = CHAINS * LANES * 2;
}

impl Kernel for Fma {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        let x = s.splat(std::hint::black_box(0.5));
        let y = s.splat(1e-3);
        chains(s, self.rounds, |acc| s.fma(acc, x, y))
    }
}

#[inline(always)]
fn chains<S: Simd>(s: S, rounds: usize, advance: impl Fn(S::V) -> S::V) -> f32 {
    if S::TILE_VECTORS == 2 {
        advance_all::<S, CHAINS>(s, rounds, advance)
    } else {
        advance_all::<S, { CHAINS / 2 }>(s, 2 * rounds, advance)
    }
}

#[inline(always)]
fn advance_all<S: Simd, const N: usize>(s: S, rounds: usize, advance: impl Fn(S::V) -> S::V) -> f32 {
    let mut acc = [s.splat(0.0); N];
    for _ in 0..rounds {
        for i in 0..N {
            acc[i] = advance(acc[i]);
        }
    }
    acc.into_iter().map(|v| s.fold_add(v)).sum()
}
