//! Packing: rows of a matrix become columns of words, so that one vector holds the same k of 16
//! rows.
//!
//! Weights in rows keep the checkpoint's layout, [N, K]; each task transposes the 16 rows and the
//! chain of K that it is about to use into a panel that fits the first-level cache. The same
//! routine packs rows of x, as panels [k][rows of the tile].

use super::Kernel;
use super::simd::{LANES, Lanes, Simd};

/// Words of each row that one transposition covers.
pub(crate) const GROUP_WORDS: usize = LANES;

/// The most words that come out of one transposition: 16-bit values may be widened.
pub(crate) const GROUP_OUT: usize = 2 * GROUP_WORDS;

/// Transposes the values `at..` of 16 rows: one group of [`GROUP_WORDS`] words of each row, or
/// what is left up to `end`, padded with zeros. A word that comes out holds DEPTH values: one as f32, or
/// [`Lanes::PER_WORD`] as they are. Word i of all rows goes to `out[i * stride..]`, 16
/// lanes where there is room, else as many as there is room for. Returns the number of words.
#[inline(always)]
pub(crate) fn transpose_group<S: Simd, T: Lanes, const DEPTH: usize>(
    s: S,
    rows: &[&[T]; LANES],
    at: usize,
    end: usize,
    stride: usize,
    out: &mut [u32],
) -> usize {
    let step = GROUP_WORDS * T::PER_WORD;
    let left = end - at;
    // Loops over indices: iterators by value would move the arrays through memory.
    let mut raw = [s.load_words(&[0; LANES]); LANES];
    if left >= step {
        for j in 0..LANES {
            raw[j] = T::words(s, &rows[j][at..at + step]);
        }
        let words = step / DEPTH;
        if let Some(out) = out.get_mut(..(words - 1) * stride + LANES) {
            put_columns::<S, T, DEPTH>(s, raw, stride, out);
            return words;
        }
    } else {
        for j in 0..LANES {
            let mut padded = [T::default(); GROUP_OUT];
            padded[..left].copy_from_slice(&rows[j][at..at + left]);
            raw[j] = T::words(s, &padded);
        }
    }
    let mut columns = [0; GROUP_OUT * LANES];
    put_columns::<S, T, DEPTH>(s, raw, LANES, &mut columns);
    let words = left.min(step).div_ceil(DEPTH);
    for (i, column) in columns.as_chunks::<LANES>().0[..words].iter().enumerate() {
        let out = &mut out[i * stride..];
        let room = out.len().min(LANES);
        out[..room].copy_from_slice(&column[..room]);
    }
    words
}

/// Transposes and stores a whole group.
#[inline(always)]
fn put_columns<S: Simd, T: Lanes, const DEPTH: usize>(
    s: S,
    raw: [S::Raw; LANES],
    stride: usize,
    out: &mut [u32],
) {
    let columns = s.transpose(raw);
    for i in 0..LANES {
        if DEPTH == T::PER_WORD {
            put(s, columns[i], &mut out[i * stride..]);
        } else {
            let [first, second] = T::values(s, columns[i]);
            put(s, s.to_words(first), &mut out[2 * i * stride..]);
            put(s, s.to_words(second), &mut out[(2 * i + 1) * stride..]);
        }
    }
}

#[inline(always)]
fn put<S: Simd>(s: S, words: S::Raw, out: &mut [u32]) {
    if let Some(out) = out.first_chunk_mut() {
        s.store_words(words, out);
    }
}

/// Packs one chain of up to 16 rows: word i of row j goes to `out[i * stride + j]`. With a stride
/// below 16 the surplus lanes of a word land where the next words go, and those overwrite them. A word holds DEPTH
/// values, as [`transpose_group`] makes them.
pub(crate) struct Pack<'a, T, const DEPTH: usize> {
    /// The rows; missing rows repeat another.
    pub rows: &'a [&'a [T]; LANES],
    /// The chain: first k and end.
    pub range: std::ops::Range<usize>,
    /// Distance between words of one row.
    pub stride: usize,
    /// The panel, to its end.
    pub out: &'a mut [u32],
}

impl<T: Lanes, const DEPTH: usize> Kernel for Pack<'_, T, DEPTH> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut at = self.range.start;
        let mut word = 0;
        while at < self.range.end {
            let out = &mut self.out[word * self.stride..];
            word += transpose_group::<S, T, DEPTH>(s, self.rows, at, self.range.end, self.stride, out);
            at += GROUP_WORDS * T::PER_WORD;
        }
    }
}
