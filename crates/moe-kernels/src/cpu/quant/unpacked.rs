//! Integer products of many rows of x: weights are unpacked once for all tiles.
//!
//! The integers of a chain (up to 256 columns) become pairs of 16 bits, less their zero points, in the first-level
//! cache, and each tile of x multiplies them from there. Unpacked in registers ([`super::ints`]), they are unpacked
//! again for every tile, and on AVX2 leave too few registers for the sums. The integer sum of a block is exact, so both
//! have the same bits.

use std::marker::PhantomData;

use super::form::{LOCAL, PREFETCH, Rows, Unit, chains};
use super::panel::{Ints, Panel, STEP_WORDS, TAIL};
use super::quants::Quants;
use super::shift::{AreInRange, Multiplied, ScaleProduct, Shifted};
use crate::cpu::simd::{LANES, Simd};
use crate::cpu::tile::{CACHE_LINE, Shape, UNIT, UnitSums, with_rows};
use crate::cpu::units::even_parts;
use crate::cpu::{Kernel, dispatch, dispatch_ints};
use crate::quant::{Block, GroupScales};

/// A unit of matrix `e` times packed rows of x.
pub(super) fn unit<Q: Quants>(ints: &Ints, e: usize, unit: Unit, x: Rows, sums: &mut [UnitSums]) {
    let isa = ints.isa;
    let columns = &ints.w.parts[e].columns;
    let (count, _) = dispatch(isa, Shape);
    // Places of a missing panel repeat the other one.
    let panels = [unit.first, unit.second.unwrap_or(unit.first)].map(|panel| ints.panel(e, panel));
    LOCAL.with_borrow_mut(|(words, partial)| {
        partial.resize(partial.len().max(sums.len()), [0.0; UNIT]);
        for vector in (0..2).step_by(count) {
            let panels = &panels[vector..vector + count];
            let mut at = x.first;
            for segment in ints.segments.clone() {
                let mut chains = chains(columns, segment).peekable();
                let mut begins = true;
                let add = segment != ints.segments.start;
                while let Some(blocks) = chains.next() {
                    let len: usize = blocks.iter().map(|block| block.steps() * STEP_WORDS).sum();
                    let q_len = len * LANES * count;
                    let scales_len = blocks.len() * LANES * count;
                    let minima_len = if panels[0].minima.is_some() { scales_len } else { 0 };
                    let all = q_len + scales_len + minima_len;
                    words.resize(words.len().max(all), 0);
                    let (q, rest) = words[..all].split_at_mut(q_len);
                    let (scales, minima) = rest.split_at_mut(scales_len);
                    for (i, &panel) in panels.iter().enumerate() {
                        let [q, scales, minima] = [&mut *q, &mut *scales, &mut *minima]
                            .map(|to| to.get_mut(i * LANES..).unwrap_or_default());
                        let quants = PhantomData::<Q>;
                        let unpack =
                            Unpack { panel, blocks, stride: count * LANES, q, scales, minima, quants };
                        dispatch(isa, unpack);
                    }
                    let is_shifted = x.are_in_range && dispatch(isa, AreInRange(scales));
                    let ends = chains.peek().is_none().then_some(add);
                    let segment = &mut partial[..sums.len()];
                    let total = &mut *sums;
                    let tiles = Tiles {
                        blocks,
                        q,
                        scales,
                        minima,
                        is_shifted,
                        x,
                        at,
                        vector,
                        begins,
                        ends,
                        segment,
                        total,
                    };
                    dispatch_ints(isa, tiles);
                    at += len + blocks.len() * TAIL;
                    begins = false;
                }
            }
        }
    });
}

/// Unpacks blocks of a panel.
struct Unpack<'a, Q> {
    panel: Panel<'a>,
    blocks: &'a [Block],
    /// Words from a pair, or a scale, to the next of the same rows.
    stride: usize,
    /// [words][16] by stride.
    q: &'a mut [u32],
    /// [blocks][16] by stride, f32.
    scales: &'a mut [u32],
    /// The same; empty without minima.
    minima: &'a mut [u32],
    quants: PhantomData<Q>,
}

impl<Q: Quants> Kernel for Unpack<'_, Q> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { panel, blocks, stride, q: out, scales, minima, .. } = self;
        let mut at = 0;
        let mut minima = minima.chunks_mut(stride);
        for (block, scales) in blocks.iter().zip(scales.chunks_mut(stride)) {
            if let Some(scales) = scales.first_chunk_mut() {
                s.store_words(s.to_words(panel.scale::<S, Q>(s, block.group)), scales);
            }
            let to = minima.next().and_then(<[u32]>::first_chunk_mut);
            if let (Some(minima), Some(to)) = (panel.minima, to) {
                s.store_words(s.to_words(minima.group(s, block.group)), to);
            }
            let zero = s.mul_words(panel.zero(s, block.group), s.splat_word(0x0001_0001));
            let q = &panel.q[block.step * Q::STEP_BYTES..][..block.steps() * Q::STEP_BYTES];
            for step in q.chunks_exact(Q::STEP_BYTES) {
                for line in (0..Q::STEP_BYTES).step_by(CACHE_LINE) {
                    s.prefetch(step.as_ptr().wrapping_add(PREFETCH + line));
                }
                let pairs = Q::pairs(s, step);
                for i in 0..STEP_WORDS {
                    if let Some(out) = out[at..].first_chunk_mut() {
                        s.store_words(s.sub_i16(pairs[i], zero), out);
                    }
                    at += stride;
                }
            }
        }
    }
}

/// Rows of x times the unpacked blocks of one or two panels.
struct Tiles<'a> {
    blocks: &'a [Block],
    /// [words][16 * panels].
    q: &'a [u32],
    /// [blocks][16 * panels], f32.
    scales: &'a [u32],
    /// [blocks][16 * panels], f32; empty without minima.
    minima: &'a [u32],
    /// Whether scales of both sides are [in range](super::shift).
    is_shifted: bool,
    x: Rows<'a>,
    /// The first block's first word of a packed row.
    at: usize,
    /// First panel's place in the unit.
    vector: usize,
    /// Whether the blocks begin their segment.
    begins: bool,
    /// Whether they end it: its sums are then added to the totals (`Some(true)`) or become them.
    ends: Option<bool>,
    /// Sums of the segment so far.
    segment: &'a mut [UnitSums],
    total: &'a mut [UnitSums],
}

impl Kernel for Tiles<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let rows = self.total.len();
        for (start, m) in even_parts(rows, rows.div_ceil(S::TILE_ROWS)) {
            let x = &self.x.words[start * self.x.row_words + self.at * m..];
            match (S::TILE_VECTORS, self.is_shifted) {
                (2, true) => with_rows!(m, tile::<S, Shifted; 2>(s, &mut self, start, x)),
                (2, false) => with_rows!(m, tile::<S, Multiplied; 2>(s, &mut self, start, x)),
                (_, true) => with_rows!(m, tile::<S, Shifted; 1>(s, &mut self, start, x)),
                (_, false) => with_rows!(m, tile::<S, Multiplied; 1>(s, &mut self, start, x)),
            }
        }
    }
}

/// Multiplies the tile of rows from `start` on; `x` begins with the tile's words of the first block.
#[inline(always)]
fn tile<S: Simd, P: ScaleProduct, const M: usize, const N: usize>(
    s: S,
    t: &mut Tiles,
    start: usize,
    x: &[u32],
) {
    if M > S::TILE_ROWS || N != S::TILE_VECTORS {
        return; // Never taken; keeps tiles that this path does not use out of the binary.
    }
    let (Some((segment, _)), Some((total, _))) =
        (t.segment[start..].split_first_chunk_mut::<M>(), t.total[start..].split_first_chunk_mut::<M>())
    else {
        return;
    };
    if t.begins {
        for m in 0..M {
            for n in 0..N {
                s.store(s.splat(0.0), &mut segment[m].as_chunks_mut().0[t.vector + n]);
            }
        }
    }
    // Cut into rows once: for each block, the division by M would take as long as a word.
    let mut x = x.as_chunks::<M>().0;
    let mut q = t.q.as_chunks::<LANES>().0.as_chunks::<N>().0;
    let mut minima = t.minima.as_chunks::<LANES>().0.as_chunks::<N>().0.iter();
    for (block, scales) in t.blocks.iter().zip(t.scales.as_chunks::<LANES>().0.as_chunks::<N>().0) {
        let words = block.steps() * STEP_WORDS;
        let (ints, rest) = x.split_at(words);
        let (tail, rest) = rest.split_at(TAIL);
        let (weights, more) = q.split_at(words);
        (x, q) = (rest, more);
        let mut acc = [[s.splat_word(0); N]; M];
        let mut words = ints.iter().zip(weights);
        // The first word apart, so that no instruction adds it to zero.
        if let Some((x, w)) = words.next() {
            advance(s, &mut acc, x, w);
        }
        for (x, w) in words {
            advance(s, &mut acc, x, w);
        }
        let minima = minima.next();
        for n in 0..N {
            let scale = P::ready(s, s.load_words(&scales[n]));
            // Apart, so that a sum goes to memory once.
            if let Some(minima) = minima {
                let minimum = s.as_f32(s.load_words(&minima[n]));
                for m in 0..M {
                    let scale = P::times(s, scale, tail[0][m]);
                    let to = &mut segment[m].as_chunks_mut().0[t.vector + n];
                    let sum = s.fma(s.ints(acc[m][n]), scale, s.load(to));
                    s.store(s.fma(s.splat(f32::from_bits(tail[1][m])), minimum, sum), to);
                }
                continue;
            }
            for m in 0..M {
                let scale = P::times(s, scale, tail[0][m]);
                let to = &mut segment[m].as_chunks_mut().0[t.vector + n];
                s.store(s.fma(s.ints(acc[m][n]), scale, s.load(to)), to);
            }
        }
    }
    // Apart from the loops above, whose bodies must stay so small that they are unrolled and sums stay in registers.
    let Some(add) = t.ends else { return };
    for m in 0..M {
        for n in 0..N {
            let sum = s.load(&segment[m].as_chunks().0[t.vector + n]);
            let to = &mut total[m].as_chunks_mut().0[t.vector + n];
            s.store(if add { s.add(s.load(to), sum) } else { sum }, to);
        }
    }
}

/// Advances M x N integer sums by one word.
#[inline(always)]
fn advance<S: Simd, const M: usize, const N: usize>(
    s: S,
    acc: &mut [[S::Raw; N]; M],
    x: &[u32; M],
    w: &[[u32; LANES]; N],
) {
    let mut vectors = [s.load_words(&w[0]); N];
    for n in 1..N {
        vectors[n] = s.load_words(&w[n]);
    }
    for m in 0..M {
        for n in 0..N {
            acc[m][n] = s.dot_i16_of_many(acc[m][n], x[m], vectors[n]);
        }
    }
}
