//! Linear attention by the gated delta rule: convolution, recurrence and gated norm, in f32.
//!
//! A sequence is computed row after row, for any number of rows in a step. Prompts and decoding have the same
//! arithmetic, so a row's bits do not depend on how its prompt was cut. Channels of the convolution and columns of a
//! state are independent of each other, so they are distributed over tasks and vectors.

use super::Kernel;
use super::activation::gated;
use super::math::sigmoid;
use super::norm::{inverse_rms, square_sum};
use super::simd::{LANES, Lanes, Simd};
use crate::tags::Activation;

/// The most rows that a convolution sees, W.
pub(crate) const MAX_TAPS: usize = 8;
/// Vectors of columns that a task of the recurrence computes together: enough chains to hide the latency of a
/// multiply-add.
const VECTORS: usize = 4;
/// Columns of a state that are one task: with Dk = 128, they are 32 KiB.
pub(crate) const STATE_COLUMNS: usize = VECTORS * LANES;

/// Some channels of the convolution, with SiLU after it, for one row.
pub(crate) struct ConvRow<'a> {
    /// These channels of the W rows that end with this one.
    pub taps: [&'a [f32]; MAX_TAPS],
    /// These channels of the weight of each.
    pub weights: [&'a [f32]; MAX_TAPS],
    /// W.
    pub width: usize,
    pub out: &'a mut [f32],
}

impl Kernel for ConvRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (i, out) in self.out.chunks_mut(LANES).enumerate() {
            let range = i * LANES..i * LANES + out.len();
            let mut sum = s.splat(0.0);
            for tap in 0..self.width {
                let x = f32::load_some(s, &self.taps[tap][range.clone()]);
                sum = s.fma(f32::load_some(s, &self.weights[tap][range.clone()]), x, sum);
            }
            f32::store_some(s, s.mul(sum, sigmoid(s, sum)), out);
        }
    }
}

/// out = x / sqrt(sum(x²) + eps) · scale, for consecutive heads.
pub(crate) struct UnitHeads<'a> {
    pub x: &'a [f32],
    pub dim: usize,
    pub eps: f32,
    pub scale: f32,
    pub out: &'a mut [f32],
}

impl Kernel for UnitHeads<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (x, out) in self.x.chunks_exact(self.dim).zip(self.out.chunks_exact_mut(self.dim)) {
            let factor = s.splat(self.scale / (square_sum(s, x) + self.eps).sqrt());
            for (x, out) in x.chunks(LANES).zip(out.chunks_mut(LANES)) {
                f32::store_some(s, s.mul(f32::load_some(s, x), factor), out);
            }
        }
    }
}

/// Columns of a head's state, and one row of the recurrence that advances them.
pub(crate) struct DeltaRow<'a> {
    /// [Dk, [`STATE_COLUMNS`]].
    pub state: &'a mut [[f32; STATE_COLUMNS]],
    /// \[Dk\]: of length 1, times 1 / sqrt(Dk).
    pub q: &'a [f32],
    /// \[Dk\]: of length 1.
    pub k: &'a [f32],
    /// These columns of the value; the state's columns after them stay 0.
    pub v: &'a [f32],
    /// The factor by which the old state is multiplied.
    pub decay: f32,
    /// The share of the state's value for k that the new value replaces.
    pub beta: f32,
    /// As long as `v`.
    pub out: &'a mut [f32],
}

impl Kernel for DeltaRow<'_> {
    type Output = ();

    /// S = decay · S; S += k ⊗ beta (v - k · S); out = q · S.
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let decay = s.splat(self.decay);
        let mut held = [s.splat(0.0); VECTORS];
        for (row, k) in self.state.iter().zip(self.k) {
            let k = s.splat(*k);
            let row = row.as_chunks().0;
            for c in 0..VECTORS {
                held[c] = s.fma(s.mul(s.load(&row[c]), decay), k, held[c]);
            }
        }
        let beta = s.splat(self.beta);
        let mut values = self.v.chunks(LANES);
        let delta = held.map(|held| {
            let value = values.next().map_or(s.splat(0.0), |v| f32::load_some(s, v));
            s.mul(s.sub(value, held), beta)
        });
        let mut sums = [s.splat(0.0); VECTORS];
        for ((row, k), q) in self.state.iter_mut().zip(self.k).zip(self.q) {
            let k = s.splat(*k);
            let q = s.splat(*q);
            let row = row.as_chunks_mut().0;
            for c in 0..VECTORS {
                let new = s.fma(k, delta[c], s.mul(s.load(&row[c]), decay));
                s.store(new, &mut row[c]);
                sums[c] = s.fma(new, q, sums[c]);
            }
        }
        for (sum, out) in sums.into_iter().zip(self.out.chunks_mut(LANES)) {
            f32::store_some(s, sum, out);
        }
    }
}

/// out = x / rms(x) · weight · SiLU(gate), for consecutive heads of the weight's length, rounded once.
pub(crate) struct GatedNorm<'a, T> {
    pub x: &'a [f32],
    pub gate: &'a [f32],
    pub weight: &'a [f32],
    pub eps: f32,
    pub out: &'a mut [T],
}

impl<T: Lanes> Kernel for GatedNorm<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let dim = self.weight.len();
        let heads = self.x.chunks_exact(dim).zip(self.gate.chunks_exact(dim));
        for ((x, gate), out) in heads.zip(self.out.chunks_exact_mut(dim)) {
            let scale = s.splat(inverse_rms(s, x, self.eps));
            let values = x.chunks(LANES).zip(gate.chunks(LANES)).zip(self.weight.chunks(LANES));
            for (((x, gate), weight), out) in values.zip(out.chunks_mut(LANES)) {
                let normed = s.mul(s.mul(f32::load_some(s, x), scale), f32::load_some(s, weight));
                T::store_some(s, gated(s, Activation::SwiGlu, f32::load_some(s, gate), normed), out);
            }
        }
    }
}
