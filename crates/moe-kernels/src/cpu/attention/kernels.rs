//! The vector kernels of attention: softmax of a block, weighted values, merge, division.

use std::ops::Range;

use crate::cpu::Kernel;
use crate::cpu::math::exp;
use crate::cpu::simd::{LANES, Lanes, Simd};
use crate::cpu::tile::{Ahead, UNIT, UnitSums, with_rows};

/// Positions per partial of the softmax. A numeric constant: changing it changes bits.
pub const ATTENTION_BLOCK: usize = 64;

/// Weights of one row over the positions of a block.
pub(crate) type BlockWeights = [f32; ATTENTION_BLOCK];

/// Turns the scores of rows into unnormalised weights under the block's own maximum.
pub(crate) struct BlockSoftmax<'a> {
    /// q · k of the rows with the first and the second unit of the block.
    pub scores: [&'a [UnitSums]; 2],
    pub scale: f32,
    /// Visible offsets of each row; a row that sees nothing is left alone.
    pub visible: &'a [Range<usize>],
    /// Weights of each row: 0 where it sees nothing.
    pub weights: &'a mut [BlockWeights],
    /// Maximum and sum of the weights of each row.
    pub partials: &'a mut [(f32, f32)],
}

impl Kernel for BlockSoftmax<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let rows = self.scores[0].iter().zip(self.scores[1]).zip(self.visible);
        let outputs = self.weights.iter_mut().zip(self.partials);
        for (((first, second), visible), (weights, partial)) in rows.zip(outputs) {
            if !visible.is_empty() {
                *partial = softmax_row(s, [first, second], self.scale, visible, weights);
            }
        }
    }
}

#[inline(always)]
fn softmax_row<S: Simd>(
    s: S,
    scores: [&UnitSums; 2],
    scale: f32,
    visible: &Range<usize>,
    weights: &mut BlockWeights,
) -> (f32, f32) {
    let scale = s.splat(scale);
    let mut vectors = [s.splat(0.0); ATTENTION_BLOCK / LANES];
    for i in 0..vectors.len() {
        let scores = &scores[i / (UNIT / LANES)].as_chunks().0[i % (UNIT / LANES)];
        vectors[i] = s.mul(s.load(scores), scale);
    }
    if visible.len() < ATTENTION_BLOCK {
        for i in 0..vectors.len() {
            s.store(vectors[i], &mut weights.as_chunks_mut().0[i]);
        }
        weights[..visible.start].fill(f32::NEG_INFINITY);
        weights[visible.end..].fill(f32::NEG_INFINITY);
        for i in 0..vectors.len() {
            vectors[i] = s.load(&weights.as_chunks().0[i]);
        }
    }
    let mut max = s.splat(f32::NEG_INFINITY);
    for i in 0..vectors.len() {
        max = s.max(max, vectors[i]);
    }
    let max = s.fold_max(max);
    let mut sum = s.splat(0.0);
    for i in 0..vectors.len() {
        let weight = exp(s, s.sub(vectors[i], s.splat(max)));
        s.store(weight, &mut weights.as_chunks_mut().0[i]);
        sum = s.add(sum, weight);
    }
    (max, s.fold_add(sum))
}

/// Adds weight · v to the partials of up to TILE_ROWS rows that see the same positions: one chain
/// per output in ascending order of position.
pub(crate) struct WeighValues<'a, T> {
    /// Weights of each row.
    pub weights: &'a [BlockWeights],
    /// Offsets within the block.
    pub visible: Range<usize>,
    /// Value rows by offset.
    pub values: &'a [&'a [T]; ATTENTION_BLOCK],
    /// Rows of `width` values.
    pub out: &'a mut [f32],
    /// A multiple of 16, at least the head size.
    pub width: usize,
    /// What to fetch meanwhile.
    pub ahead: Ahead<'a>,
}

impl<T: Lanes> Kernel for WeighValues<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        if S::TILE_VECTORS == 2 {
            with_rows!(self.weights.len(), weigh::<S, T; 2>(s, self))
        } else {
            with_rows!(self.weights.len(), weigh::<S, T; 1>(s, self))
        }
    }
}

#[inline(always)]
fn weigh<S: Simd, T: Lanes, const M: usize, const N: usize>(s: S, t: WeighValues<T>) {
    if M > S::TILE_ROWS || N != S::TILE_VECTORS {
        return; // Never taken; keeps tiles that this path does not use out of the binary.
    }
    let Some((weights, _)) = t.weights.split_first_chunk::<M>() else { return };
    let values = &t.values[t.visible.clone()];
    let d = values.first().map_or(0, |row| row.len());
    let whole = d / LANES;
    let mut first = 0;
    let mut ahead = t.ahead;
    while first < whole {
        let out = &mut t.out[first * LANES..];
        let from = t.visible.start;
        if first + N <= whole {
            let rows = values.iter().map(|row| &row.as_chunks().0[first..]);
            weigh_vectors::<S, T, M, N>(s, weights, from, rows, t.width, out, &mut ahead);
            first += N;
        } else {
            let rows = values.iter().map(|row| &row.as_chunks().0[first..]);
            weigh_vectors::<S, T, M, 1>(s, weights, from, rows, t.width, out, &mut ahead);
            first += 1;
        }
    }
    if whole * LANES < d {
        let mut tails = [[T::default(); LANES]; ATTENTION_BLOCK];
        for (tail, row) in tails.iter_mut().zip(values) {
            tail[..d % LANES].copy_from_slice(&row[whole * LANES..]);
        }
        let rows = tails[..values.len()].as_chunks().0.iter().map(|row: &[_; 1]| &row[..]);
        let out = &mut t.out[whole * LANES..];
        weigh_vectors::<S, T, M, 1>(s, weights, t.visible.start, rows, t.width, out, &mut ahead);
    }
}

/// N vectors of M rows; `rows` are the value rows from position `from` on. Nothing in the loop may
/// call out of line: that would move every sum to memory and back.
#[inline(always)]
fn weigh_vectors<'a, S: Simd, T: Lanes, const M: usize, const N: usize>(
    s: S,
    weights: &[BlockWeights; M],
    from: usize,
    rows: impl Iterator<Item = &'a [[T; LANES]]>,
    width: usize,
    out: &mut [f32],
    ahead: &mut Ahead,
) {
    let mut acc = [[s.splat(0.0); N]; M];
    for m in 0..M {
        for n in 0..N {
            acc[m][n] = s.load(&out[m * width..].as_chunks().0[n]);
        }
    }
    for (row, j) in rows.zip(from..ATTENTION_BLOCK) {
        ahead.ask_next(s);
        let mut v = [s.splat(0.0); N];
        for n in 0..N {
            v[n] = T::load(s, &row[n]);
        }
        for m in 0..M {
            let weight = s.splat(weights[m][j]);
            for n in 0..N {
                acc[m][n] = s.fma(weight, v[n], acc[m][n]);
            }
        }
    }
    for m in 0..M {
        for n in 0..N {
            s.store(acc[m][n], &mut out[m * width..].as_chunks_mut().0[n]);
        }
    }
}

/// A partial result over some positions: maximum score and sum of weights, weighted values.
pub(crate) struct Partial<'a> {
    pub stats: &'a mut (f32, f32),
    /// Whole vectors.
    pub values: &'a mut [f32],
}

/// Merges the partial of later positions into one of earlier positions.
pub(crate) struct Merge<'a> {
    pub into: Partial<'a>,
    pub stats: (f32, f32),
    pub values: &'a [f32],
}

impl Kernel for Merge<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        merge(s, self.into, self.stats, self.values);
    }
}

#[inline(always)]
fn merge<S: Simd>(s: S, into: Partial, stats: (f32, f32), values: &[f32]) {
    let max = if into.stats.0 > stats.0 { into.stats.0 } else { stats.0 };
    let mut factors = [0f32; LANES];
    factors[0] = into.stats.0 - max;
    factors[1] = stats.0 - max;
    s.store(exp(s, s.load(&factors)), &mut factors);
    let old = s.splat(factors[0]);
    let new = s.splat(factors[1]);
    for (a, b) in into.values.as_chunks_mut().0.iter_mut().zip(values.as_chunks().0) {
        s.store(s.fma(s.load(b), new, s.mul(s.load(a), old)), a);
    }
    *into.stats = (max, stats.1 * factors[1] + into.stats.1 * factors[0]);
}

/// Merges a sink into the partial of all positions: a logit without a value.
pub(crate) struct MergeSink<'a> {
    pub into: Partial<'a>,
    pub logit: f32,
}

impl Kernel for MergeSink<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Partial { stats, values } = self.into;
        let max = if stats.0 > self.logit { stats.0 } else { self.logit };
        let mut factors = [0f32; LANES];
        factors[0] = stats.0 - max;
        factors[1] = self.logit - max;
        s.store(exp(s, s.load(&factors)), &mut factors);
        let scale = s.splat(factors[0]);
        for values in values.as_chunks_mut().0 {
            s.store(s.mul(s.load(values), scale), values);
        }
        *stats = (max, stats.1 * factors[0] + factors[1]);
    }
}

/// Merges the partial results of a block with the results of the blocks before it, for all rows that see it.
pub(crate) struct MergeRows<'a> {
    pub visible: &'a [Range<usize>],
    /// Whether a row has seen a block before; if not, it starts with this one.
    pub seen: &'a mut [bool],
    /// Values per row.
    pub width: usize,
    pub stats: &'a [(f32, f32)],
    pub values: &'a [f32],
    pub into_stats: &'a mut [(f32, f32)],
    pub into_values: &'a mut [f32],
}

impl Kernel for MergeRows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let from = self.stats.iter().zip(self.values.chunks_exact(self.width));
        let into = self.into_stats.iter_mut().zip(self.into_values.chunks_exact_mut(self.width));
        for (((visible, seen), (stats, values)), (into_stats, into_values)) in
            self.visible.iter().zip(self.seen).zip(from).zip(into)
        {
            if visible.is_empty() {
                continue;
            }
            if std::mem::replace(seen, true) {
                merge(s, Partial { stats: into_stats, values: into_values }, *stats, values);
            } else {
                *into_stats = *stats;
                into_values.copy_from_slice(values);
            }
        }
    }
}

/// out = values / sum, rounded.
pub(crate) struct Divide<'a, T> {
    pub values: &'a [f32],
    pub sum: f32,
    pub out: &'a mut [T],
}

impl<T: Lanes> Kernel for Divide<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let sum = s.splat(self.sum);
        for (out, values) in self.out.chunks_mut(LANES).zip(self.values.as_chunks().0) {
            T::store_some(s, s.div(s.load(values), sum), out);
        }
    }
}
