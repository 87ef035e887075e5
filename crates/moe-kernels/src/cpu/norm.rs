//! Row-wise kernels: RMS norm, residual addition, softmax.
//!
//! A sum over a row puts element i in lane i % 16 and folds the lanes 16 -> 8 -> 4 -> 2 -> 1, so
//! its order depends on the length of the row only.

use super::Kernel;
use super::math::exp;
use super::simd::{LANES, Lanes, Simd};

/// Sum of squares of a row.
#[inline(always)]
pub(crate) fn square_sum<S: Simd, T: Lanes>(s: S, x: &[T]) -> f32 {
    let mut sum = s.splat(0.0);
    for x in x.chunks(LANES) {
        let x = T::load_some(s, x);
        sum = s.fma(x, x, sum);
    }
    s.fold_add(sum)
}

/// 1 / sqrt(mean(x^2) + eps).
#[inline(always)]
pub(crate) fn inverse_rms<S: Simd, T: Lanes>(s: S, x: &[T], eps: f32) -> f32 {
    1.0 / (square_sum(s, x) / x.len() as f32 + eps).sqrt()
}

/// The sum of squares of each of `out.len()` equal parts of `x`.
pub(crate) struct SquareSums<'a> {
    pub x: &'a [f32],
    pub out: &'a mut [f32],
}

impl Kernel for SquareSums<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let width = self.x.len() / self.out.len().max(1);
        for (out, x) in self.out.iter_mut().zip(self.x.chunks_exact(width.max(1))) {
            *out = square_sum(s, x);
        }
    }
}

/// out = x / rms(x) * weight, by rows of the weight's length.
pub(crate) struct RmsNorm<'a, T, X, W> {
    pub x: &'a [X],
    pub weight: &'a [W],
    pub eps: f32,
    pub out: &'a mut [T],
}

impl<T: Lanes, X: Lanes, W: Lanes> Kernel for RmsNorm<'_, T, X, W> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let d = self.weight.len();
        for (x, out) in self.x.chunks_exact(d).zip(self.out.chunks_exact_mut(d)) {
            norm_row(s, x, self.weight, self.eps, out);
        }
    }
}

#[inline(always)]
fn norm_row<S: Simd, T: Lanes, X: Lanes, W: Lanes>(s: S, x: &[X], weight: &[W], eps: f32, out: &mut [T]) {
    let scale = s.splat(inverse_rms(s, x, eps));
    let rows = x.chunks(LANES).zip(weight.chunks(LANES)).zip(out.chunks_mut(LANES));
    for ((x, weight), out) in rows {
        let normed = s.mul(X::load_some(s, x), scale);
        T::store_some(s, s.mul(normed, W::load_some(s, weight)), out);
    }
}

/// acc = round(acc + x).
pub(crate) struct Add<'a, T, A> {
    pub x: &'a [T],
    pub acc: &'a mut [A],
}

impl<T: Lanes, A: Lanes> Kernel for Add<'_, T, A> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        add_row(s, self.x, self.acc);
    }
}

#[inline(always)]
fn add_row<S: Simd, T: Lanes, A: Lanes>(s: S, x: &[T], acc: &mut [A]) {
    for (x, acc) in x.chunks(LANES).zip(acc.chunks_mut(LANES)) {
        let sum = s.add(A::load_some(s, acc), T::load_some(s, x));
        A::store_some(s, sum, acc);
    }
}

/// residual = round(residual + delta); out = norm(residual).
pub(crate) struct AddRmsNorm<'a, T, X, W> {
    pub delta: &'a [X],
    pub weight: &'a [W],
    pub eps: f32,
    pub residual: &'a mut [X],
    pub out: &'a mut [T],
}

impl<T: Lanes, X: Lanes, W: Lanes> Kernel for AddRmsNorm<'_, T, X, W> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let h = self.weight.len();
        let rows = self.delta.chunks_exact(h).zip(self.residual.chunks_exact_mut(h));
        for ((delta, residual), out) in rows.zip(self.out.chunks_exact_mut(h)) {
            add_row(s, delta, residual);
            norm_row(s, residual, self.weight, self.eps, out);
        }
    }
}

/// out = softmax(x), by rows of length n.
pub(crate) struct Softmax<'a> {
    pub x: &'a [f32],
    pub n: usize,
    pub out: &'a mut [f32],
}

impl Kernel for Softmax<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (x, out) in self.x.chunks_exact(self.n).zip(self.out.chunks_exact_mut(self.n)) {
            let max = s.splat(row_max(s, x));
            let mut sum = s.splat(0.0);
            for (x, out) in x.chunks(LANES).zip(out.chunks_mut(LANES)) {
                f32::store_some(s, exp(s, s.sub(f32::load_some(s, x), max)), out);
                sum = s.add(sum, f32::load_some(s, out));
            }
            let sum = s.splat(s.fold_add(sum));
            for out in out.chunks_mut(LANES) {
                f32::store_some(s, s.div(f32::load_some(s, out), sum), out);
            }
        }
    }
}

/// The maximum of a row; NaN if the row holds one.
#[inline(always)]
fn row_max<S: Simd>(s: S, x: &[f32]) -> f32 {
    let mut max = s.splat(f32::NEG_INFINITY);
    let (whole, tail) = x.as_chunks();
    for x in whole {
        max = s.max(max, s.load(x));
    }
    let mut lanes = [f32::NEG_INFINITY; LANES];
    lanes[..tail.len()].copy_from_slice(tail);
    max = s.max(max, s.load(&lanes));
    s.fold_max(max)
}
