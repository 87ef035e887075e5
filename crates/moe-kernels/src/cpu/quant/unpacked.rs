//! Integer products of many rows of x: weights are unpacked once for all tiles.
//!
//! The integers of a chain (up to 256 columns) become pairs of 16 bits, less their zero points, in the first-level cache, and
//! each tile of x multiplies them from there. Unpacked in registers ([`super::ints`]), they are unpacked again for every tile,
//! and on AVX2 leave too few registers for the sums. The integer sum of a block is exact, so both have the same bits.

use std::marker::PhantomData;

use super::ints::{Ints, Panel, STEP_WORDS, TAIL};
use super::{Bytes, LOCAL, Nibbles, PREFETCH, Quants, Unit, chains, tiles};
use crate::cpu::simd::{LANES, Simd};
use crate::cpu::tile::{CACHE_LINE, Shape, UNIT, UnitSums, with_rows};
use crate::cpu::{Kernel, dispatch, dispatch_ints};
use crate::quant::{Block, middle};

/// A unit of matrix `e` times packed rows of x of `row_words` each.
pub(super) fn unit(ints: &Ints, e: usize, unit: Unit, row_words: usize, x: &[u32], sums: &mut [UnitSums]) {
    let (isa, columns) = (ints.isa, &ints.w.parts[e].columns);
    let (count, _) = dispatch(isa, Shape);
    // Places of a missing panel repeat the other one.
    let panels = [unit.first, unit.second.unwrap_or(unit.first)].map(|panel| ints.panel(e, panel));
    LOCAL.with_borrow_mut(|(words, partial)| {
        partial.resize(partial.len().max(sums.len()), [0.0; UNIT]);
        for vector in (0..2).step_by(count) {
            let panels = &panels[vector..vector + count];
            let mut at = 0;
            for segment in ints.segments.clone() {
                let mut chains = chains(columns, segment).peekable();
                let (mut begins, add) = (true, segment != ints.segments.start);
                while let Some(blocks) = chains.next() {
                    let len: usize = blocks.iter().map(|block| block.steps() * STEP_WORDS).sum();
                    words.resize(words.len().max(len * LANES * count), 0);
                    let q = &mut words[..len * LANES * count];
                    unpack(ints, panels, blocks, q);
                    let ends = chains.peek().is_none().then_some(add);
                    for (start, m) in tiles(isa, sums.len()) {
                        let x = &x[start * row_words + at * m..];
                        let (segment, total) = (&mut partial[start..start + m], &mut sums[start..start + m]);
                        dispatch_ints(
                            isa,
                            Tile { panels, blocks, q, x, vector, begins, ends, segment, total },
                        );
                    }
                    at += len + blocks.len() * TAIL;
                    begins = false;
                }
            }
        }
    });
}

/// Unpacks blocks of panels to [words][16 * panels].
fn unpack(ints: &Ints, panels: &[Panel], blocks: &[Block], q: &mut [u32]) {
    let stride = panels.len() * LANES;
    for (i, &panel) in panels.iter().enumerate() {
        let (middle, out) = (u32::from(middle(ints.w.scheme)), &mut q[i * LANES..]);
        match ints.w.step_bytes() == Nibbles::STEP_BYTES {
            true => dispatch(ints.isa, Unpack::<Nibbles>(panel, middle, blocks, stride, out, PhantomData)),
            false => dispatch(ints.isa, Unpack::<Bytes>(panel, middle, blocks, stride, out, PhantomData)),
        }
    }
}

/// Panel, the zero point where it has none, blocks, words from a pair to the next of the same rows, and where they go.
struct Unpack<'a, Q>(Panel<'a>, u32, &'a [Block], usize, &'a mut [u32], PhantomData<Q>);

impl<Q: Quants> Kernel for Unpack<'_, Q> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self(panel, middle, blocks, stride, out, _) = self;
        let mut at = 0;
        for block in blocks {
            let zero = s.mul_words(panel.zero(s, block.group, middle), s.splat_word(0x0001_0001));
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

/// A tile of rows of x times the unpacked blocks of one or two panels.
struct Tile<'a> {
    /// For their scales.
    panels: &'a [Panel<'a>],
    blocks: &'a [Block],
    /// [words][16 * panels].
    q: &'a [u32],
    /// The tile's words from the first block on.
    x: &'a [u32],
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

impl Kernel for Tile<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        if S::TILE_VECTORS == 2 {
            with_rows!(self.total.len(), tile::<S; 2>(s, self))
        } else {
            with_rows!(self.total.len(), tile::<S; 1>(s, self))
        }
    }
}

#[inline(always)]
fn tile<S: Simd, const M: usize, const N: usize>(s: S, t: Tile) {
    if M > S::TILE_ROWS || N != S::TILE_VECTORS {
        return; // Never taken; keeps tiles that this path does not use out of the binary.
    }
    let (Some((panels, _)), Some((segment, _)), Some((total, _))) = (
        t.panels.split_first_chunk::<N>(),
        t.segment.split_first_chunk_mut::<M>(),
        t.total.split_first_chunk_mut::<M>(),
    ) else {
        return;
    };
    if t.begins {
        for m in 0..M {
            for n in 0..N {
                s.store(s.splat(0.0), &mut segment[m].as_chunks_mut().0[t.vector + n]);
            }
        }
    }
    let (mut x, mut q) = (t.x, t.q);
    for block in t.blocks {
        let words = block.steps() * STEP_WORDS;
        let (ints, rest) = x.split_at(words * M);
        let (tail, rest) = rest.split_at(TAIL * M);
        let (weights, more) = q.split_at(words * LANES * N);
        (x, q) = (rest, more);
        let mut acc = [[s.splat_word(0); N]; M];
        let weights = weights.as_chunks::<LANES>().0.as_chunks::<N>().0;
        let mut words = ints.as_chunks::<M>().0.iter().zip(weights);
        // The first word apart, so that no instruction adds it to zero.
        if let Some((x, w)) = words.next() {
            advance(s, &mut acc, x, w);
        }
        for (x, w) in words {
            advance(s, &mut acc, x, w);
        }
        for n in 0..N {
            let scale = panels[n].scales.group(s, block.group);
            for m in 0..M {
                let scale = s.mul(s.splat(f32::from_bits(tail[m])), scale);
                let sum = &mut segment[m].as_chunks_mut().0[t.vector + n];
                s.store(s.fma(s.ints(acc[m][n]), scale, s.load(sum)), sum);
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
