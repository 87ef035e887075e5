//! The portable path: arrays of 16 lanes, and the reference for the others.
//!
//! Multiply and add round separately, because a fused multiply-add without hardware support is
//! a library call.

use half::{bf16, f16};

use super::simd::{LANES, Simd};
use crate::element::Float;

/// Portable Rust.
#[derive(Clone, Copy)]
pub(crate) struct Scalar;

type V = [f32; LANES];

#[inline(always)]
fn zip(a: V, b: V, f: impl Fn(f32, f32) -> f32) -> V {
    std::array::from_fn(|i| f(a[i], b[i]))
}

impl Simd for Scalar {
    type V = V;
    type Raw = [u32; LANES];
    const TILE_VECTORS: usize = 1;
    const TILE_ROWS: usize = if cfg!(target_arch = "aarch64") { 4 } else { 2 };

    #[inline(always)]
    fn splat(self, x: f32) -> V {
        [x; LANES]
    }
    #[inline(always)]
    fn load(self, a: &[f32; LANES]) -> V {
        *a
    }
    #[inline(always)]
    fn store(self, v: V, a: &mut [f32; LANES]) {
        *a = v;
    }
    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        zip(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        zip(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        zip(a, b, |a, b| a / b)
    }
    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        zip(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn min(self, a: V, b: V) -> V {
        zip(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn fma(self, a: V, b: V, c: V) -> V {
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    fn exp2_biased(self, v: V) -> V {
        v.map(|v| f32::from_bits(v.to_bits().wrapping_add(127) << 23))
    }
    #[inline(always)]
    fn zero_below(self, v: V, x: V, bound: f32) -> V {
        zip(v, x, |v, x| if x < bound { 0.0 } else { v })
    }

    #[inline(always)]
    fn load_bf16(self, a: &[bf16; LANES]) -> V {
        a.map(bf16::widen)
    }
    #[inline(always)]
    fn store_bf16(self, v: V, a: &mut [bf16; LANES]) {
        *a = v.map(bf16::narrow);
    }
    #[inline(always)]
    fn load_f16(self, a: &[f16; LANES]) -> V {
        a.map(f16::widen)
    }
    #[inline(always)]
    fn store_f16(self, v: V, a: &mut [f16; LANES]) {
        *a = v.map(f16::narrow);
    }

    #[inline(always)]
    fn words_f32(self, a: &[f32; LANES]) -> Self::Raw {
        a.map(f32::to_bits)
    }
    #[inline(always)]
    fn words_u16(self, a: &[u16; 2 * LANES]) -> Self::Raw {
        std::array::from_fn(|i| u32::from(a[2 * i]) | u32::from(a[2 * i + 1]) << 16)
    }
    #[inline(always)]
    fn transpose(self, rows: [Self::Raw; LANES]) -> [Self::Raw; LANES] {
        std::array::from_fn(|i| std::array::from_fn(|j| rows[j][i]))
    }
    #[inline(always)]
    fn as_f32(self, v: Self::Raw) -> V {
        v.map(f32::from_bits)
    }
    #[inline(always)]
    fn half_bf16<const HIGH: bool>(self, v: Self::Raw) -> V {
        v.map(|w| f32::from_bits(if HIGH { w & 0xffff_0000 } else { w << 16 }))
    }
    #[inline(always)]
    fn half_f16<const HIGH: bool>(self, v: Self::Raw) -> V {
        v.map(|w| f16::from_bits((if HIGH { w >> 16 } else { w }) as u16).widen())
    }
    #[inline(always)]
    fn to_words(self, v: V) -> Self::Raw {
        v.map(f32::to_bits)
    }
    #[inline(always)]
    fn load_words(self, a: &[u32; LANES]) -> Self::Raw {
        *a
    }
    #[inline(always)]
    fn store_words(self, v: Self::Raw, a: &mut [u32; LANES]) {
        *a = v;
    }

    #[inline(always)]
    fn prefetch<T>(self, _p: *const T) {}
}
