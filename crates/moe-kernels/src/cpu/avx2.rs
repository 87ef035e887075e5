//! The AVX2 path: two registers per vector of 16 lanes, with FMA and F16C.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::Kernel;
use super::simd::{LANES, Simd};

/// AVX2 with FMA and F16C. A value exists only inside [`run`], whose caller has checked the
/// processor; that is what every `SAFETY` line below relies on.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

/// Runs a kernel with AVX2, FMA and F16C.
///
/// # Safety
/// The processor must support `CpuIsa::Avx2`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Avx2(()))
}

type V = [__m256; 2];
type Raw = [__m256i; 2];

/// Applies an intrinsic to both halves of two vectors.
macro_rules! both {
    ($f:ident($a:expr, $b:expr)) => {{
        let (a, b) = ($a, $b);
        // SAFETY: `self` proves AVX2.
        unsafe { [$f(a[0], b[0]), $f(a[1], b[1])] }
    }};
}

/// Evaluates an expression for each of two halves. A closure under `array::map` would not always
/// be inlined, and code out of line is compiled without the instruction set.
macro_rules! each {
    ($v:ident in $of:expr => $e:expr) => {{
        let [low, high] = $of;
        // SAFETY: `self` proves AVX2, FMA and F16C; a pointer is to 8 elements of an array.
        unsafe {
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
        }
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

impl Simd for Avx2 {
    type V = V;
    type Raw = Raw;
    const TILE_VECTORS: usize = 1;
    const TILE_ROWS: usize = 6;

    #[inline(always)]
    fn splat(self, x: f32) -> V {
        // SAFETY: `self` proves AVX2.
        unsafe { [_mm256_set1_ps(x); 2] }
    }
    #[inline(always)]
    fn load(self, a: &[f32; LANES]) -> V {
        each!(p in halves(a) => _mm256_loadu_ps(p))
    }
    #[inline(always)]
    fn store(self, v: V, a: &mut [f32; LANES]) {
        let [low, high] = halves_mut(a);
        // SAFETY: `self` proves AVX2; each half holds 8 values.
        unsafe {
            _mm256_storeu_ps(low, v[0]);
            _mm256_storeu_ps(high, v[1]);
        }
    }
    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        both!(_mm256_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        both!(_mm256_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        both!(_mm256_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        both!(_mm256_div_ps(a, b))
    }
    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        both!(_mm256_max_ps(a, b))
    }
    #[inline(always)]
    fn min(self, a: V, b: V) -> V {
        both!(_mm256_min_ps(a, b))
    }
    #[inline(always)]
    fn fma(self, a: V, b: V, c: V) -> V {
        // SAFETY: `self` proves FMA.
        unsafe { [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])] }
    }
    #[inline(always)]
    fn fold_add(self, v: V) -> f32 {
        // SAFETY: `self` proves AVX2.
        unsafe {
            let v = _mm256_add_ps(v[0], v[1]);
            let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
            _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
        }
    }
    #[inline(always)]
    fn fold_max(self, v: V) -> f32 {
        // SAFETY: `self` proves AVX2.
        unsafe {
            let v = _mm256_max_ps(v[0], v[1]);
            let v = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let v = _mm_max_ps(v, _mm_movehl_ps(v, v));
            _mm_cvtss_f32(_mm_max_ss(v, _mm_movehdup_ps(v)))
        }
    }
    #[inline(always)]
    fn exp2_biased(self, v: V) -> V {
        each!(v in v => {
            let exponent = _mm256_add_epi32(_mm256_castps_si256(v), _mm256_set1_epi32(127));
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent))
        })
    }
    #[inline(always)]
    fn zero_below(self, v: V, x: V, bound: f32) -> V {
        // Not less than: true where x is NaN, so that v is kept.
        let keep = each!(x in x => _mm256_cmp_ps::<_CMP_NLT_UQ>(x, _mm256_set1_ps(bound)));
        both!(_mm256_and_ps(v, keep))
    }

    #[inline(always)]
    fn load_bf16(self, a: &[bf16; LANES]) -> V {
        each!(p in halves(a) => {
            let half = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(half))
        })
    }
    #[inline(always)]
    fn store_bf16(self, v: V, a: &mut [bf16; LANES]) {
        let rounded = each!(v in v => {
            let bits = _mm256_castps_si256(v);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let up = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
            let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(v, v));
            let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x0040_0000));
            _mm256_srli_epi32::<16>(_mm256_blendv_epi8(_mm256_add_epi32(bits, up), quiet, nan))
        });
        // SAFETY: `self` proves AVX2; the array holds 32 bytes.
        unsafe {
            // The pack works in 128-bit halves; the permutation puts them in order.
            let packed = _mm256_packus_epi32(rounded[0], rounded[1]);
            let packed = _mm256_permute4x64_epi64::<0b11_01_10_00>(packed);
            _mm256_storeu_si256(a.as_mut_ptr().cast(), packed);
        }
    }
    #[inline(always)]
    fn load_f16(self, a: &[f16; LANES]) -> V {
        each!(p in halves(a) => _mm256_cvtph_ps(_mm_loadu_si128(p.cast())))
    }
    #[inline(always)]
    fn store_f16(self, v: V, a: &mut [f16; LANES]) {
        let [low, high] = halves_mut(a);
        // SAFETY: `self` proves F16C; each half holds 16 bytes.
        unsafe {
            _mm_storeu_si128(low.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v[0]));
            _mm_storeu_si128(high.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v[1]));
        }
    }

    #[inline(always)]
    fn words_f32(self, a: &[f32; LANES]) -> Raw {
        each!(p in halves(a) => _mm256_loadu_si256(p.cast()))
    }
    #[inline(always)]
    fn words_u16(self, a: &[u16; 2 * LANES]) -> Raw {
        let (low, high) = a.split_at(LANES);
        each!(a in [low, high] => _mm256_loadu_si256(a.as_ptr().cast()))
    }
    #[inline(always)]
    fn transpose(self, rows: [Raw; LANES]) -> [Raw; LANES] {
        let mut out = rows;
        for (half, column) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let mut block = [rows[0][0]; 8];
            for i in 0..8 {
                block[i] = rows[8 * half + i][column];
            }
            // SAFETY: `self` proves AVX2.
            let block = unsafe { transpose8(block) };
            for i in 0..8 {
                out[8 * column + i][half] = block[i];
            }
        }
        out
    }
    #[inline(always)]
    fn as_f32(self, v: Raw) -> V {
        each!(v in v => _mm256_castsi256_ps(v))
    }
    #[inline(always)]
    fn half_bf16<const HIGH: bool>(self, v: Raw) -> V {
        each!(v in v => _mm256_castsi256_ps(if HIGH {
            _mm256_and_si256(v, _mm256_set1_epi32(0xffff_0000_u32 as i32))
        } else {
            _mm256_slli_epi32::<16>(v)
        }))
    }
    #[inline(always)]
    fn half_f16<const HIGH: bool>(self, v: Raw) -> V {
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
    #[inline(always)]
    fn to_words(self, v: V) -> Raw {
        // SAFETY: `self` proves AVX2.
        unsafe { [_mm256_castps_si256(v[0]), _mm256_castps_si256(v[1])] }
    }
    #[inline(always)]
    fn load_words(self, a: &[u32; LANES]) -> Raw {
        each!(p in halves(a) => _mm256_loadu_si256(p.cast()))
    }
    #[inline(always)]
    fn store_words(self, v: Raw, a: &mut [u32; LANES]) {
        let [low, high] = halves_mut(a);
        // SAFETY: `self` proves AVX2; each half holds 32 bytes.
        unsafe {
            _mm256_storeu_si256(low.cast(), v[0]);
            _mm256_storeu_si256(high.cast(), v[1]);
        }
    }

    #[inline(always)]
    fn prefetch<T>(self, p: *const T) {
        // SAFETY: a prefetch never faults, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
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
