//! Per-row random streams of Philox4x32-10.
//!
//! A counter-based generator has no state to carry: a number is a function of (seed, counter), so
//! random routing is the same on every machine, for every number of threads, and whichever rank
//! or chunk a row falls into.

use moe_kernels::{NO_EXPERT, Philox4x32};

/// What a [`RowRng`] is for. Streams of one row are independent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Stream {
    SimulatedIds = 0,
    SimulatedWeights = 1,
    ForceBalance = 2,
}

/// A random stream of one token row in one MoE layer of one step.
#[derive(Clone, Debug)]
pub struct RowRng {
    philox: Philox4x32,
    /// Block index, row, layer with the stream in its upper four bits, step.
    counter: [u32; 4],
    block: [u32; 4],
    used: usize,
}

impl RowRng {
    pub(crate) fn new(seed: u64, stream: Stream, step: u64, layer: usize, row: usize) -> Self {
        let layer = (layer as u32 & 0x0FFF_FFFF) | (stream as u32) << 28;
        let counter = [0, row as u32, layer, step as u32];
        Self { philox: Philox4x32::new(seed), counter, block: [0; 4], used: 4 }
    }

    /// 32 random bits.
    pub fn next_u32(&mut self) -> u32 {
        if self.used == 4 {
            self.block = self.philox.block(self.counter);
            self.counter[0] = self.counter[0].wrapping_add(1);
            self.used = 0;
        }
        self.used += 1;
        self.block[self.used - 1]
    }

    /// An integer in 0..n, by one multiplication; the bias is at most n / 2^32. 0 for n = 0.
    pub fn below(&mut self, n: u32) -> u32 {
        ((u64::from(self.next_u32()) * u64::from(n)) >> 32) as u32
    }

    /// A multiple of 2^-24 in [0, 1).
    pub fn uniform(&mut self) -> f32 {
        (self.next_u32() >> 8) as f32 * (1.0 / 16_777_216.0)
    }

    /// A sample with mean 0, variance 1 and nearly normal shape: the sum of twelve uniforms less
    /// six (Irwin-Hall). It needs no logarithm or cosine, whose last bits differ between machines.
    pub fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.uniform()).sum::<f32>() - 6.0
    }

    /// Fills `ids` with distinct integers of 0..n: the start of a random permutation. At most n
    /// ids are sampled; the caller has checked that there are no more.
    pub fn distinct(&mut self, n: u32, ids: &mut [u32]) {
        ids.fill(0);
        self.replace_distinct(n, ids);
    }

    /// [`distinct`](Self::distinct), but slots that hold [`NO_EXPERT`] stay as they are.
    pub(crate) fn replace_distinct(&mut self, n: u32, ids: &mut [u32]) {
        let mut left = n;
        for i in 0..ids.len() {
            let (chosen, rest) = ids.split_at_mut(i);
            if rest[0] == NO_EXPERT {
                continue;
            }
            let rank = self.below(left);
            rest[0] = nth_unchosen(chosen, rank);
            left = left.saturating_sub(1);
        }
    }
}

/// The `rank`-th (from 0) natural number that is not in `chosen`. [`NO_EXPERT`] is above all of
/// them and does not count.
///
/// The answer is the least x with x = rank + (number of chosen <= x); iterating from rank climbs
/// to it, so no table of n entries is needed.
fn nth_unchosen(chosen: &[u32], rank: u32) -> u32 {
    let mut x = rank;
    loop {
        let next = rank + chosen.iter().filter(|&&c| c <= x).count() as u32;
        if next == x {
            return x;
        }
        x = next;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_differ_in_every_coordinate() {
        let base = (7, Stream::SimulatedIds, 0, 1, 2);
        let first = |(seed, stream, step, layer, row)| RowRng::new(seed, stream, step, layer, row).next_u32();
        let same = first(base);
        assert_eq!(first(base), same);
        let others = [
            (8, Stream::SimulatedIds, 0, 1, 2),
            (7, Stream::SimulatedWeights, 0, 1, 2),
            (7, Stream::SimulatedIds, 1, 1, 2),
            (7, Stream::SimulatedIds, 0, 2, 2),
            (7, Stream::SimulatedIds, 0, 1, 3),
        ];
        for other in others {
            assert_ne!(first(other), same, "{other:?}");
        }
    }

    #[test]
    fn distinct_draws_every_ordered_pair_equally_often() {
        let mut counts = [[0u32; 4]; 4];
        for row in 0..12_000 {
            let mut ids = [0; 2];
            RowRng::new(1, Stream::ForceBalance, 0, 0, row).distinct(4, &mut ids);
            counts[ids[0] as usize][ids[1] as usize] += 1;
        }
        for (a, row) in counts.iter().enumerate() {
            for (b, &n) in row.iter().enumerate() {
                let expected = if a == b { 0..=0 } else { 850..=1150 };
                assert!(expected.contains(&n), "({a}, {b}) sampled {n} times");
            }
        }
    }

    #[test]
    fn distinct_can_draw_a_whole_permutation() {
        let mut ids = [0; 9];
        RowRng::new(3, Stream::ForceBalance, 0, 0, 0).distinct(9, &mut ids);
        ids.sort_unstable();
        assert_eq!(ids, [0, 1, 2, 3, 4, 5, 6, 7, 8]);
    }

    #[test]
    fn samples_have_the_stated_moments() {
        let mut rng = RowRng::new(5, Stream::SimulatedWeights, 0, 0, 0);
        let n = 20_000;
        let normal: Vec<f64> = (0..n).map(|_| f64::from(rng.normal())).collect();
        let mean = normal.iter().sum::<f64>() / f64::from(n);
        let variance = normal.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / f64::from(n);
        assert!(mean.abs() < 0.03 && (variance - 1.0).abs() < 0.05, "{mean} {variance}");
        assert!((0..n).map(|_| rng.uniform()).all(|u| (0.0..1.0).contains(&u)));
        assert!((0..n).map(|_| rng.below(3)).all(|x| x < 3));
        assert_eq!(rng.below(0), 0);
    }
}
