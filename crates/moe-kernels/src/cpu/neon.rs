//! The NEON path of 64-bit Arm: four registers per vector of 16 lanes. Every such processor has what it uses, so it
//! needs no check. It fuses multiply-adds like AVX2 and gives the same bits.

use std::arch::aarch64::*;
use std::arch::asm;

use half::{bf16, f16};

use super::Kernel;
use super::simd::{LANES, Simd, intrinsics};

/// NEON as in every 64-bit Arm processor.
#[derive(Clone, Copy)]
pub(crate) struct Neon;

/// Runs a kernel with NEON.
#[inline(never)]
pub(crate) fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Neon)
}

type V = [float32x4_t; 4];
type Raw = [uint32x4_t; 4];

/// Evaluates an expression for each of the four registers of a vector. A closure under `array::map` would not always
/// be inlined.
macro_rules! each {
    ($v:ident in $of:expr => $e:expr) => {{
        let of = $of;
        [each!(@ $v = of[0] => $e), each!(@ $v = of[1] => $e), each!(@ $v = of[2] => $e), each!(@ $v = of[3] => $e)]
    }};
    (@ $v:ident = $value:expr => $e:expr) => {{
        let $v = $value;
        $e
    }};
}

/// Applies an intrinsic to the registers of two vectors.
macro_rules! both {
    ($f:ident($a:expr, $b:expr)) => {{
        let a = $a;
        let b = $b;
        [$f(a[0], b[0]), $f(a[1], b[1]), $f(a[2], b[2]), $f(a[3], b[3])]
    }};
}

/// The quarters of an array.
#[inline(always)]
fn quarters<T, const N: usize>(a: &[T; N]) -> [*const T; 4] {
    [0, 1, 2, 3].map(|i| a[i * (N / 4)..].as_ptr())
}

/// The quarters of an array of 16, writable.
#[inline(always)]
fn quarters_mut<T>(a: &mut [T; LANES]) -> [*mut T; 4] {
    let first = a.as_mut_ptr();
    [0, 4, 8, 12].map(|i| first.wrapping_add(i))
}

impl Simd for Neon {
    type V = V;
    type Raw = Raw;
    const TILE_VECTORS: usize = 1;
    const TILE_ROWS: usize = 4;
    const DIRECT_ROWS: usize = 2;

    intrinsics! {
        fn splat(x: f32) -> V { [vdupq_n_f32(x); 4] }
        fn load(a: &[f32; LANES]) -> V { each!(p in quarters(a) => vld1q_f32(p)) }
        fn store(v: V, a: &mut [f32; LANES]) {
            let to = quarters_mut(a);
            for i in 0..4 {
                vst1q_f32(to[i], v[i]);
            }
        }
        fn add(a: V, b: V) -> V { both!(vaddq_f32(a, b)) }
        fn sub(a: V, b: V) -> V { both!(vsubq_f32(a, b)) }
        fn mul(a: V, b: V) -> V { both!(vmulq_f32(a, b)) }
        fn div(a: V, b: V) -> V { both!(vdivq_f32(a, b)) }
        // The instructions for maximum and minimum return NaN where either is NaN.
        fn max(a: V, b: V) -> V { both!(larger(a, b)) }
        fn min(a: V, b: V) -> V { both!(smaller(a, b)) }
        fn fma(a: V, b: V, c: V) -> V {
            [0, 1, 2, 3].map(|i| vfmaq_f32(c[i], a[i], b[i]))
        }
        fn fold_add(v: V) -> f32 {
            let v = vaddq_f32(vaddq_f32(v[0], v[2]), vaddq_f32(v[1], v[3]));
            let v = vadd_f32(vget_low_f32(v), vget_high_f32(v));
            vget_lane_f32::<0>(v) + vget_lane_f32::<1>(v)
        }
        fn exp2_biased(v: V) -> V {
            each!(v in v => {
                let exponent = vaddq_u32(vreinterpretq_u32_f32(v), vdupq_n_u32(127));
                vreinterpretq_f32_u32(vshlq_n_u32::<23>(exponent))
            })
        }
        fn zero_below(v: V, x: V, bound: f32) -> V {
            // No lane with NaN is below, so that v is kept.
            let below = each!(x in x => vcltq_f32(x, vdupq_n_f32(bound)));
            let v = each!(v in v => vreinterpretq_u32_f32(v));
            each!(v in both!(vbicq_u32(v, below)) => vreinterpretq_f32_u32(v))
        }

        fn load_bf16(a: &[bf16; LANES]) -> V {
            each!(p in quarters(a) => vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(p.cast()))))
        }
        fn store_bf16(v: V, a: &mut [bf16; LANES]) {
            let rounded = each!(v in v => {
                let bits = vreinterpretq_u32_f32(v);
                let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
                let up = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
                let quiet = vorrq_u32(bits, vdupq_n_u32(0x0040_0000));
                vshrn_n_u32::<16>(vbslq_u32(vceqq_f32(v, v), up, quiet))
            });
            let to = quarters_mut(a);
            for i in 0..4 {
                vst1_u16(to[i].cast(), rounded[i]);
            }
        }
        fn load_f16(a: &[f16; LANES]) -> V { each!(p in quarters(a) => widen_f16(vld1_u16(p.cast()))) }
        fn store_f16(v: V, a: &mut [f16; LANES]) {
            let to = quarters_mut(a);
            for i in 0..4 {
                vst1_u16(to[i].cast(), narrow_f16(v[i]));
            }
        }

        fn words_f32(a: &[f32; LANES]) -> Raw { each!(p in quarters(a) => vld1q_u32(p.cast())) }
        fn words_u16(a: &[u16; 2 * LANES]) -> Raw { each!(p in quarters(a) => vld1q_u32(p.cast())) }
        fn transpose(rows: [Raw; LANES]) -> [Raw; LANES] {
            let mut out = rows;
            for (block, column) in (0..4).flat_map(|block| (0..4).map(move |column| (block, column))) {
                let turned = transpose4([0, 1, 2, 3].map(|i| rows[4 * block + i][column]));
                for i in 0..4 {
                    out[4 * column + i][block] = turned[i];
                }
            }
            out
        }
        fn as_f32(v: Raw) -> V { each!(v in v => vreinterpretq_f32_u32(v)) }
        fn half_bf16<const HIGH: bool>(v: Raw) -> V {
            each!(v in v => vreinterpretq_f32_u32(match HIGH {
                true => vandq_u32(v, vdupq_n_u32(0xffff_0000)),
                false => vshlq_n_u32::<16>(v),
            }))
        }
        fn half_f16<const HIGH: bool>(v: Raw) -> V {
            each!(v in v => widen_f16(match HIGH {
                true => vshrn_n_u32::<16>(v),
                false => vmovn_u32(v),
            }))
        }
        fn to_words(v: V) -> Raw { each!(v in v => vreinterpretq_u32_f32(v)) }
        fn load_words(a: &[u32; LANES]) -> Raw { each!(p in quarters(a) => vld1q_u32(p)) }
        fn store_words(v: Raw, a: &mut [u32; LANES]) {
            let to = quarters_mut(a);
            for i in 0..4 {
                vst1q_u32(to[i], v[i]);
            }
        }

        fn load_bytes(a: &[u8; 4 * LANES]) -> Raw { each!(p in quarters(a) => vreinterpretq_u32_u8(vld1q_u8(p))) }
        fn splat_word(x: u32) -> Raw { [vdupq_n_u32(x); 4] }
        fn widen_bytes(a: &[u8; LANES]) -> Raw {
            let bytes = vld1q_u8(a.as_ptr());
            let low = vmovl_u8(vget_low_u8(bytes));
            let high = vmovl_high_u8(bytes);
            [vmovl_u16(vget_low_u16(low)), vmovl_high_u16(low), vmovl_u16(vget_low_u16(high)), vmovl_high_u16(high)]
        }
        fn widen_signed(a: &[u8; LANES]) -> Raw {
            let bytes = vreinterpretq_s8_u8(vld1q_u8(a.as_ptr()));
            let low = vmovl_s8(vget_low_s8(bytes));
            let high = vmovl_high_s8(bytes);
            let words = [
                vmovl_s16(vget_low_s16(low)),
                vmovl_high_s16(low),
                vmovl_s16(vget_low_s16(high)),
                vmovl_high_s16(high),
            ];
            each!(v in words => vreinterpretq_u32_s32(v))
        }
        fn widen_halves(a: &[u8; 2 * LANES]) -> Raw { each!(p in quarters(a) => vmovl_u16(vld1_u16(p.cast()))) }
        fn shift_left(v: Raw, bits: u32) -> Raw { each!(v in v => vshlq_u32(v, vdupq_n_s32(bits as i32))) }
        fn shift_right(v: Raw, bits: u32) -> Raw { each!(v in v => vshlq_u32(v, vdupq_n_s32(-(bits as i32)))) }
        fn or_words(a: Raw, b: Raw) -> Raw { both!(vorrq_u32(a, b)) }
        fn mask_words(v: Raw, mask: u32) -> Raw { each!(v in v => vandq_u32(v, vdupq_n_u32(mask))) }
        fn look_up_bytes(table: &[u8; 16], v: Raw) -> Raw {
            let table = vld1q_u8(table.as_ptr());
            each!(v in v => vreinterpretq_u32_u8(vqtbl1q_u8(table, vreinterpretq_u8_u32(v))))
        }
        fn mul_words(a: Raw, b: Raw) -> Raw { both!(vmulq_u32(a, b)) }
        fn sub_i16(a: Raw, b: Raw) -> Raw {
            let a = each!(v in a => vreinterpretq_u16_u32(v));
            let b = each!(v in b => vreinterpretq_u16_u32(v));
            each!(v in both!(vsubq_u16(a, b)) => vreinterpretq_u32_u16(v))
        }
        fn dot_i16(acc: Raw, x: u32, w: Raw) -> Raw {
            let x = vreinterpretq_s16_u32(vdupq_n_u32(x));
            let pairs = each!(w in w => {
                let w = vreinterpretq_s16_u32(w);
                let low = vmull_s16(vget_low_s16(x), vget_low_s16(w));
                vreinterpretq_u32_s32(vpaddq_s32(low, vmull_high_s16(x, w)))
            });
            both!(vaddq_u32(acc, pairs))
        }
        fn nibbles(v: Raw) -> [Raw; 4] {
            let mask = vdupq_n_u32(0x000f_000f);
            [
                each!(v in v => vandq_u32(v, mask)),
                each!(v in v => vandq_u32(vshrq_n_u32::<4>(v), mask)),
                each!(v in v => vandq_u32(vshrq_n_u32::<8>(v), mask)),
                each!(v in v => vandq_u32(vshrq_n_u32::<12>(v), mask)),
            ]
        }
        fn nibbles_in_place(v: Raw) -> [Raw; 4] {
            [
                each!(v in v => vandq_u32(v, vdupq_n_u32(0x000f_000f))),
                each!(v in v => vandq_u32(v, vdupq_n_u32(0x00f0_00f0))),
                each!(v in v => vandq_u32(v, vdupq_n_u32(0x0f00_0f00))),
                each!(v in v => vandq_u32(vshrq_n_u32::<12>(v), vdupq_n_u32(0x000f_000f))),
            ]
        }
        fn dot_bytes(acc: Raw, a: Raw, b: Raw) -> Raw {
            // A product of two bytes fits 16 bits.
            let a = each!(v in a => vreinterpretq_u8_u32(v));
            let b = each!(v in b => vreinterpretq_s8_u32(v));
            let sums = both!(sum_of_four(a, b));
            both!(vaddq_u32(acc, sums))
        }
        fn nibble_bytes(v: Raw) -> [Raw; 2] {
            let mask = vdupq_n_u32(0x0f0f_0f0f);
            [each!(v in v => vandq_u32(v, mask)), each!(v in v => vandq_u32(vshrq_n_u32::<4>(v), mask))]
        }
        fn add_words(a: Raw, b: Raw) -> Raw { both!(vaddq_u32(a, b)) }
        fn max_words(a: Raw, b: Raw) -> Raw {
            let a = each!(v in a => vreinterpretq_s32_u32(v));
            let b = each!(v in b => vreinterpretq_s32_u32(v));
            each!(v in both!(vmaxq_s32(a, b)) => vreinterpretq_u32_s32(v))
        }
        fn fold_add_words(v: Raw) -> u32 { vaddvq_u32(vaddq_u32(vaddq_u32(v[0], v[1]), vaddq_u32(v[2], v[3]))) }
        fn fold_max_words(v: Raw) -> u32 {
            let v = each!(v in v => vreinterpretq_s32_u32(v));
            vmaxvq_s32(vmaxq_s32(vmaxq_s32(v[0], v[1]), vmaxq_s32(v[2], v[3]))) as u32
        }
        fn store_i16(v: Raw, a: &mut [u16; LANES]) {
            let to = quarters_mut(a);
            for i in 0..4 {
                vst1_u16(to[i], vmovn_u32(v[i]));
            }
        }
        fn magnitude(v: V) -> Raw { each!(v in v => vreinterpretq_u32_f32(vabsq_f32(v))) }
        fn sixteenth(v: Raw) -> Raw {
            each!(v in v => vreinterpretq_u32_s32(vshrq_n_s32::<4>(vreinterpretq_s32_u32(v))))
        }
        fn bytes(v: Raw) -> [Raw; 2] {
            let mask = vdupq_n_u32(0x00ff_00ff);
            [each!(v in v => vandq_u32(v, mask)), each!(v in v => vandq_u32(vshrq_n_u32::<8>(v), mask))]
        }
        fn halves(v: Raw) -> [Raw; 2] {
            let mask = vdupq_n_u32(0xffff);
            [each!(v in v => vandq_u32(v, mask)), each!(v in v => vshrq_n_u32::<16>(v))]
        }
        fn ints(v: Raw) -> V { each!(v in v => vcvtq_f32_s32(vreinterpretq_s32_u32(v))) }
        fn e4m3_small(v: Raw) -> V {
            each!(v in v => {
                let sign = vshlq_n_u32::<24>(vandq_u32(v, vdupq_n_u32(0x80)));
                let magnitude = vshlq_n_u32::<20>(vandq_u32(v, vdupq_n_u32(0x7f)));
                vreinterpretq_f32_u32(vorrq_u32(sign, magnitude))
            })
        }
        fn look_up(table: &[f32; LANES], v: Raw) -> V {
            let quarters = quarters(table);
            let table = uint8x16x4_t(
                vld1q_u8(quarters[0].cast()),
                vld1q_u8(quarters[1].cast()),
                vld1q_u8(quarters[2].cast()),
                vld1q_u8(quarters[3].cast()),
            );
            each!(v in v => {
                // The places of the four bytes of each value.
                let first = vmulq_u32(vandq_u32(v, vdupq_n_u32(0xf)), vdupq_n_u32(0x0404_0404));
                let places = vaddq_u32(first, vdupq_n_u32(0x0302_0100));
                vreinterpretq_f32_u8(vqtbl4q_u8(table, vreinterpretq_u8_u32(places)))
            })
        }
    }

    #[inline(always)]
    fn prefetch<T>(self, p: *const T) {
        // SAFETY: a prefetch of an address that is not valid does nothing.
        unsafe { asm!("prfm pldl1keep, [{p}]", p = in(reg) p, options(nostack, readonly, preserves_flags)) }
    }
}

/// `if a > b { a } else { b }`.
#[inline(always)]
fn larger(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    // SAFETY: every 64-bit Arm processor has NEON.
    unsafe { vbslq_f32(vcgtq_f32(a, b), a, b) }
}

/// `if a < b { a } else { b }`.
#[inline(always)]
fn smaller(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    // SAFETY: as in `larger`.
    unsafe { vbslq_f32(vcltq_f32(a, b), a, b) }
}

/// f16 as f32, exactly. The intrinsic needs a type that Rust does not have yet.
#[inline(always)]
fn widen_f16(v: uint16x4_t) -> float32x4_t {
    let wide: float32x4_t;
    // SAFETY: as in `larger`; the instruction reads and writes registers alone.
    unsafe {
        asm!("fcvtl {wide:v}.4s, {v:v}.4h", wide = lateout(vreg) wide, v = in(vreg) v, options(pure, nomem, nostack));
    }
    wide
}

/// f32 rounded to the nearest f16.
#[inline(always)]
fn narrow_f16(v: float32x4_t) -> uint16x4_t {
    let narrow: uint16x4_t;
    // SAFETY: as in `widen_f16`.
    unsafe {
        asm!("fcvtn {narrow:v}.4h, {v:v}.4s", narrow = lateout(vreg) narrow, v = in(vreg) v, options(pure, nomem, nostack));
    }
    narrow
}

/// The sum of the four products of bytes of each word.
#[inline(always)]
fn sum_of_four(a: uint8x16_t, b: int8x16_t) -> uint32x4_t {
    // SAFETY: as in `larger`.
    unsafe {
        let low = vmulq_s16(vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(a))), vmovl_s8(vget_low_s8(b)));
        let high = vmulq_s16(vreinterpretq_s16_u16(vmovl_high_u8(a)), vmovl_high_s8(b));
        vreinterpretq_u32_s32(vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)))
    }
}

/// Transposes a 4 x 4 matrix of words.
#[inline(always)]
fn transpose4(rows: [uint32x4_t; 4]) -> [uint32x4_t; 4] {
    // SAFETY: as in `larger`.
    unsafe {
        let pair = |a: uint32x4_t, b: uint32x4_t| {
            [vreinterpretq_u64_u32(vtrn1q_u32(a, b)), vreinterpretq_u64_u32(vtrn2q_u32(a, b))]
        };
        let [even0, odd0] = pair(rows[0], rows[1]);
        let [even1, odd1] = pair(rows[2], rows[3]);
        let columns = [
            vtrn1q_u64(even0, even1),
            vtrn1q_u64(odd0, odd1),
            vtrn2q_u64(even0, even1),
            vtrn2q_u64(odd0, odd1),
        ];
        columns.map(|column| vreinterpretq_u32_u64(column))
    }
}
