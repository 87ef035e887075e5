//! Products of f32: weights become f32, chain by chain in cache, and take the tiles of other dtypes.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use super::form::{Form, LOCAL, PREFETCH, Rows, Unit, add, chains, tiles};
use super::quants::{Bytes, Nibbles, Quants, with_ints};
use crate::cpu::product::K_BLOCK;
use crate::cpu::simd::{LANES, Lanes, Simd};
use crate::cpu::tile::{Ahead, Shape, Tile, UNIT, UnitSums};
use crate::cpu::{Kernel, dispatch};
use crate::exec::CpuIsa;
use crate::quant::{Block, Columns, GroupScales, QuantMatrix, STEP, ScalesView};
use crate::scheme::Codes;

/// The form; see the module.
pub(super) struct Floats<'a> {
    pub isa: CpuIsa,
    pub w: &'a QuantMatrix,
    pub segments: Range<usize>,
}

/// Columns of a segment.
fn length(columns: &Columns, segment: usize) -> usize {
    columns.blocks[columns.segments[segment].clone()].iter().map(|block| block.len).sum()
}

impl<T: Lanes> Form<T> for Floats<'_> {
    fn row_words(&self, e: usize) -> usize {
        self.segments.clone().map(|segment| length(&self.w.parts[e].columns, segment)).sum()
    }

    fn packs_alike(&self, a: usize, b: usize) -> bool {
        Arc::ptr_eq(&self.w.parts[a].columns, &self.w.parts[b].columns)
    }

    fn tile_rows(&self, _e: usize, _m: usize) -> usize {
        dispatch(self.isa, Shape).1
    }

    fn pack(&self, e: usize, _m: usize, rows: &[&[T]], panel: &mut [u32]) -> bool {
        let columns = &self.w.parts[e].columns;
        let first = columns.segments[self.segments.clone()].first().and_then(|r| columns.blocks.get(r.start));
        let start = first.map_or(0, |block| block.start);
        let m = rows.len();
        for (i, words) in panel.chunks_exact_mut(m).enumerate() {
            let i = columns.x.as_ref().map_or(start + i, |x| x[start + i] as usize);
            for (word, row) in words.iter_mut().zip(rows) {
                *word = row[i].widen().to_bits();
            }
        }
        true
    }

    fn unit(&self, e: usize, unit: Unit, x: Rows, sums: &mut [UnitSums]) {
        let panels = [unit.first, unit.second.unwrap_or(unit.first)];
        let (count, _) = dispatch(self.isa, Shape);
        let columns = &self.w.parts[e].columns;
        LOCAL.with_borrow_mut(|(panel, partial)| {
            panel.resize(K_BLOCK * LANES * count, 0);
            partial.clear();
            partial.resize(sums.len(), [0.0; UNIT]);
            for vector in (0..2).step_by(count) {
                let panels = &panels[vector..vector + count];
                let mut word = x.first;
                for segment in self.segments.clone() {
                    for (i, chain) in chains(columns, segment).enumerate() {
                        let length: usize = chain.iter().map(|block| block.len).sum();
                        let w = &mut panel[..length * LANES * count];
                        self.dequantise(e, panels, chain, w);
                        for (start, m) in tiles(self.isa, sums.len()) {
                            let x = &x.words[start * x.row_words + word * m..][..length * m];
                            let out = &mut partial[start..start + m];
                            let add = i > 0;
                            dispatch(self.isa, Tile { x, w, m, vector, out, add, ahead: Ahead::NONE });
                        }
                        word += length;
                    }
                    let first = segment == self.segments.start;
                    add(partial, sums, !first, vector * LANES..(vector + count) * LANES);
                }
            }
        });
    }
}

impl Floats<'_> {
    /// Writes the weights of a chain, [columns][16 * panels].
    fn dequantise(&self, e: usize, panels: &[usize], blocks: &[Block], w: &mut [u32]) {
        for (i, &panel) in panels.iter().enumerate() {
            let stride = panels.len() * LANES;
            let out = &mut w[i * LANES..];
            let panel = Panel {
                q: self.w.quants(e, panel),
                scales: self.w.panel_scales(e, panel),
                offsets: Offsets {
                    zeros: self.w.panel_zeros(e, panel),
                    middle: u32::from(self.w.scheme.middle()),
                    minima: self.w.panel_minima(e, panel),
                },
                blocks,
                stride,
                out,
            };
            let scheme = self.w.scheme;
            if let Some(table) = scheme.codes.book() {
                dispatch(self.isa, Dequantise(panel, Book(table)));
            } else if scheme.codes == Codes::E4m3 {
                dispatch(self.isa, Dequantise(panel, E4m3));
            } else if scheme.has_minima() {
                with_ints!(scheme, Q => dispatch(self.isa, Dequantise(panel, AboveMinimum::<Q>(PhantomData))));
            } else {
                with_ints!(scheme, Q => dispatch(self.isa, Dequantise(panel, Ints::<Q>(PhantomData))));
            }
        }
    }
}

/// Blocks of sixteen rows, and where their weights go.
struct Panel<'a> {
    q: &'a [u8],
    scales: ScalesView<'a>,
    offsets: Offsets<'a>,
    blocks: &'a [Block],
    stride: usize,
    out: &'a mut [u32],
}

/// What the codes of a number format stand for.
trait Codec: Copy + Send + Sync {
    /// How codes lie in a panel.
    type Quants: Quants;
    /// What is subtracted in a group of sixteen rows.
    fn offset<S: Simd>(self, s: S, panel: &Offsets, group: usize) -> S::V;
    /// The weights of sixteen codes, one in each word.
    fn weights<S: Simd>(self, s: S, codes: S::Raw, scale: S::V, offset: S::V) -> S::V;
}

/// Zero points and minima of a panel, [groups, 16].
struct Offsets<'a> {
    /// Empty where all are the middle.
    zeros: &'a [u8],
    middle: u32,
    /// None where the format has none.
    minima: Option<ScalesView<'a>>,
}

/// Unsigned integers: scale * (q - zero).
#[derive(Clone, Copy)]
struct Ints<Q>(PhantomData<Q>);

/// Unsigned integers over a minimum: scale * q - minimum.
#[derive(Clone, Copy)]
struct AboveMinimum<Q>(PhantomData<Q>);

/// E4M3 bytes.
#[derive(Clone, Copy)]
struct E4m3;

/// Codes of 4 bits that stand for the values of a table.
#[derive(Clone, Copy)]
struct Book(&'static [f32; LANES]);

impl<Q: Quants> Codec for Ints<Q> {
    type Quants = Q;
    #[inline(always)]
    fn offset<S: Simd>(self, s: S, panel: &Offsets, group: usize) -> S::V {
        match panel.zeros.get(group * LANES..).and_then(|z| z.first_chunk()) {
            Some(zeros) => s.ints(s.widen_bytes(zeros)),
            None => s.ints(s.splat_word(panel.middle)),
        }
    }
    #[inline(always)]
    fn weights<S: Simd>(self, s: S, codes: S::Raw, scale: S::V, zero: S::V) -> S::V {
        s.mul(scale, s.sub(s.ints(codes), zero))
    }
}

impl<Q: Quants> Codec for AboveMinimum<Q> {
    type Quants = Q;
    #[inline(always)]
    fn offset<S: Simd>(self, s: S, panel: &Offsets, group: usize) -> S::V {
        panel.minima.map_or_else(|| s.splat(0.0), |minima| minima.group(s, group))
    }
    #[inline(always)]
    fn weights<S: Simd>(self, s: S, codes: S::Raw, scale: S::V, minimum: S::V) -> S::V {
        s.sub(s.mul(scale, s.ints(codes)), minimum)
    }
}

impl Codec for E4m3 {
    type Quants = Bytes;
    #[inline(always)]
    fn offset<S: Simd>(self, s: S, _panel: &Offsets, _group: usize) -> S::V {
        s.splat(0.0)
    }
    #[inline(always)]
    fn weights<S: Simd>(self, s: S, codes: S::Raw, scale: S::V, _none: S::V) -> S::V {
        s.mul(scale, s.e4m3(codes))
    }
}

impl Codec for Book {
    type Quants = Nibbles;
    #[inline(always)]
    fn offset<S: Simd>(self, s: S, _panel: &Offsets, _group: usize) -> S::V {
        s.splat(0.0)
    }
    #[inline(always)]
    fn weights<S: Simd>(self, s: S, codes: S::Raw, scale: S::V, _none: S::V) -> S::V {
        s.mul(scale, s.look_up(self.0, codes))
    }
}

/// A panel as f32.
struct Dequantise<'a, C>(Panel<'a>, C);

impl<C: Codec> Kernel for Dequantise<'_, C> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self(Panel { q, scales, offsets, blocks, stride, out }, codec) = self;
        let step_bytes = C::Quants::STEP_BYTES;
        let mut at = 0;
        for block in blocks {
            let scale = scales.group(s, block.group);
            let offset = codec.offset(s, &offsets, block.group);
            let q = &q[block.step * step_bytes..][..block.steps() * step_bytes];
            for (step, q) in q.chunks_exact(step_bytes).enumerate() {
                s.prefetch(q.as_ptr().wrapping_add(PREFETCH));
                s.prefetch(q.as_ptr().wrapping_add(PREFETCH + step_bytes / 2));
                let pairs = C::Quants::pairs(s, q);
                let mut words = [s.splat_word(0); STEP];
                for i in 0..STEP / 2 {
                    [words[2 * i], words[2 * i + 1]] = s.halves(pairs[i]);
                }
                // Over all columns, so that the words stay in registers.
                for i in 0..STEP {
                    let weights = codec.weights(s, words[i], scale, offset);
                    let column = step * STEP + i;
                    let out = out.get_mut((at + column) * stride..).unwrap_or_default();
                    if let Some(out) = out.first_chunk_mut().filter(|_| column < block.len) {
                        s.store_words(s.to_words(weights), out);
                    }
                }
            }
            at += block.len;
        }
    }
}
