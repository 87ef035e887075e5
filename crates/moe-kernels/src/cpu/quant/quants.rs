//! The integers of a step of a panel.

use crate::cpu::simd::Simd;
use crate::cpu::tile::CACHE_LINE;

/// The words of packed integers, 8 columns of 16 rows, as four vectors of pairs of columns.
pub(super) trait Quants: Copy + Send + Sync {
    /// Bytes of a step of a panel.
    const STEP_BYTES: usize;
    /// Whether a step holds nibbles, which [`Simd::nibbles_in_place`] gives with fewer shifts.
    const NIBBLES: bool;
    /// The pairs of a step.
    fn pairs<S: Simd>(s: S, step: &[u8]) -> [S::Raw; 4];
}

/// Integers of 4 bits.
#[derive(Clone, Copy)]
pub(super) struct Nibbles;

/// Integers of 8 bits, or FP8.
#[derive(Clone, Copy)]
pub(super) struct Bytes;

impl Quants for Nibbles {
    const STEP_BYTES: usize = CACHE_LINE;
    const NIBBLES: bool = true;
    #[inline(always)]
    fn pairs<S: Simd>(s: S, step: &[u8]) -> [S::Raw; 4] {
        s.nibbles(words(s, step))
    }
}

impl Quants for Bytes {
    const STEP_BYTES: usize = 2 * CACHE_LINE;
    const NIBBLES: bool = false;
    #[inline(always)]
    fn pairs<S: Simd>(s: S, step: &[u8]) -> [S::Raw; 4] {
        let (first, second) = step.split_at(CACHE_LINE);
        let [a, b] = s.bytes(words(s, first));
        let [c, d] = s.bytes(words(s, second));
        [a, b, c, d]
    }
}

/// The words of a cache line.
#[inline(always)]
pub(super) fn words<S: Simd>(s: S, bytes: &[u8]) -> S::Raw {
    let bytes: &[u8; CACHE_LINE] = &bytes.as_chunks().0[0];
    s.load_bytes(bytes)
}
