//! The vector that every CPU kernel is written against: 16 f32 lanes on every instruction set.
//!
//! A kernel is one generic function over [`Simd`]; each instruction set is one thin file that
//! implements the trait ([`super::scalar`], [`super::avx2`], [`super::avx512`]). Because the lane
//! count is the same everywhere, sums take the same order on every path. Paths differ in one
//! operation only: [`Simd::fma`] rounds once where the processor fuses, twice in portable Rust.
//! So the fused paths agree bit for bit.
//!
//! Every function that takes a `Simd` is `#[inline(always)]`: the instruction set is enabled by
//! the one `#[target_feature]` function of the path, and code that is not inlined into it would
//! be compiled without.

use half::{bf16, f16};

use crate::element::Float;

/// Lanes of a vector.
pub(crate) const LANES: usize = 16;

/// An instruction set: operations on vectors of 16 lanes.
pub(crate) trait Simd: Copy {
    /// Sixteen f32.
    type V: Copy;
    /// Sixteen 32-bit words.
    type Raw: Copy;
    /// Vectors of w that a product tile covers: 2 where there are 32 wide registers, else 1.
    const TILE_VECTORS: usize;
    /// Rows of x of a product tile, at most [`super::tile::MAX_ROWS`].
    const TILE_ROWS: usize;
    /// Rows of x of a tile that multiplies panels without expanding them, at most TILE_ROWS: the
    /// widened weights need registers, too.
    const PANEL_ROWS: usize = Self::TILE_ROWS;
    /// Up to this number of rows of x, both panels of a unit are multiplied at once, even where TILE_VECTORS is 1: few
    /// chains advance at the latency of a multiply-add and not at its rate, so there is time for twice as many.
    const PAIRED_ROWS: usize = 0;
    /// Rows of x of a tile that unpacks quantised weights in registers, at most TILE_ROWS. For more rows it is better
    /// to unpack the weights once, into cache.
    const DIRECT_ROWS: usize = 1;
    /// Whether [`Simd::dot_bytes`] is one instruction.
    const HAS_BYTE_DOTS: bool = false;

    fn splat(self, x: f32) -> Self::V;
    fn load(self, a: &[f32; LANES]) -> Self::V;
    fn store(self, v: Self::V, a: &mut [f32; LANES]);
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// `if a > b { a } else { b }`, so b where either is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// `if a < b { a } else { b }`, so b where either is NaN.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// a * b + c.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// Sum of the lanes: lane i takes lane i + 8, then + 4, + 2, + 1.
    #[inline(always)]
    fn fold_add(self, v: Self::V) -> f32 {
        fold(self, v, |a, b| a + b)
    }
    /// Maximum of the lanes, in the order of [`Simd::fold_add`].
    #[inline(always)]
    fn fold_max(self, v: Self::V) -> f32 {
        fold(self, v, |a, b| if a > b { a } else { b })
    }
    /// 2^n for lanes that hold 1.5 * 2^23 + n with -127 <= n <= 127 (0 at -127).
    fn exp2_biased(self, v: Self::V) -> Self::V;
    /// v, but 0 in lanes where x < bound.
    fn zero_below(self, v: Self::V, x: Self::V, bound: f32) -> Self::V;

    fn load_bf16(self, a: &[bf16; LANES]) -> Self::V;
    fn store_bf16(self, v: Self::V, a: &mut [bf16; LANES]);
    fn load_f16(self, a: &[f16; LANES]) -> Self::V;
    fn store_f16(self, v: Self::V, a: &mut [f16; LANES]);

    /// Sixteen words that each hold one f32.
    fn words_f32(self, a: &[f32; LANES]) -> Self::Raw;
    /// Sixteen words that each hold two 16-bit floats, the first in the low half.
    fn words_u16(self, a: &[u16; 2 * LANES]) -> Self::Raw;
    /// Transposes a 16 x 16 matrix of words.
    fn transpose(self, rows: [Self::Raw; LANES]) -> [Self::Raw; LANES];
    /// Words as f32.
    fn as_f32(self, v: Self::Raw) -> Self::V;
    /// The bf16 in the low (`HIGH` = false) or high half of each word.
    fn half_bf16<const HIGH: bool>(self, v: Self::Raw) -> Self::V;
    /// The f16 in the low or high half of each word.
    fn half_f16<const HIGH: bool>(self, v: Self::Raw) -> Self::V;
    /// f32 as words.
    fn to_words(self, v: Self::V) -> Self::Raw;
    fn load_words(self, a: &[u32; LANES]) -> Self::Raw;
    fn store_words(self, v: Self::Raw, a: &mut [u32; LANES]);

    /// Prefetches the cache line at `p`, which need not be valid.
    fn prefetch<T>(self, p: *const T);

    /// Words from their bytes, the lowest first.
    fn load_bytes(self, a: &[u8; 4 * LANES]) -> Self::Raw;
    /// The same word in every lane.
    fn splat_word(self, x: u32) -> Self::Raw;
    /// Bytes as words.
    fn widen_bytes(self, a: &[u8; LANES]) -> Self::Raw;
    /// Bytes with a sign as signed words.
    fn widen_signed(self, a: &[u8; LANES]) -> Self::Raw;
    /// Integers of 16 bits as words, each from its two bytes, the lower first.
    fn widen_halves(self, a: &[u8; 2 * LANES]) -> Self::Raw;
    /// Words shifted to the left by less than 32 bits, with zeros shifted in. A constant number becomes part of the
    /// instruction.
    fn shift_left(self, v: Self::Raw, bits: u32) -> Self::Raw;
    /// Words shifted to the right, like [`shift_left`](Self::shift_left).
    fn shift_right(self, v: Self::Raw, bits: u32) -> Self::Raw;
    /// The bits of both.
    fn or_words(self, a: Self::Raw, b: Self::Raw) -> Self::Raw;
    /// The bits that each word shares with `mask`.
    fn mask_words(self, v: Self::Raw, mask: u32) -> Self::Raw;
    /// The values of a table at each byte, which is below 16.
    fn look_up_bytes(self, table: &[u8; 16], v: Self::Raw) -> Self::Raw;
    /// Low 32 bits of the product of words.
    fn mul_words(self, a: Self::Raw, b: Self::Raw) -> Self::Raw;
    /// Differences of the 16-bit halves of words.
    fn sub_i16(self, a: Self::Raw, b: Self::Raw) -> Self::Raw;
    /// acc + first(x) * first(w) + second(x) * second(w) over pairs of i16, the first in the low half of a word.
    fn dot_i16(self, acc: Self::Raw, x: u32, w: Self::Raw) -> Self::Raw;
    /// [`dot_i16`](Self::dot_i16) where many sums advance side by side, so that an instruction may take longer if it
    /// starts as often.
    #[inline(always)]
    fn dot_i16_of_many(self, acc: Self::Raw, x: u32, w: Self::Raw) -> Self::Raw {
        self.dot_i16(acc, x, w)
    }
    /// The eight 4-bit integers of each word, by pairs: pair i holds those at bits 4i and 16 + 4i.
    fn nibbles(self, v: Self::Raw) -> [Self::Raw; 4];
    /// [`nibbles`](Self::nibbles) without the shifts of pairs 1 and 2, which are left 16 and 256 times as large.
    fn nibbles_in_place(self, v: Self::Raw) -> [Self::Raw; 4];
    /// acc + the sum of the four products of unsigned bytes of `a` and signed bytes of `b` in each word. The sum of two
    /// must fit 16 bits.
    fn dot_bytes(self, acc: Self::Raw, a: Self::Raw, b: Self::Raw) -> Self::Raw;
    /// The low and the high nibble of each byte, as bytes.
    fn nibble_bytes(self, v: Self::Raw) -> [Self::Raw; 2];
    /// Sums of words.
    fn add_words(self, a: Self::Raw, b: Self::Raw) -> Self::Raw;
    /// The larger ones of signed words.
    fn max_words(self, a: Self::Raw, b: Self::Raw) -> Self::Raw;
    /// Sum of words.
    fn fold_add_words(self, v: Self::Raw) -> u32;
    /// The largest of signed words.
    fn fold_max_words(self, v: Self::Raw) -> u32;
    /// Stores words, signed integers of 16 bits.
    fn store_i16(self, v: Self::Raw, a: &mut [u16; LANES]);
    /// f32 without their signs, as words.
    fn magnitude(self, v: Self::V) -> Self::Raw;
    /// Signed words divided by 16, rounded down.
    fn sixteenth(self, v: Self::Raw) -> Self::Raw;
    /// The four bytes of each word, by pairs: bytes 0 and 2, bytes 1 and 3.
    fn bytes(self, v: Self::Raw) -> [Self::Raw; 2];
    /// The halves of each word, the low one first.
    fn halves(self, v: Self::Raw) -> [Self::Raw; 2];
    /// Signed words as f32, rounded to nearest.
    fn ints(self, v: Self::Raw) -> Self::V;
    /// The E4M3 floats in the low byte of each word, 2^120 times too small.
    fn e4m3_small(self, v: Self::Raw) -> Self::V;
    /// The E4M3 floats in the low byte of each word, none of them NaN.
    #[inline(always)]
    fn e4m3(self, v: Self::Raw) -> Self::V {
        self.mul(self.e4m3_small(v), self.splat((1u128 << 120) as f32))
    }
    /// The values of a table at the low 4 bits of each word.
    fn look_up(self, table: &[f32; LANES], v: Self::Raw) -> Self::V;
}

/// Methods of a [`Simd`], which take `self` first and are always inlined.
macro_rules! inlined {
    ($(
        $(#[$attribute:meta])?
        fn $name:ident $(<const $flag:ident: bool>)? ($($arg:ident: $type:ty),*) $(-> $out:ty)? $body:block
    )*) => {$(
        #[inline(always)]
        $(#[$attribute])?
        fn $name $(<const $flag: bool>)? (self, $($arg: $type),*) $(-> $out)? $body
    )*};
}

/// [`inlined`] methods whose bodies call intrinsics of the path's instruction set.
macro_rules! intrinsics {
    ($(fn $name:ident $(<const $flag:ident: bool>)? ($($arg:ident: $type:ty),*) $(-> $out:ty)? $body:block)*) => {
        $crate::cpu::simd::inlined! {$(
            // NEON is in every 64-bit Arm processor, so that some of its intrinsics are safe.
            #[cfg_attr(target_arch = "aarch64", allow(unused_unsafe))]
            fn $name $(<const $flag: bool>)? ($($arg: $type),*) $(-> $out)? {
                // SAFETY: `self` proves the instruction set; pointers are to arrays of the length that is moved.
                unsafe { $body }
            }
        )*}
    };
}
pub(crate) use {inlined, intrinsics};

/// A model dtype, as the kernels load and store it.
pub(crate) trait Lanes: Float {
    /// Values per 32-bit word.
    const PER_WORD: usize;
    /// Values of k of one row that are next to each other in a panel: two for bf16, whose halves of a word are widened
    /// by a shift and a mask; else one.
    const PANEL_DEPTH: usize;
    fn load<S: Simd>(s: S, a: &[Self; LANES]) -> S::V;
    fn store<S: Simd>(s: S, v: S::V, a: &mut [Self; LANES]);
    /// Sixteen words from the start of `a`, which holds at least 16 * PER_WORD values.
    fn words<S: Simd>(s: S, a: &[Self]) -> S::Raw;
    /// The values of each word, first and second; the second repeats the first where
    /// PER_WORD is 1.
    fn values<S: Simd>(s: S, v: S::Raw) -> [S::V; 2];
    /// Value i of 16 rows from one group of a panel, [16]\[PANEL_DEPTH\].
    fn panel<S: Simd>(s: S, a: &[Self], i: usize) -> S::V;

    /// Loads up to 16 values; missing lanes are 0.
    #[inline(always)]
    fn load_some<S: Simd>(s: S, a: &[Self]) -> S::V {
        match a.first_chunk() {
            Some(a) => Self::load(s, a),
            None => {
                let mut lanes = [Self::default(); LANES];
                lanes[..a.len()].copy_from_slice(a);
                Self::load(s, &lanes)
            }
        }
    }

    /// Stores the first lanes, as many as `a` holds, at most 16.
    #[inline(always)]
    fn store_some<S: Simd>(s: S, v: S::V, a: &mut [Self]) {
        match a.first_chunk_mut() {
            Some(a) => Self::store(s, v, a),
            None => {
                let mut lanes = [Self::default(); LANES];
                Self::store(s, v, &mut lanes);
                a.copy_from_slice(&lanes[..a.len()]);
            }
        }
    }
}

impl Lanes for f32 {
    const PER_WORD: usize = 1;
    const PANEL_DEPTH: usize = 1;
    #[inline(always)]
    fn panel<S: Simd>(s: S, a: &[f32], _i: usize) -> S::V {
        s.load(&a.as_chunks().0[0])
    }
    #[inline(always)]
    fn load<S: Simd>(s: S, a: &[f32; LANES]) -> S::V {
        s.load(a)
    }
    #[inline(always)]
    fn store<S: Simd>(s: S, v: S::V, a: &mut [f32; LANES]) {
        s.store(v, a);
    }
    #[inline(always)]
    fn words<S: Simd>(s: S, a: &[f32]) -> S::Raw {
        s.words_f32(&a.as_chunks().0[0])
    }
    #[inline(always)]
    fn values<S: Simd>(s: S, v: S::Raw) -> [S::V; 2] {
        [s.as_f32(v); 2]
    }
}

macro_rules! half_lanes {
    ($ty:ty, $load:ident, $store:ident, $half:ident, $depth:literal) => {
        impl Lanes for $ty {
            const PER_WORD: usize = 2;
            const PANEL_DEPTH: usize = $depth;
            #[inline(always)]
            fn panel<S: Simd>(s: S, a: &[$ty], i: usize) -> S::V {
                match (Self::PANEL_DEPTH, i) {
                    (1, _) => s.$load(&a.as_chunks().0[0]),
                    (_, 0) => s.$half::<false>(Self::words(s, a)),
                    _ => s.$half::<true>(Self::words(s, a)),
                }
            }
            #[inline(always)]
            fn load<S: Simd>(s: S, a: &[$ty; LANES]) -> S::V {
                s.$load(a)
            }
            #[inline(always)]
            fn store<S: Simd>(s: S, v: S::V, a: &mut [$ty; LANES]) {
                s.$store(v, a);
            }
            #[inline(always)]
            fn words<S: Simd>(s: S, a: &[$ty]) -> S::Raw {
                use half::slice::HalfFloatSliceExt;
                s.words_u16(&a.reinterpret_cast().as_chunks().0[0])
            }
            #[inline(always)]
            fn values<S: Simd>(s: S, v: S::Raw) -> [S::V; 2] {
                [s.$half::<false>(v), s.$half::<true>(v)]
            }
        }
    };
}

half_lanes!(bf16, load_bf16, store_bf16, half_bf16, 2);
half_lanes!(f16, load_f16, store_f16, half_f16, 1);

/// Folds 16 lanes to one by halves.
#[inline(always)]
fn fold<S: Simd>(s: S, v: S::V, f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [0f32; LANES];
    s.store(v, &mut lanes);
    for width in [8, 4, 2, 1] {
        for i in 0..width {
            lanes[i] = f(lanes[i], lanes[i + width]);
        }
    }
    lanes[0]
}

/// A piece of work that is generic over the instruction set: a closure with a type parameter.
pub(crate) trait Kernel {
    /// What the kernel returns.
    type Output;
    /// Does the work. Implementations are `#[inline(always)]`.
    fn run<S: Simd>(self, s: S) -> Self::Output;
}
