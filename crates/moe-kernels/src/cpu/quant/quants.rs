//! The integers of a step of a panel.

use crate::codes::IntBook;
use crate::cpu::simd::{LANES, Simd};
use crate::cpu::tile::CACHE_LINE;

/// The words of packed integers, 8 columns of 16 rows. `quant/places.rs` says where each one is.
pub(super) trait Quants: Copy + Send + Sync {
    /// Bytes of a step of a panel.
    const STEP_BYTES: usize;
    /// Whether the integers are the nibbles of a step, which [`Simd::nibbles_in_place`] gives with fewer shifts.
    const NIBBLES: bool;
    /// Whether integers are below 128, so that bytes of them are the same with and without a sign.
    const SMALL: bool;
    /// The most rows of x for which a step is unpacked again for each tile. Of what takes long to unpack few, which
    /// also saves variants of the kernel.
    const DIRECT_ROWS: usize;
    /// What an integer is multiplied with, apart from its scale.
    const UNIT: f32 = 1.0;
    /// The integers of a step as bytes: of 4 to 6 bits columns 0, 4, 1, 5 in a word of the first vector and 2, 6, 3, 7
    /// in one of the second; of 8 bits columns 0, 2, 1, 3 and 4, 6, 5, 7.
    fn bytes<S: Simd>(s: S, step: &[u8]) -> [S::Raw; 2];
    /// The integers of a step as four vectors of pairs of columns, each of 16 bits.
    #[inline(always)]
    fn pairs<S: Simd>(s: S, step: &[u8]) -> [S::Raw; 4] {
        let [first, second] = Self::bytes(s, step);
        let [a, c] = s.bytes(first);
        let [b, d] = s.bytes(second);
        [a, b, c, d]
    }
}

/// Integers of 4 bits.
#[derive(Clone, Copy)]
pub(super) struct Nibbles;

/// Integers of 5 bits.
#[derive(Clone, Copy)]
pub(super) struct Fives;

/// Integers of 6 bits.
#[derive(Clone, Copy)]
pub(super) struct Sixes;

/// Integers of 8 bits, or FP8.
#[derive(Clone, Copy)]
pub(super) struct Bytes;

/// E2M1 codes, as integers in halves.
#[derive(Clone, Copy)]
pub(super) struct Fp4;

/// IQ4_NL codes, as the integers of their table.
#[derive(Clone, Copy)]
pub(super) struct Iq4Nl;

impl Quants for Nibbles {
    const STEP_BYTES: usize = CACHE_LINE;
    const NIBBLES: bool = true;
    const SMALL: bool = true;
    const DIRECT_ROWS: usize = usize::MAX;
    #[inline(always)]
    fn bytes<S: Simd>(s: S, step: &[u8]) -> [S::Raw; 2] {
        s.nibble_bytes(words(s, step))
    }
    #[inline(always)]
    fn pairs<S: Simd>(s: S, step: &[u8]) -> [S::Raw; 4] {
        s.nibbles(words(s, step))
    }
}

impl Quants for Fives {
    const STEP_BYTES: usize = CACHE_LINE + LANES;
    const NIBBLES: bool = false;
    const SMALL: bool = true;
    const DIRECT_ROWS: usize = 2;
    #[inline(always)]
    fn bytes<S: Simd>(s: S, step: &[u8]) -> [S::Raw; 2] {
        let (lower, upper) = step.split_at(CACHE_LINE);
        let h = s.widen_bytes(&upper.as_chunks().0[0]);
        let near = s.or_words(h, s.shift_left(h, 6));
        let far = s.or_words(s.shift_left(h, 20), s.shift_left(h, 26));
        with_upper::<S, 1>(s, lower, s.or_words(near, far))
    }
}

impl Quants for Sixes {
    const STEP_BYTES: usize = CACHE_LINE + 2 * LANES;
    const NIBBLES: bool = false;
    const SMALL: bool = true;
    const DIRECT_ROWS: usize = 2;
    #[inline(always)]
    fn bytes<S: Simd>(s: S, step: &[u8]) -> [S::Raw; 2] {
        let (lower, upper) = step.split_at(CACHE_LINE);
        let h = s.widen_halves(&upper.as_chunks().0[0]);
        with_upper::<S, 2>(s, lower, s.or_words(h, s.shift_left(h, 20)))
    }
}

/// The nibbles of a step, and their upper bits. The upper bits begin at bit 4 of each byte; for the second vector they
/// are `BITS` bits higher.
#[inline(always)]
fn with_upper<S: Simd, const BITS: u32>(s: S, lower: &[u8], upper: S::Raw) -> [S::Raw; 2] {
    let mask = ((1 << BITS) - 1) * 0x1010_1010;
    let [first, second] = s.nibble_bytes(words(s, lower));
    let of_second = s.mask_words(s.shift_right(upper, BITS), mask);
    [s.or_words(first, s.mask_words(upper, mask)), s.or_words(second, of_second)]
}

impl Quants for Bytes {
    const STEP_BYTES: usize = 2 * CACHE_LINE;
    const NIBBLES: bool = false;
    const SMALL: bool = false;
    const DIRECT_ROWS: usize = usize::MAX;
    #[inline(always)]
    fn bytes<S: Simd>(s: S, step: &[u8]) -> [S::Raw; 2] {
        let (first, second) = step.split_at(CACHE_LINE);
        [words(s, first), words(s, second)]
    }
    #[inline(always)]
    fn pairs<S: Simd>(s: S, step: &[u8]) -> [S::Raw; 4] {
        let [first, second] = Self::bytes(s, step);
        let [a, b] = s.bytes(first);
        let [c, d] = s.bytes(second);
        [a, b, c, d]
    }
}

impl Quants for Fp4 {
    const STEP_BYTES: usize = CACHE_LINE;
    const NIBBLES: bool = false;
    const SMALL: bool = true;
    const DIRECT_ROWS: usize = 2;
    const UNIT: f32 = IntBook::E2M1.unit;
    #[inline(always)]
    fn bytes<S: Simd>(s: S, step: &[u8]) -> [S::Raw; 2] {
        looked_up(s, step, &IntBook::E2M1.integers)
    }
}

impl Quants for Iq4Nl {
    const STEP_BYTES: usize = CACHE_LINE;
    const NIBBLES: bool = false;
    const SMALL: bool = false;
    const DIRECT_ROWS: usize = 2;
    const UNIT: f32 = IntBook::IQ4_NL.unit;
    #[inline(always)]
    fn bytes<S: Simd>(s: S, step: &[u8]) -> [S::Raw; 2] {
        looked_up(s, step, &IntBook::IQ4_NL.integers)
    }
}

/// The integers of the nibbles of a step.
#[inline(always)]
fn looked_up<S: Simd>(s: S, step: &[u8], integers: &[u8; 16]) -> [S::Raw; 2] {
    let [first, second] = s.nibble_bytes(words(s, step));
    [s.look_up_bytes(integers, first), s.look_up_bytes(integers, second)]
}

/// The words of a cache line.
#[inline(always)]
pub(super) fn words<S: Simd>(s: S, bytes: &[u8]) -> S::Raw {
    let bytes: &[u8; CACHE_LINE] = &bytes.as_chunks().0[0];
    s.load_bytes(bytes)
}

/// Evaluates an expression with the type of the integers of a scheme. Codes without integers are [`Bytes`].
macro_rules! with_quants {
    ($scheme:expr, $Q:ident => $e:expr) => {
        match $scheme.codes {
            $crate::scheme::Codes::E2m1 => {
                type $Q = $crate::cpu::quant::quants::Fp4;
                $e
            }
            $crate::scheme::Codes::Iq4Nl => {
                type $Q = $crate::cpu::quant::quants::Iq4Nl;
                $e
            }
            _ => $crate::cpu::quant::quants::with_ints!($scheme, $Q => $e),
        }
    };
}

/// [`with_quants`] of schemes whose codes are integers, or bytes.
macro_rules! with_ints {
    ($scheme:expr, $Q:ident => $e:expr) => {
        match $scheme.bits() {
            4 => {
                type $Q = $crate::cpu::quant::quants::Nibbles;
                $e
            }
            5 => {
                type $Q = $crate::cpu::quant::quants::Fives;
                $e
            }
            6 => {
                type $Q = $crate::cpu::quant::quants::Sixes;
                $e
            }
            _ => {
                type $Q = $crate::cpu::quant::quants::Bytes;
                $e
            }
        }
    };
}
pub(super) use {with_ints, with_quants};
