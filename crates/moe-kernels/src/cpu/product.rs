//! The fixed order in which every product of the crate is summed.
//!
//! One output is `x · w` over K. K is cut into S equal segments (S = 1 unless the product is row
//! parallel) and a segment into blocks of [`K_BLOCK`]. A block is one chain of f32 multiply-adds
//! from 0, in ascending order of k; block sums are added in ascending order, and so are segment
//! sums:
//!
//! ```text
//! for segment:  for block:  chain = 0; for k: chain = x[k] * w[k] + chain
//!                           segment_sum = first block ? chain : segment_sum + chain
//!               sum = first segment ? segment_sum : sum + segment_sum
//! ```
//!
//! A vector lane holds one output, never a part of one, so no order depends on the number of
//! rows, on tiles or on threads. Blocks bound the error: |got - exact| <= (K_BLOCK + K / K_BLOCK)
//! · 2^-24 · Σ|x w| to first order, twice that where multiply and add round separately.
//!
//! On the path with the BF16 dot product, bf16 chains advance by pairs:
//! chain = x\[k\] * w\[k\] + (x[k + 1] * w[k + 1] + chain), and subnormals are flushed.
//!
//! On the path with AMX, a bf16 segment is one chain of blocks of 32, the last one padded with
//! zeros; within a block, even and odd k are chains of their own, and subnormals are flushed:
//! chain = chain + (even + odd). Its roundings are no more than K / 32 + 18.

use super::simd::{LANES, Lanes, Simd};

/// Length of the longest chain.
pub(crate) const K_BLOCK: usize = 256;

/// One chain of a product, and what becomes of its sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Chain {
    /// First k.
    pub start: usize,
    /// Number of k.
    pub len: usize,
    /// First word of the chain in a packed row.
    pub word: usize,
    /// The sum goes to the segment's sum; else, to the total.
    pub to_segment: bool,
    /// The sum is added there; else, it replaces what is there.
    pub add: bool,
    /// The segment's sum is then added to the total (`Some(true)`) or becomes it.
    pub flush: Option<bool>,
}

/// Words of a packed row: `depth` values of k per word, each segment padded on its own.
pub(crate) fn row_words(k: usize, segments: usize, depth: usize) -> usize {
    segments * (k / segments).div_ceil(depth)
}

/// The chains of a product over K in order.
pub(crate) fn chains(k: usize, segments: usize, depth: usize) -> impl Iterator<Item = Chain> {
    let length = k / segments;
    let blocks = length.div_ceil(K_BLOCK);
    let nested = segments > 1 && blocks > 1;
    (0..segments * blocks).map(move |i| {
        let (segment, block) = (i / blocks, i % blocks);
        let start = block * K_BLOCK;
        Chain {
            start: segment * length + start,
            len: K_BLOCK.min(length - start),
            word: segment * length.div_ceil(depth) + start / depth,
            to_segment: nested,
            add: if nested { block > 0 } else { i > 0 },
            flush: (nested && block + 1 == blocks).then_some(segment > 0),
        }
    })
}

/// How a chain advances by one packed word.
pub(crate) trait Step: Copy + Send + Sync + 'static {
    /// Values of k per word.
    const DEPTH: usize;
    /// acc after the word `x` of a row of x and the words `w` of 16 rows of w.
    fn step<S: Simd>(s: S, acc: S::V, x: u32, w: S::Raw) -> S::V;
    /// Advances M x N chains by one group of N panels: 16 * [`Lanes::PANEL_DEPTH`] values each, and the words
    /// of x that belong to them, [words]\[M\].
    fn advance_panel<S: Simd, T: Lanes, const M: usize, const N: usize>(
        s: S,
        acc: &mut [[S::V; N]; M],
        x: &[u32],
        w: [&[T]; 2],
    );
    /// The words of one group of a panel: word i of 16 rows goes to `out[i * stride..]`.
    fn expand<S: Simd, T: Lanes>(s: S, w: &[T], stride: usize, out: &mut [u32]);
}

/// A word is one f32.
#[derive(Clone, Copy)]
pub(crate) struct Single;

/// A word is a pair of bf16.
#[derive(Clone, Copy)]
pub(crate) struct Pair;

impl Step for Single {
    const DEPTH: usize = 1;
    #[inline(always)]
    fn step<S: Simd>(s: S, acc: S::V, x: u32, w: S::Raw) -> S::V {
        s.fma(s.splat(f32::from_bits(x)), s.as_f32(w), acc)
    }
    #[inline(always)]
    fn advance_panel<S: Simd, T: Lanes, const M: usize, const N: usize>(
        s: S,
        acc: &mut [[S::V; N]; M],
        x: &[u32],
        w: [&[T]; 2],
    ) {
        for i in 0..T::PANEL_DEPTH {
            let mut vectors = [T::panel(s, w[0], i); N];
            for n in 1..N {
                vectors[n] = T::panel(s, w[n], i);
            }
            for m in 0..M {
                let x = s.splat(f32::from_bits(x[i * M + m]));
                for n in 0..N {
                    acc[m][n] = s.fma(x, vectors[n], acc[m][n]);
                }
            }
        }
    }
    #[inline(always)]
    fn expand<S: Simd, T: Lanes>(s: S, w: &[T], stride: usize, out: &mut [u32]) {
        for i in 0..T::PANEL_DEPTH {
            if let Some(out) = out[i * stride..].first_chunk_mut::<LANES>() {
                s.store_words(s.to_words(T::panel(s, w, i)), out);
            }
        }
    }
}

impl Step for Pair {
    const DEPTH: usize = 2;
    #[inline(always)]
    fn step<S: Simd>(s: S, acc: S::V, x: u32, w: S::Raw) -> S::V {
        s.dot_bf16(acc, x, w)
    }
    #[inline(always)]
    fn advance_panel<S: Simd, T: Lanes, const M: usize, const N: usize>(
        s: S,
        acc: &mut [[S::V; N]; M],
        x: &[u32],
        w: [&[T]; 2],
    ) {
        let mut vectors = [T::words(s, w[0]); N];
        for n in 1..N {
            vectors[n] = T::words(s, w[n]);
        }
        for m in 0..M {
            for n in 0..N {
                acc[m][n] = s.dot_bf16(acc[m][n], x[m], vectors[n]);
            }
        }
    }
    #[inline(always)]
    fn expand<S: Simd, T: Lanes>(s: S, w: &[T], _stride: usize, out: &mut [u32]) {
        if let Some(out) = out.first_chunk_mut() {
            s.store_words(T::words(s, w), out);
        }
    }
}
