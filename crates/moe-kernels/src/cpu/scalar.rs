//! The portable path: arrays of 16 lanes, and the reference for the others.
//!
//! Multiply and add round separately, because a fused multiply-add without hardware support is
//! a library call.

use half::{bf16, f16};

use super::simd::{LANES, Simd, inlined};
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

    inlined! {
        fn splat(x: f32) -> V { [x; LANES] }
        fn load(a: &[f32; LANES]) -> V { *a }
        fn store(v: V, a: &mut [f32; LANES]) { *a = v; }
        fn add(a: V, b: V) -> V { zip(a, b, |a, b| a + b) }
        fn sub(a: V, b: V) -> V { zip(a, b, |a, b| a - b) }
        fn mul(a: V, b: V) -> V { zip(a, b, |a, b| a * b) }
        fn div(a: V, b: V) -> V { zip(a, b, |a, b| a / b) }
        fn max(a: V, b: V) -> V { zip(a, b, |a, b| if a > b { a } else { b }) }
        fn min(a: V, b: V) -> V { zip(a, b, |a, b| if a < b { a } else { b }) }
        fn fma(a: V, b: V, c: V) -> V { std::array::from_fn(|i| a[i] * b[i] + c[i]) }
        fn exp2_biased(v: V) -> V { v.map(|v| f32::from_bits(v.to_bits().wrapping_add(127) << 23)) }
        fn zero_below(v: V, x: V, bound: f32) -> V { zip(v, x, |v, x| if x < bound { 0.0 } else { v }) }

        fn load_bf16(a: &[bf16; LANES]) -> V { a.map(bf16::widen) }
        fn store_bf16(v: V, a: &mut [bf16; LANES]) { *a = v.map(bf16::narrow); }
        fn load_f16(a: &[f16; LANES]) -> V { a.map(f16::widen) }
        fn store_f16(v: V, a: &mut [f16; LANES]) { *a = v.map(f16::narrow); }

        fn words_f32(a: &[f32; LANES]) -> Self::Raw { a.map(f32::to_bits) }
        fn words_u16(a: &[u16; 2 * LANES]) -> Self::Raw {
            std::array::from_fn(|i| u32::from(a[2 * i]) | u32::from(a[2 * i + 1]) << 16)
        }
        fn transpose(rows: [Self::Raw; LANES]) -> [Self::Raw; LANES] {
            std::array::from_fn(|i| std::array::from_fn(|j| rows[j][i]))
        }
        fn as_f32(v: Self::Raw) -> V { v.map(f32::from_bits) }
        fn half_bf16<const HIGH: bool>(v: Self::Raw) -> V {
            v.map(|w| f32::from_bits(if HIGH { w & 0xffff_0000 } else { w << 16 }))
        }
        fn half_f16<const HIGH: bool>(v: Self::Raw) -> V {
            v.map(|w| f16::from_bits((if HIGH { w >> 16 } else { w }) as u16).widen())
        }
        fn to_words(v: V) -> Self::Raw { v.map(f32::to_bits) }
        fn load_words(a: &[u32; LANES]) -> Self::Raw { *a }
        fn store_words(v: Self::Raw, a: &mut [u32; LANES]) { *a = v; }

        fn load_bytes(a: &[u8; 4 * LANES]) -> Self::Raw {
            std::array::from_fn(|i| u32::from_le_bytes(a.as_chunks().0[i]))
        }
        fn splat_word(x: u32) -> Self::Raw { [x; LANES] }
        fn widen_bytes(a: &[u8; LANES]) -> Self::Raw { a.map(u32::from) }
        fn widen_signed(a: &[u8; LANES]) -> Self::Raw { a.map(|x| i32::from(x.cast_signed()) as u32) }
        fn widen_halves(a: &[u8; 2 * LANES]) -> Self::Raw {
            std::array::from_fn(|i| u32::from(u16::from_le_bytes([a[2 * i], a[2 * i + 1]])))
        }
        fn shift_left(v: Self::Raw, bits: u32) -> Self::Raw { v.map(|w| w << bits) }
        fn shift_right(v: Self::Raw, bits: u32) -> Self::Raw { v.map(|w| w >> bits) }
        fn or_words(a: Self::Raw, b: Self::Raw) -> Self::Raw { std::array::from_fn(|i| a[i] | b[i]) }
        fn mask_words(v: Self::Raw, mask: u32) -> Self::Raw { v.map(|w| w & mask) }
        fn look_up_bytes(table: &[u8; 16], v: Self::Raw) -> Self::Raw {
            v.map(|w| u32::from_le_bytes(w.to_le_bytes().map(|byte| table[usize::from(byte & 0xf)])))
        }
        fn mul_words(a: Self::Raw, b: Self::Raw) -> Self::Raw {
            std::array::from_fn(|i| a[i].wrapping_mul(b[i]))
        }
        fn sub_i16(a: Self::Raw, b: Self::Raw) -> Self::Raw {
            let high = |i: usize| (a[i] & 0xffff_0000).wrapping_sub(b[i] & 0xffff_0000);
            std::array::from_fn(|i| high(i) | (a[i].wrapping_sub(b[i]) & 0xffff))
        }
        fn dot_i16(acc: Self::Raw, x: u32, w: Self::Raw) -> Self::Raw {
            let product = |w: u32, shift: u32| i32::from((x >> shift) as i16) * i32::from((w >> shift) as i16);
            std::array::from_fn(|i| acc[i].wrapping_add((product(w[i], 0).wrapping_add(product(w[i], 16))) as u32))
        }
        fn dot_bytes(acc: Self::Raw, a: Self::Raw, b: Self::Raw) -> Self::Raw {
            let product = |a: u32, b: u32, i: u32| ((a >> (8 * i)) as u8 as i32) * ((b >> (8 * i)) as i8 as i32);
            let products = |i: usize| (0..4).map(|byte| product(a[i], b[i], byte)).sum::<i32>();
            std::array::from_fn(|i| acc[i].wrapping_add(products(i) as u32))
        }
        fn nibbles(v: Self::Raw) -> [Self::Raw; 4] {
            std::array::from_fn(|i| v.map(|w| w >> (4 * i) & 0x000f_000f))
        }
        fn nibbles_in_place(v: Self::Raw) -> [Self::Raw; 4] {
            let masks = [0x000f_000f, 0x00f0_00f0, 0x0f00_0f00].map(|mask| v.map(|w| w & mask));
            [masks[0], masks[1], masks[2], v.map(|w| w >> 12 & 0x000f_000f)]
        }
        fn nibble_bytes(v: Self::Raw) -> [Self::Raw; 2] {
            [v.map(|w| w & 0x0f0f_0f0f), v.map(|w| w >> 4 & 0x0f0f_0f0f)]
        }
        fn add_words(a: Self::Raw, b: Self::Raw) -> Self::Raw {
            std::array::from_fn(|i| a[i].wrapping_add(b[i]))
        }
        fn max_words(a: Self::Raw, b: Self::Raw) -> Self::Raw {
            std::array::from_fn(|i| (a[i] as i32).max(b[i] as i32) as u32)
        }
        fn fold_add_words(v: Self::Raw) -> u32 { v.into_iter().fold(0, u32::wrapping_add) }
        fn fold_max_words(v: Self::Raw) -> u32 { v.into_iter().fold(i32::MIN, |a, b| a.max(b as i32)) as u32 }
        fn store_i16(v: Self::Raw, a: &mut [u16; LANES]) { *a = v.map(|w| w as u16); }
        fn magnitude(v: V) -> Self::Raw { v.map(|v| v.abs().to_bits()) }
        fn sixteenth(v: Self::Raw) -> Self::Raw { v.map(|w| (w as i32 >> 4) as u32) }
        fn bytes(v: Self::Raw) -> [Self::Raw; 2] {
            std::array::from_fn(|i| v.map(|w| w >> (8 * i) & 0x00ff_00ff))
        }
        fn halves(v: Self::Raw) -> [Self::Raw; 2] { [v.map(|w| w & 0xffff), v.map(|w| w >> 16)] }
        fn ints(v: Self::Raw) -> V { v.map(|w| w as i32 as f32) }
        fn e4m3_small(v: Self::Raw) -> V {
            v.map(|w| f32::from_bits((w & 0x80) << 24 | (w & 0x7f) << 20))
        }
        fn look_up(table: &[f32; LANES], v: Self::Raw) -> V { v.map(|w| table[(w & 0xf) as usize]) }
    }

    #[inline(always)]
    fn prefetch<T>(self, _p: *const T) {}
}
