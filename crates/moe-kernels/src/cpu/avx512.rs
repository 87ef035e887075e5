//! The AVX-512 path: one register per vector of 16 lanes, and the dot product of integers (VNNI) where the processor
//! has it.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::Kernel;
use super::avx2::{add8, max8};
use super::simd::{LANES, Simd, intrinsics};

/// AVX-512 F, BW, DQ, VL with FMA and F16C, and with VNNI or without. A value exists only inside [`run`] and
/// [`run_vnni`], whose callers have checked the processor.
#[derive(Clone, Copy)]
pub(crate) struct Avx512<const VNNI: bool>(());

/// Runs a kernel with AVX-512 F, BW, DQ, VL.
///
/// # Safety
/// The processor must support `CpuIsa::Avx512`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(crate) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Avx512::<false>(()))
}

/// Runs a kernel with VNNI as well.
///
/// # Safety
/// The processor must support `CpuIsa::Avx512Bf16`.
#[target_feature(enable = "avx512vnni,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(crate) unsafe fn run_vnni<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Avx512::<true>(()))
}

impl<const VNNI: bool> Simd for Avx512<VNNI> {
    type V = __m512;
    type Raw = __m512i;
    const TILE_VECTORS: usize = 2;
    const TILE_ROWS: usize = 12;
    const DIRECT_ROWS: usize = 8;
    const HAS_BYTE_DOTS: bool = VNNI;

    intrinsics! {
        fn splat(x: f32) -> __m512 { _mm512_set1_ps(x) }
        fn load(a: &[f32; LANES]) -> __m512 { _mm512_loadu_ps(a.as_ptr()) }
        fn store(v: __m512, a: &mut [f32; LANES]) { _mm512_storeu_ps(a.as_mut_ptr(), v) }
        fn add(a: __m512, b: __m512) -> __m512 { _mm512_add_ps(a, b) }
        fn sub(a: __m512, b: __m512) -> __m512 { _mm512_sub_ps(a, b) }
        fn mul(a: __m512, b: __m512) -> __m512 { _mm512_mul_ps(a, b) }
        fn div(a: __m512, b: __m512) -> __m512 { _mm512_div_ps(a, b) }
        fn max(a: __m512, b: __m512) -> __m512 { _mm512_max_ps(a, b) }
        fn min(a: __m512, b: __m512) -> __m512 { _mm512_min_ps(a, b) }
        fn fma(a: __m512, b: __m512, c: __m512) -> __m512 { _mm512_fmadd_ps(a, b, c) }
        fn fold_add(v: __m512) -> f32 {
            add8(_mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v)))
        }
        fn fold_max(v: __m512) -> f32 {
            max8(_mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v)))
        }
        fn exp2_biased(v: __m512) -> __m512 {
            let exponent = _mm512_add_epi32(_mm512_castps_si512(v), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(exponent))
        }
        fn zero_below(v: __m512, x: __m512, bound: f32) -> __m512 {
            // Not less than: true where x is NaN, so that v is kept.
            let keep = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(bound));
            _mm512_maskz_mov_ps(keep, v)
        }

        fn load_bf16(a: &[bf16; LANES]) -> __m512 {
            let half = _mm256_loadu_si256(a.as_ptr().cast());
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(half)))
        }
        fn store_bf16(v: __m512, a: &mut [bf16; LANES]) {
            // vcvtneps2bf16 would flush subnormals; this rounds as `bf16::from_f32` does.
            let bits = _mm512_castps_si512(v);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v);
            let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x0040_0000));
            let rounded = _mm512_mask_mov_epi32(rounded, nan, quiet);
            let half = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(rounded));
            _mm256_storeu_si256(a.as_mut_ptr().cast(), half);
        }
        fn load_f16(a: &[f16; LANES]) -> __m512 { _mm512_cvtph_ps(_mm256_loadu_si256(a.as_ptr().cast())) }
        fn store_f16(v: __m512, a: &mut [f16; LANES]) {
            let half = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v);
            _mm256_storeu_si256(a.as_mut_ptr().cast(), half);
        }

        fn words_f32(a: &[f32; LANES]) -> __m512i { _mm512_loadu_si512(a.as_ptr().cast()) }
        fn words_u16(a: &[u16; 2 * LANES]) -> __m512i { _mm512_loadu_si512(a.as_ptr().cast()) }
        fn transpose(r: [__m512i; LANES]) -> [__m512i; LANES] {
            // Within each 128-bit quarter q: pairs[i] holds columns 4q.. of two rows interleaved,
            // quads[4g + c] column 4q + c of rows 4g..4g + 4.
            let mut pairs = r;
            for i in 0..8 {
                pairs[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
                pairs[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
            }
            let mut quads = pairs;
            for g in 0..4 {
                let p = &pairs[4 * g..4 * g + 4];
                quads[4 * g] = _mm512_unpacklo_epi64(p[0], p[2]);
                quads[4 * g + 1] = _mm512_unpackhi_epi64(p[0], p[2]);
                quads[4 * g + 2] = _mm512_unpacklo_epi64(p[1], p[3]);
                quads[4 * g + 3] = _mm512_unpackhi_epi64(p[1], p[3]);
            }
            // Column 4q + c gathers quarter q of quads[c], quads[4 + c], quads[8 + c], quads[12 + c].
            let mut out = quads;
            for c in 0..4 {
                let low = [
                    _mm512_shuffle_i32x4::<0x88>(quads[c], quads[4 + c]),
                    _mm512_shuffle_i32x4::<0xdd>(quads[c], quads[4 + c]),
                ];
                let high = [
                    _mm512_shuffle_i32x4::<0x88>(quads[8 + c], quads[12 + c]),
                    _mm512_shuffle_i32x4::<0xdd>(quads[8 + c], quads[12 + c]),
                ];
                out[c] = _mm512_shuffle_i32x4::<0x88>(low[0], high[0]);
                out[4 + c] = _mm512_shuffle_i32x4::<0x88>(low[1], high[1]);
                out[8 + c] = _mm512_shuffle_i32x4::<0xdd>(low[0], high[0]);
                out[12 + c] = _mm512_shuffle_i32x4::<0xdd>(low[1], high[1]);
            }
            out
        }
        fn as_f32(v: __m512i) -> __m512 { _mm512_castsi512_ps(v) }
        fn half_bf16<const HIGH: bool>(v: __m512i) -> __m512 {
            _mm512_castsi512_ps(if HIGH {
                _mm512_and_si512(v, _mm512_set1_epi32(0xffff_0000_u32 as i32))
            } else {
                _mm512_slli_epi32::<16>(v)
            })
        }
        fn half_f16<const HIGH: bool>(v: __m512i) -> __m512 {
            let word = if HIGH { _mm512_srli_epi32::<16>(v) } else { v };
            _mm512_cvtph_ps(_mm512_cvtepi32_epi16(word))
        }
        fn to_words(v: __m512) -> __m512i { _mm512_castps_si512(v) }
        fn load_words(a: &[u32; LANES]) -> __m512i { _mm512_loadu_si512(a.as_ptr().cast()) }
        fn store_words(v: __m512i, a: &mut [u32; LANES]) { _mm512_storeu_si512(a.as_mut_ptr().cast(), v) }

        fn load_bytes(a: &[u8; 4 * LANES]) -> __m512i { _mm512_loadu_si512(a.as_ptr().cast()) }
        fn splat_word(x: u32) -> __m512i { _mm512_set1_epi32(x as i32) }
        fn widen_bytes(a: &[u8; LANES]) -> __m512i { _mm512_cvtepu8_epi32(_mm_loadu_si128(a.as_ptr().cast())) }
        fn widen_signed(a: &[u8; LANES]) -> __m512i { _mm512_cvtepi8_epi32(_mm_loadu_si128(a.as_ptr().cast())) }
        fn widen_halves(a: &[u8; 2 * LANES]) -> __m512i {
            _mm512_cvtepu16_epi32(_mm256_loadu_si256(a.as_ptr().cast()))
        }
        fn shift_left(v: __m512i, bits: u32) -> __m512i {
            _mm512_sll_epi32(v, _mm_cvtsi32_si128(bits as i32))
        }
        fn shift_right(v: __m512i, bits: u32) -> __m512i {
            _mm512_srl_epi32(v, _mm_cvtsi32_si128(bits as i32))
        }
        fn or_words(a: __m512i, b: __m512i) -> __m512i { _mm512_or_si512(a, b) }
        fn mask_words(v: __m512i, mask: u32) -> __m512i {
            _mm512_and_si512(v, _mm512_set1_epi32(mask as i32))
        }
        fn look_up_bytes(table: &[u8; 16], v: __m512i) -> __m512i {
            let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
            _mm512_shuffle_epi8(table, v)
        }
        fn mul_words(a: __m512i, b: __m512i) -> __m512i { _mm512_mullo_epi32(a, b) }
        fn sub_i16(a: __m512i, b: __m512i) -> __m512i { _mm512_sub_epi16(a, b) }
        fn nibbles(v: __m512i) -> [__m512i; 4] {
            let mask = _mm512_set1_epi16(0xf);
            [
                _mm512_and_si512(v, mask),
                _mm512_and_si512(_mm512_srli_epi16::<4>(v), mask),
                _mm512_and_si512(_mm512_srli_epi16::<8>(v), mask),
                _mm512_srli_epi16::<12>(v),
            ]
        }
        fn nibbles_in_place(v: __m512i) -> [__m512i; 4] {
            [
                _mm512_and_si512(v, _mm512_set1_epi16(0xf)),
                _mm512_and_si512(v, _mm512_set1_epi16(0xf0)),
                _mm512_and_si512(v, _mm512_set1_epi16(0xf00)),
                _mm512_srli_epi16::<12>(v),
            ]
        }
        fn nibble_bytes(v: __m512i) -> [__m512i; 2] {
            let mask = _mm512_set1_epi8(0xf);
            [_mm512_and_si512(v, mask), _mm512_and_si512(_mm512_srli_epi16::<4>(v), mask)]
        }
        fn add_words(a: __m512i, b: __m512i) -> __m512i { _mm512_add_epi32(a, b) }
        fn max_words(a: __m512i, b: __m512i) -> __m512i { _mm512_max_epi32(a, b) }
        fn fold_add_words(v: __m512i) -> u32 { _mm512_reduce_add_epi32(v) as u32 }
        fn fold_max_words(v: __m512i) -> u32 { _mm512_reduce_max_epi32(v) as u32 }
        fn store_i16(v: __m512i, a: &mut [u16; LANES]) {
            _mm256_storeu_si256(a.as_mut_ptr().cast(), _mm512_cvtepi32_epi16(v));
        }
        fn magnitude(v: __m512) -> __m512i {
            _mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(0x7fff_ffff))
        }
        fn sixteenth(v: __m512i) -> __m512i { _mm512_srai_epi32::<4>(v) }
        fn bytes(v: __m512i) -> [__m512i; 2] {
            [_mm512_and_si512(v, _mm512_set1_epi16(0xff)), _mm512_srli_epi16::<8>(v)]
        }
        fn halves(v: __m512i) -> [__m512i; 2] {
            [_mm512_and_si512(v, _mm512_set1_epi32(0xffff)), _mm512_srli_epi32::<16>(v)]
        }
        fn ints(v: __m512i) -> __m512 { _mm512_cvtepi32_ps(v) }
        fn e4m3_small(v: __m512i) -> __m512 {
            let sign = _mm512_slli_epi32::<24>(_mm512_and_si512(v, _mm512_set1_epi32(0x80)));
            let magnitude = _mm512_slli_epi32::<20>(_mm512_and_si512(v, _mm512_set1_epi32(0x7f)));
            _mm512_castsi512_ps(_mm512_or_si512(sign, magnitude))
        }
        fn look_up(table: &[f32; LANES], v: __m512i) -> __m512 {
            _mm512_permutexvar_ps(v, _mm512_loadu_ps(table.as_ptr()))
        }
    }

    #[inline(always)]
    fn dot_i16(self, acc: __m512i, x: u32, w: __m512i) -> __m512i {
        // SAFETY: `self` proves AVX-512 BW and VNNI where it is used. The sums are exact, so both give the same bits.
        unsafe {
            let x = _mm512_set1_epi32(x as i32);
            if VNNI { _mm512_dpwssd_epi32(acc, x, w) } else { _mm512_add_epi32(acc, _mm512_madd_epi16(x, w)) }
        }
    }

    #[inline(always)]
    fn dot_bytes(self, acc: __m512i, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: as in `dot_i16`; sums of two products that fit 16 bits do not saturate.
        unsafe {
            if VNNI {
                return _mm512_dpbusd_epi32(acc, a, b);
            }
            let pairs = _mm512_maddubs_epi16(a, b);
            _mm512_add_epi32(acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))
        }
    }

    #[inline(always)]
    fn prefetch<T>(self, p: *const T) {
        // SAFETY: a prefetch of an address that is not valid does nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
}
