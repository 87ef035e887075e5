//! The AVX2 paths: two registers per vector of 16 lanes, with FMA and F16C; one of them with the dot product of
//! integers of AVX-VNNI.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::Kernel;
use super::simd::{LANES, Simd, intrinsics};

/// AVX2 with FMA and F16C, and with AVX-VNNI or without. A value exists only inside [`run`] and [`run_vnni`], whose
/// callers have checked the processor.
#[derive(Clone, Copy)]
pub(crate) struct Avx2<const VNNI: bool>(());

/// Runs a kernel with AVX2, FMA and F16C.
///
/// # Safety
/// The processor must support `CpuIsa::Avx2`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Avx2::<false>(()))
}

/// Runs a kernel with AVX-VNNI as well.
///
/// # Safety
/// The processor must support `CpuIsa::Avx2Vnni`.
#[target_feature(enable = "avxvnni,avx2,fma,f16c")]
pub(crate) unsafe fn run_vnni<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Avx2::<true>(()))
}

type V = [__m256; 2];
type Raw = [__m256i; 2];

/// Applies an intrinsic to both halves of two vectors.
macro_rules! both {
    ($f:ident($a:expr, $b:expr)) => {{
        let a = $a;
        let b = $b;
        [$f(a[0], b[0]), $f(a[1], b[1])]
    }};
}

/// Evaluates an expression for each of two halves. A closure under `array::map` would not always
/// be inlined, and code out of line is compiled without the instruction set.
macro_rules! each {
    ($v:ident in $of:expr => $e:expr) => {{
        let [low, high] = $of;
        [
            {
                let $v = low;
                $e
            },
            {
                let $v = high;
                $e
            },
        ]
    }};
}

/// The two halves of an array of 16.
#[inline(always)]
fn halves<T>(a: &[T; LANES]) -> [*const T; 2] {
    [a[..8].as_ptr(), a[8..].as_ptr()]
}

/// The two halves of an array of 16, writable.
#[inline(always)]
fn halves_mut<T>(a: &mut [T; LANES]) -> [*mut T; 2] {
    let (low, high) = a.split_at_mut(8);
    [low.as_mut_ptr(), high.as_mut_ptr()]
}

impl<const VNNI: bool> Simd for Avx2<VNNI> {
    type V = V;
    type Raw = Raw;
    const TILE_VECTORS: usize = 1;
    const TILE_ROWS: usize = 6;
    const PANEL_ROWS: usize = 4;
    const PAIRED_ROWS: usize = 2;
    const DIRECT_ROWS: usize = 2;
    const HAS_BYTE_DOTS: bool = VNNI;

    intrinsics! {
        fn splat(x: f32) -> V { [_mm256_set1_ps(x); 2] }
        fn load(a: &[f32; LANES]) -> V { each!(p in halves(a) => _mm256_loadu_ps(p)) }
        fn store(v: V, a: &mut [f32; LANES]) {
            let [low, high] = halves_mut(a);
            _mm256_storeu_ps(low, v[0]);
            _mm256_storeu_ps(high, v[1]);
        }
        fn add(a: V, b: V) -> V { both!(_mm256_add_ps(a, b)) }
        fn sub(a: V, b: V) -> V { both!(_mm256_sub_ps(a, b)) }
        fn mul(a: V, b: V) -> V { both!(_mm256_mul_ps(a, b)) }
        fn div(a: V, b: V) -> V { both!(_mm256_div_ps(a, b)) }
        fn max(a: V, b: V) -> V { both!(_mm256_max_ps(a, b)) }
        fn min(a: V, b: V) -> V { both!(_mm256_min_ps(a, b)) }
        fn fma(a: V, b: V, c: V) -> V {
            [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])]
        }
        fn fold_add(v: V) -> f32 { add8(_mm256_add_ps(v[0], v[1])) }
        fn fold_max(v: V) -> f32 { max8(_mm256_max_ps(v[0], v[1])) }
        fn exp2_biased(v: V) -> V {
            each!(v in v => {
                let exponent = _mm256_add_epi32(_mm256_castps_si256(v), _mm256_set1_epi32(127));
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent))
            })
        }
        fn zero_below(v: V, x: V, bound: f32) -> V {
            // Not less than: true where x is NaN, so that v is kept.
            let keep = each!(x in x => _mm256_cmp_ps::<_CMP_NLT_UQ>(x, _mm256_set1_ps(bound)));
            both!(_mm256_and_ps(v, keep))
        }

        fn load_bf16(a: &[bf16; LANES]) -> V {
            each!(p in halves(a) => {
                let half = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(half))
            })
        }
        fn store_bf16(v: V, a: &mut [bf16; LANES]) {
            let rounded = each!(v in v => {
                let bits = _mm256_castps_si256(v);
                let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
                let up = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
                let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(v, v));
                let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x0040_0000));
                _mm256_srli_epi32::<16>(_mm256_blendv_epi8(_mm256_add_epi32(bits, up), quiet, nan))
            });
            // The pack works in 128-bit halves; the permutation puts them in order.
            let packed = _mm256_packus_epi32(rounded[0], rounded[1]);
            let packed = _mm256_permute4x64_epi64::<0b11_01_10_00>(packed);
            _mm256_storeu_si256(a.as_mut_ptr().cast(), packed);
        }
        fn load_f16(a: &[f16; LANES]) -> V {
            each!(p in halves(a) => _mm256_cvtph_ps(_mm_loadu_si128(p.cast())))
        }
        fn store_f16(v: V, a: &mut [f16; LANES]) {
            let [low, high] = halves_mut(a);
            _mm_storeu_si128(low.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v[0]));
            _mm_storeu_si128(high.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v[1]));
        }

        fn words_f32(a: &[f32; LANES]) -> Raw { each!(p in halves(a) => _mm256_loadu_si256(p.cast())) }
        fn words_u16(a: &[u16; 2 * LANES]) -> Raw {
            let (low, high) = a.split_at(LANES);
            each!(a in [low, high] => _mm256_loadu_si256(a.as_ptr().cast()))
        }
        fn transpose(rows: [Raw; LANES]) -> [Raw; LANES] {
            let mut out = rows;
            for (half, column) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                let mut block = [rows[0][0]; 8];
                for i in 0..8 {
                    block[i] = rows[8 * half + i][column];
                }
                let block = transpose8(block);
                for i in 0..8 {
                    out[8 * column + i][half] = block[i];
                }
            }
            out
        }
        fn as_f32(v: Raw) -> V { each!(v in v => _mm256_castsi256_ps(v)) }
        fn half_bf16<const HIGH: bool>(v: Raw) -> V {
            each!(v in v => _mm256_castsi256_ps(if HIGH {
                _mm256_and_si256(v, _mm256_set1_epi32(0xffff_0000_u32 as i32))
            } else {
                _mm256_slli_epi32::<16>(v)
            }))
        }
        fn half_f16<const HIGH: bool>(v: Raw) -> V {
            each!(v in v => {
                let word = if HIGH {
                    _mm256_srli_epi32::<16>(v)
                } else {
                    _mm256_and_si256(v, _mm256_set1_epi32(0xffff))
                };
                let packed = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(word, word));
                _mm256_cvtph_ps(_mm256_castsi256_si128(packed))
            })
        }
        fn to_words(v: V) -> Raw { [_mm256_castps_si256(v[0]), _mm256_castps_si256(v[1])] }
        fn load_words(a: &[u32; LANES]) -> Raw { each!(p in halves(a) => _mm256_loadu_si256(p.cast())) }
        fn store_words(v: Raw, a: &mut [u32; LANES]) {
            let [low, high] = halves_mut(a);
            _mm256_storeu_si256(low.cast(), v[0]);
            _mm256_storeu_si256(high.cast(), v[1]);
        }

        fn load_bytes(a: &[u8; 4 * LANES]) -> Raw {
            let (low, high) = a.split_at(2 * LANES);
            each!(a in [low, high] => _mm256_loadu_si256(a.as_ptr().cast()))
        }
        fn splat_word(x: u32) -> Raw { [_mm256_set1_epi32(x as i32); 2] }
        fn widen_bytes(a: &[u8; LANES]) -> Raw {
            each!(p in halves(a) => _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast())))
        }
        fn widen_signed(a: &[u8; LANES]) -> Raw {
            each!(p in halves(a) => _mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast())))
        }
        fn widen_halves(a: &[u8; 2 * LANES]) -> Raw {
            each!(p in [a.as_ptr(), a[LANES..].as_ptr()] => _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast())))
        }
        fn shift_left(v: Raw, bits: u32) -> Raw {
            each!(v in v => _mm256_sll_epi32(v, _mm_cvtsi32_si128(bits as i32)))
        }
        fn shift_right(v: Raw, bits: u32) -> Raw {
            each!(v in v => _mm256_srl_epi32(v, _mm_cvtsi32_si128(bits as i32)))
        }
        fn or_words(a: Raw, b: Raw) -> Raw { both!(_mm256_or_si256(a, b)) }
        fn mask_words(v: Raw, mask: u32) -> Raw {
            each!(v in v => _mm256_and_si256(v, _mm256_set1_epi32(mask as i32)))
        }
        fn look_up_bytes(table: &[u8; 16], v: Raw) -> Raw {
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            each!(v in v => _mm256_shuffle_epi8(table, v))
        }
        fn mul_words(a: Raw, b: Raw) -> Raw { both!(_mm256_mullo_epi32(a, b)) }
        fn sub_i16(a: Raw, b: Raw) -> Raw { both!(_mm256_sub_epi16(a, b)) }
        fn dot_i16(acc: Raw, x: u32, w: Raw) -> Raw {
            let x = _mm256_set1_epi32(x as i32);
            both!(_mm256_add_epi32(acc, each!(w in w => _mm256_madd_epi16(x, w))))
        }
        fn nibbles(v: Raw) -> [Raw; 4] {
            let mask = _mm256_set1_epi16(0xf);
            [
                each!(v in v => _mm256_and_si256(v, mask)),
                each!(v in v => _mm256_and_si256(_mm256_srli_epi16::<4>(v), mask)),
                each!(v in v => _mm256_and_si256(_mm256_srli_epi16::<8>(v), mask)),
                each!(v in v => _mm256_srli_epi16::<12>(v)),
            ]
        }
        fn nibbles_in_place(v: Raw) -> [Raw; 4] {
            [
                each!(v in v => _mm256_and_si256(v, _mm256_set1_epi16(0xf))),
                each!(v in v => _mm256_and_si256(v, _mm256_set1_epi16(0xf0))),
                each!(v in v => _mm256_and_si256(v, _mm256_set1_epi16(0xf00))),
                each!(v in v => _mm256_srli_epi16::<12>(v)),
            ]
        }
        fn nibble_bytes(v: Raw) -> [Raw; 2] {
            let mask = _mm256_set1_epi8(0xf);
            [
                each!(v in v => _mm256_and_si256(v, mask)),
                each!(v in v => _mm256_and_si256(_mm256_srli_epi16::<4>(v), mask)),
            ]
        }
        fn add_words(a: Raw, b: Raw) -> Raw { both!(_mm256_add_epi32(a, b)) }
        fn max_words(a: Raw, b: Raw) -> Raw { both!(_mm256_max_epi32(a, b)) }
        fn fold_add_words(v: Raw) -> u32 {
            let v = _mm256_add_epi32(v[0], v[1]);
            let v = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256::<1>(v));
            let v = _mm_add_epi32(v, _mm_shuffle_epi32::<0b11_10_11_10>(v));
            _mm_cvtsi128_si32(_mm_add_epi32(v, _mm_shuffle_epi32::<1>(v))) as u32
        }
        fn fold_max_words(v: Raw) -> u32 {
            let v = _mm256_max_epi32(v[0], v[1]);
            let v = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256::<1>(v));
            let v = _mm_max_epi32(v, _mm_shuffle_epi32::<0b11_10_11_10>(v));
            _mm_cvtsi128_si32(_mm_max_epi32(v, _mm_shuffle_epi32::<1>(v))) as u32
        }
        fn store_i16(v: Raw, a: &mut [u16; LANES]) {
            let packed = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(v[0], v[1]));
            _mm256_storeu_si256(a.as_mut_ptr().cast(), packed);
        }
        fn magnitude(v: V) -> Raw {
            each!(v in v => _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(0x7fff_ffff)))
        }
        fn sixteenth(v: Raw) -> Raw { each!(v in v => _mm256_srai_epi32::<4>(v)) }
        fn bytes(v: Raw) -> [Raw; 2] {
            let mask = _mm256_set1_epi16(0xff);
            [each!(v in v => _mm256_and_si256(v, mask)), each!(v in v => _mm256_srli_epi16::<8>(v))]
        }
        fn halves(v: Raw) -> [Raw; 2] {
            let mask = _mm256_set1_epi32(0xffff);
            [each!(v in v => _mm256_and_si256(v, mask)), each!(v in v => _mm256_srli_epi32::<16>(v))]
        }
        fn ints(v: Raw) -> V { each!(v in v => _mm256_cvtepi32_ps(v)) }
        fn e4m3_small(v: Raw) -> V {
            each!(v in v => {
                let sign = _mm256_slli_epi32::<24>(_mm256_and_si256(v, _mm256_set1_epi32(0x80)));
                let magnitude = _mm256_slli_epi32::<20>(_mm256_and_si256(v, _mm256_set1_epi32(0x7f)));
                _mm256_castsi256_ps(_mm256_or_si256(sign, magnitude))
            })
        }
        fn look_up(table: &[f32; LANES], v: Raw) -> V {
            let [low, high] = halves(table);
            let low = _mm256_loadu_ps(low);
            let high = _mm256_loadu_ps(high);
            each!(v in v => {
                let is_high = _mm256_castsi256_ps(_mm256_slli_epi32::<28>(v));
                let low = _mm256_permutevar8x32_ps(low, v);
                let high = _mm256_permutevar8x32_ps(high, v);
                _mm256_blendv_ps(low, high, is_high)
            })
        }
    }

    #[inline(always)]
    fn dot_i16_of_many(self, acc: Raw, x: u32, w: Raw) -> Raw {
        if !VNNI {
            return self.dot_i16(acc, x, w);
        }
        // SAFETY: `self` proves AVX-VNNI. The sums are exact, so both give the same bits.
        unsafe {
            let x = _mm256_set1_epi32(x as i32);
            [_mm256_dpwssd_avx_epi32(acc[0], x, w[0]), _mm256_dpwssd_avx_epi32(acc[1], x, w[1])]
        }
    }

    #[inline(always)]
    fn dot_bytes(self, acc: Raw, a: Raw, b: Raw) -> Raw {
        // SAFETY: `self` proves AVX2, and AVX-VNNI where it is used; sums of two products that fit 16 bits do not
        // saturate.
        unsafe {
            if VNNI {
                return [
                    _mm256_dpbusd_avx_epi32(acc[0], a[0], b[0]),
                    _mm256_dpbusd_avx_epi32(acc[1], a[1], b[1]),
                ];
            }
            let ones = _mm256_set1_epi16(1);
            let pairs = both!(_mm256_maddubs_epi16(a, b));
            both!(_mm256_add_epi32(acc, each!(pairs in pairs => _mm256_madd_epi16(pairs, ones))))
        }
    }

    #[inline(always)]
    fn prefetch<T>(self, p: *const T) {
        // SAFETY: a prefetch of an address that is not valid does nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
}

/// Folds 8 lanes to their sum: lane i takes lane i + 4, then + 2, + 1.
///
/// # Safety
/// The processor must support AVX2.
#[inline(always)]
pub(super) unsafe fn add8(v: __m256) -> f32 {
    // SAFETY: the caller promises AVX2.
    unsafe {
        let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
        _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
    }
}

/// Folds 8 lanes to their maximum, in the order of [`add8`].
///
/// # Safety
/// The processor must support AVX2.
#[inline(always)]
pub(super) unsafe fn max8(v: __m256) -> f32 {
    // SAFETY: the caller promises AVX2.
    unsafe {
        let v = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let v = _mm_max_ps(v, _mm_movehl_ps(v, v));
        _mm_cvtss_f32(_mm_max_ss(v, _mm_movehdup_ps(v)))
    }
}

/// Transposes an 8 x 8 matrix of words.
///
/// # Safety
/// The processor must support AVX2.
#[inline(always)]
unsafe fn transpose8(r: [__m256i; 8]) -> [__m256i; 8] {
    // SAFETY: the caller promises AVX2.
    unsafe {
        let mut pairs = r;
        for i in 0..4 {
            pairs[2 * i] = _mm256_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
            pairs[2 * i + 1] = _mm256_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
        }
        let mut quads = pairs;
        for g in 0..2 {
            let p = &pairs[4 * g..4 * g + 4];
            quads[4 * g] = _mm256_unpacklo_epi64(p[0], p[2]);
            quads[4 * g + 1] = _mm256_unpackhi_epi64(p[0], p[2]);
            quads[4 * g + 2] = _mm256_unpacklo_epi64(p[1], p[3]);
            quads[4 * g + 3] = _mm256_unpackhi_epi64(p[1], p[3]);
        }
        let mut out = quads;
        for c in 0..4 {
            out[c] = _mm256_permute2x128_si256::<0x20>(quads[c], quads[4 + c]);
            out[4 + c] = _mm256_permute2x128_si256::<0x31>(quads[c], quads[4 + c]);
        }
        out
    }
}
