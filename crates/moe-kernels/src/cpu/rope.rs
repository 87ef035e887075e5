//! Head norm, rotary embedding and cache write, in f32, rounded once.

use super::norm::inverse_rms;
use super::shared::Shared;
use super::simd::{LANES, Lanes, Simd};
use super::{Kernel, dispatch};
use crate::exec::CpuIsa;

/// A slot mapping entry that writes nothing to the cache (padding rows).
pub(crate) const NO_SLOT: u32 = u32::MAX;

/// out = rope(norm(x)) for consecutive heads of one row: RMS norm with `weight` (if given), then
/// rotate-half RoPE.
pub(crate) struct NormRope<'a, W, X, O> {
    /// Heads of `2 * cos.len()` values.
    pub x: &'a [X],
    pub weight: Option<&'a [W]>,
    pub eps: f32,
    pub cos: &'a [f32],
    pub sin: &'a [f32],
    pub out: &'a mut [O],
}

impl<W: Lanes, X: Lanes, O: Lanes> Kernel for NormRope<'_, W, X, O> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let half = self.cos.len();
        for (x, out) in self.x.chunks_exact(2 * half).zip(self.out.chunks_exact_mut(2 * half)) {
            let scale = match self.weight {
                Some(_) => inverse_rms(s, x, self.eps),
                None => 1.0,
            };
            for at in (0..half).step_by(LANES) {
                let end = half.min(at + LANES);
                let cos = f32::load_some(s, &self.cos[at..end]);
                let sin = f32::load_some(s, &self.sin[at..end]);
                let a = normed(s, x, self.weight, scale, at..end);
                let b = normed(s, x, self.weight, scale, half + at..half + end);
                let first = s.sub(s.mul(a, cos), s.mul(b, sin));
                let second = s.add(s.mul(b, cos), s.mul(a, sin));
                O::store_some(s, first, &mut out[at..end]);
                O::store_some(s, second, &mut out[half + at..half + end]);
            }
        }
    }
}

/// Part of a head, scaled and weighted if there is a weight.
#[inline(always)]
fn normed<S: Simd, W: Lanes, X: Lanes>(
    s: S,
    x: &[X],
    weight: Option<&[W]>,
    scale: f32,
    range: std::ops::Range<usize>,
) -> S::V {
    let x = X::load_some(s, &x[range.clone()]);
    match weight {
        Some(weight) => s.mul(s.mul(x, s.splat(scale)), W::load_some(s, &weight[range])),
        None => x,
    }
}

/// Queries, keys and values of all rows on their way to `q_out` and the cache; T is the model
/// dtype, X that of the stream, W that of the norms' weights.
pub(crate) struct RopeCache<'a, T, X, W> {
    pub isa: CpuIsa,
    /// Query heads, KV heads, head size.
    pub heads: (usize, usize, usize),
    pub block_size: usize,
    /// [T, `qkv_row`]: heads of q, k and v come first in their rows.
    pub qkv: &'a [X],
    pub qkv_row: usize,
    /// Weights of the norms of q and k.
    pub norms: (Option<&'a [W]>, Option<&'a [W]>),
    pub eps: f32,
    /// Cosines and sines, [T, D/2].
    pub angles: (&'a [f32], &'a [f32]),
    /// Cache slot of each row; [`NO_SLOT`] = none.
    pub slots: &'a [u32],
    pub q_out: Shared<'a, X>,
    pub k_cache: Shared<'a, T>,
    pub v_cache: Shared<'a, T>,
}

impl<T: Lanes, X: Lanes, W: Lanes> RopeCache<'_, T, X, W> {
    /// All rows of one head: query heads first, then KV heads. Each head's part of the outputs is
    /// its own, and rows go in order, so of two rows that name one slot the later wins.
    pub(crate) fn head(&self, head: usize) {
        let (hq, _, _) = self.heads;
        for (row, &slot) in self.slots.iter().enumerate() {
            if head < hq {
                self.query(row, head);
            } else if slot != NO_SLOT {
                self.key_value(row, head - hq, slot as usize);
            }
        }
    }

    /// Head `place` among the q, k and v heads of a row.
    fn input(&self, row: usize, place: usize) -> &[X] {
        let (_, _, d) = self.heads;
        &self.qkv[row * self.qkv_row + place * d..][..d]
    }

    fn rope<O: Lanes>(&self, row: usize, x: &[X], weight: Option<&[W]>, out: &mut [O]) {
        let half = self.heads.2 / 2;
        let [cos, sin] = [self.angles.0, self.angles.1].map(|a| &a[row * half..(row + 1) * half]);
        dispatch(self.isa, NormRope { x, weight, eps: self.eps, cos, sin, out });
    }

    fn query(&self, row: usize, head: usize) {
        let (hq, _, d) = self.heads;
        // SAFETY: each (row, head) is written once.
        let out = unsafe { self.q_out.range((row * hq + head) * d, d) };
        self.rope(row, self.input(row, head), self.norms.0, out);
    }

    fn key_value(&self, row: usize, head: usize, slot: usize) {
        let (hq, hkv, d) = self.heads;
        let block = slot / self.block_size;
        let offset = slot % self.block_size;
        let at = ((block * hkv + head) * self.block_size + offset) * d;
        // SAFETY: a head's part of the cache belongs to the task of that head, and within it one
        // row at a time is written.
        let (k, v) = unsafe { (self.k_cache.range(at, d), self.v_cache.range(at, d)) };
        self.rope(row, self.input(row, hq + head), self.norms.1, k);
        for (out, v) in v.iter_mut().zip(self.input(row, hq + hkv + head)) {
            *out = T::narrow(v.widen());
        }
    }
}
