//! One row of x and one panel: a single stream from memory, of which two chains are computed together.
//!
//! A dot product may add to a sum six cycles after the one before. A thread reads a cache line in as little as that, so
//! with one chain it would have no time to catch up after a line that came late. The second chain of a panel follows
//! the first one in memory. Both are read together, while what follows them is prefetched line after line, as one
//! stream.

use std::arch::x86_64::*;

use super::super::product::{Chain, chains};
use super::super::simd::LANES;
use super::super::tile::CACHE_LINE;

/// A packed row of x and a panel of the same columns.
pub(super) struct Row<'a> {
    /// A word for each line of the panel.
    pub x: &'a [u32],
    /// The panel, a cache line for each word.
    pub panel: &'a [u8],
    /// What this thread reads next.
    pub next: *const u8,
}

impl Row<'_> {
    /// Hands over the sums of all chains in their order.
    ///
    /// # Safety
    /// The processor must support AVX-512 BF16.
    #[target_feature(enable = "avx512bf16,avx512f")]
    pub unsafe fn sums(&self, k: usize, segments: usize, mut take: impl FnMut(&Chain, &[f32; LANES])) {
        let mut chains = chains(k, segments).peekable();
        let mut at = 0;
        while let Some(first) = chains.next() {
            let words = first.len.div_ceil(2);
            match chains.next_if(|second| second.len == first.len) {
                Some(second) => {
                    // SAFETY: the caller's promise.
                    let sums = unsafe { advance::<2>(self.part(at, 2 * words)) };
                    take(&first, &sums[0]);
                    take(&second, &sums[1]);
                    at += 2 * words;
                }
                None => {
                    // SAFETY: the caller's promise.
                    let [sums] = unsafe { advance::<1>(self.part(at, words)) };
                    take(&first, &sums);
                    at += words;
                }
            }
        }
    }

    /// The words from `at` on.
    fn part(&self, at: usize, words: usize) -> Self {
        let end = (at + words) * CACHE_LINE;
        let next = if end < self.panel.len() { self.panel[end..].as_ptr() } else { self.next };
        Self { x: &self.x[at..at + words], panel: &self.panel[at * CACHE_LINE..end], next }
    }
}

/// Sums of C chains of equal length that follow each other.
///
/// # Safety
/// The processor must support AVX-512 BF16.
#[target_feature(enable = "avx512bf16,avx512f")]
#[inline]
unsafe fn advance<const C: usize>(row: Row) -> [[f32; LANES]; C] {
    let words = row.x.len() / C;
    assert_eq!(row.panel.len(), C * words * CACHE_LINE);
    let mut acc = [_mm512_setzero_ps(); C];
    for i in 0..words {
        for c in 0..C {
            _mm_prefetch::<_MM_HINT_T0>(row.next.wrapping_add((i * C + c) * CACHE_LINE).cast());
            let at = c * words + i;
            // SAFETY: `at` is below C * words, the number of words of x and of lines of the panel; vectors of words and
            // of pairs of bf16 are the same 64 bytes.
            acc[c] = unsafe {
                let x = _mm512_set1_epi32(*row.x.get_unchecked(at) as i32);
                let w = _mm512_loadu_si512(row.panel.as_ptr().add(at * CACHE_LINE).cast());
                let pairs = |v| std::mem::transmute::<__m512i, __m512bh>(v);
                _mm512_dpbf16_ps(acc[c], pairs(x), pairs(w))
            };
        }
    }
    // SAFETY: vectors of f32 are arrays of them.
    acc.map(|acc| unsafe { std::mem::transmute::<__m512, [f32; LANES]>(acc) })
}
