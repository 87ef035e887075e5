//! Products of f32: weights become f32, chain by chain in cache, and take the tiles of other dtypes.

use std::marker::PhantomData;
use std::ops::Range;

use super::{Bytes, Form, LOCAL, Nibbles, PREFETCH, Quants, Rows, Unit, add, chains, tiles};
use crate::cpu::product::K_BLOCK;
use crate::cpu::simd::{LANES, Lanes, Simd};
use crate::cpu::tile::{Ahead, Shape, Tile, UNIT, UnitSums};
use crate::cpu::{Kernel, dispatch};
use crate::exec::CpuIsa;
use crate::quant::{Block, Columns, QuantMatrix, STEP, ScalesView, middle};
use crate::scheme::QuantScheme;

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
                let mut word = 0;
                for segment in self.segments.clone() {
                    for (i, chain) in chains(columns, segment).enumerate() {
                        let length: usize = chain.iter().map(|block| block.len).sum();
                        let w = &mut panel[..length * LANES * count];
                        self.dequantise(e, panels, chain, w);
                        for (start, m) in tiles(self.isa, sums.len()) {
                            let x = &x.words[start * x.row_words + word * m..][..length * m];
                            let (out, add) = (&mut partial[start..start + m], i > 0);
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
            let (stride, out) = (panels.len() * LANES, &mut w[i * LANES..]);
            let panel = Panel {
                q: self.w.quants(e, panel),
                scales: self.w.panel_scales(e, panel),
                zeros: self.w.packed.zeros.get(self.w.scales(e, panel)).unwrap_or_default(),
                middle: u32::from(middle(self.w.scheme)),
                blocks,
                stride,
                out,
            };
            match self.w.scheme {
                QuantScheme::Fp8 { .. } => dispatch(self.isa, Dequantise::<Bytes, true>(panel, PhantomData)),
                _ if self.w.step_bytes() == Nibbles::STEP_BYTES => {
                    dispatch(self.isa, Dequantise::<Nibbles, false>(panel, PhantomData));
                }
                _ => dispatch(self.isa, Dequantise::<Bytes, false>(panel, PhantomData)),
            }
        }
    }
}

/// Blocks of sixteen rows, and where their weights go.
struct Panel<'a> {
    q: &'a [u8],
    scales: ScalesView<'a>,
    zeros: &'a [u8],
    middle: u32,
    blocks: &'a [Block],
    stride: usize,
    out: &'a mut [u32],
}

/// A panel as f32: scale * (q - zero), or scale * e4m3(q).
struct Dequantise<'a, Q, const FP8: bool>(Panel<'a>, PhantomData<Q>);

impl<Q: Quants, const FP8: bool> Kernel for Dequantise<'_, Q, FP8> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (Panel { q, scales, zeros, middle, blocks, stride, out }, exponent) =
            (self.0, s.splat((1u128 << 120) as f32));
        let mut at = 0;
        for block in blocks {
            let scale = scales.group(s, block.group);
            let zero = match zeros.get(block.group * LANES..).and_then(|z| z.first_chunk()) {
                Some(zeros) => s.ints(s.widen_bytes(zeros)),
                None => s.ints(s.splat_word(middle)),
            };
            let q = &q[block.step * Q::STEP_BYTES..][..block.steps() * Q::STEP_BYTES];
            for (step, q) in q.chunks_exact(Q::STEP_BYTES).enumerate() {
                s.prefetch(q.as_ptr().wrapping_add(PREFETCH));
                s.prefetch(q.as_ptr().wrapping_add(PREFETCH + Q::STEP_BYTES / 2));
                let pairs = Q::pairs(s, q);
                let mut words = [s.splat_word(0); STEP];
                for i in 0..STEP / 2 {
                    [words[2 * i], words[2 * i + 1]] = s.halves(pairs[i]);
                }
                // Over all columns, so that the words stay in registers.
                for i in 0..STEP {
                    let value = if FP8 {
                        s.mul(s.e4m3_small(words[i]), exponent)
                    } else {
                        s.sub(s.ints(words[i]), zero)
                    };
                    let column = step * STEP + i;
                    let out = out.get_mut((at + column) * stride..).unwrap_or_default();
                    if let Some(out) = out.first_chunk_mut().filter(|_| column < block.len) {
                        s.store_words(s.to_words(s.mul(scale, value)), out);
                    }
                }
            }
            at += block.len;
        }
    }
}
