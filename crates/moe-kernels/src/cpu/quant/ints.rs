//! Integer products: 16-bit fixed point times integers of 4 to 8 bits.
//!
//! Rows of x become integers in [`super::fixed`]. The order of additions:
//!
//! ```text
//! for segment:  for block:  integer sum of x (q - zero), exact
//!                           segment_sum = f32(integer) * (x scale * w scale) + segment_sum
//!                           with minima: segment_sum = (-sum of x * x scale) * minimum + segment_sum
//!               sum = first segment ? segment_sum : sum + segment_sum
//! ```

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use super::block::{Tile, integer_sums, weights};
use super::fixed::{PackPairs, PackRows, put_pairs};
use super::form::{Form, Rows, Unit};
#[cfg(target_arch = "x86_64")]
use super::matrix_registers;
use super::panel::{Ints, Panel, STEP_WORDS, TAIL};
use super::quants::{Quants, with_quants};
use super::{one_row, row, unpacked};
use crate::cpu::simd::{LANES, Lanes, Simd};
use crate::cpu::tile::{Shape, UNIT, UnitSums, with_rows};
use crate::cpu::{Kernel, dispatch, dispatch_ints};
use crate::quant::{Block, Columns, GroupScales};

/// The blocks of some segments.
fn blocks<'a>(columns: &'a Columns, segments: &Range<usize>) -> &'a [Block] {
    let ranges = &columns.segments[segments.clone()];
    match (ranges.first(), ranges.last()) {
        (Some(first), Some(last)) => &columns.blocks[first.start..last.end],
        _ => &[],
    }
}

impl<T: Lanes> Form<T> for Ints<'_> {
    fn row_words(&self, e: usize) -> usize {
        let blocks = blocks(&self.w.parts[e].columns, &self.segments);
        let (Some(first), Some(last)) = (blocks.first(), blocks.last()) else { return 0 };
        (last.step + last.steps() - first.step) * STEP_WORDS + blocks.len() * TAIL
    }

    fn packs_alike(&self, a: usize, b: usize) -> bool {
        Arc::ptr_eq(&self.w.parts[a].columns, &self.w.parts[b].columns)
    }

    fn tile_rows(&self, e: usize, m: usize) -> usize {
        #[cfg(target_arch = "x86_64")]
        if self.in_matrix_registers(e, m) {
            return matrix_registers::ROWS;
        }
        let _ = (e, m);
        dispatch(self.isa, Shape).1
    }

    fn pack(&self, e: usize, m: usize, rows: &[&[T]], panel: &mut [u32]) -> bool {
        let columns = &self.w.parts[e].columns;
        let blocks = blocks(columns, &self.segments);
        let order = columns.x.as_deref();
        let has_minima = self.w.scheme.has_minima();
        #[cfg(target_arch = "x86_64")]
        if self.in_matrix_registers(e, m) {
            let is_bytes = self.w.scheme.bits() == 8;
            let m = rows.len();
            let put = |ints: &[u16], block: Block, j: usize, out: &mut [u32]| {
                matrix_registers::put(ints, is_bytes, block, j, m, out);
            };
            return dispatch(self.isa, PackRows { rows, blocks, order, has_minima, panel, put });
        }
        if self.in_bytes(m) {
            let put = |ints: &[u16], _: Block, _: usize, out: &mut [u32]| one_row::put_bytes(ints, out);
            return dispatch(self.isa, PackRows { rows, blocks, order, has_minima, panel, put });
        }
        if rows.len() == 1 {
            let put = |ints: &[u16], _: Block, _: usize, out: &mut [u32]| put_pairs(ints, out);
            return dispatch(self.isa, PackRows { rows, blocks, order, has_minima, panel, put });
        }
        dispatch(self.isa, PackPairs { rows, blocks, order, has_minima, panel })
    }

    fn unit(&self, e: usize, unit: Unit, x: Rows, sums: &mut [UnitSums]) {
        #[cfg(target_arch = "x86_64")]
        if self.in_matrix_registers(e, sums.len()) {
            return matrix_registers::unit(self, e, unit, x, sums);
        }
        with_quants!(self.w.scheme, Q => {
            if sums.len() > dispatch(self.isa, DirectRowsOf::<Q>(PhantomData)) {
                return unpacked::unit::<Q>(self, e, unit, x, sums);
            }
            self.tile::<Q>(e, unit, &x.words[x.first * sums.len()..], sums);
        });
    }
}

/// The most rows of x for which weights are unpacked in registers.
#[cfg(target_arch = "x86_64")]
struct DirectRows;

#[cfg(target_arch = "x86_64")]
impl Kernel for DirectRows {
    type Output = usize;

    #[inline(always)]
    fn run<S: Simd>(self, _s: S) -> usize {
        S::DIRECT_ROWS
    }
}

/// The most rows of x for which weights of one format are unpacked in registers.
struct DirectRowsOf<Q>(PhantomData<Q>);

impl<Q: Quants> Kernel for DirectRowsOf<Q> {
    type Output = usize;

    #[inline(always)]
    fn run<S: Simd>(self, _s: S) -> usize {
        S::DIRECT_ROWS.min(Q::DIRECT_ROWS)
    }
}

/// Whether one row of x is packed as bytes.
struct TakesBytes<Q>(PhantomData<Q>);

impl<Q: Quants> Kernel for TakesBytes<Q> {
    type Output = bool;

    #[inline(always)]
    fn run<S: Simd>(self, _s: S) -> bool {
        S::HAS_BYTE_DOTS && one_row::fits::<S, Q>()
    }
}

impl Ints<'_> {
    /// Whether m rows of x are multiplied by AMX.
    #[cfg(target_arch = "x86_64")]
    fn in_matrix_registers(&self, e: usize, m: usize) -> bool {
        !self.is_stacked
            && m > dispatch(self.isa, DirectRows)
            && matrix_registers::fits(self.isa, &self.w.parts[e].columns)
    }

    /// Whether m rows of x are packed as bytes for [`one_row`].
    fn in_bytes(&self, m: usize) -> bool {
        m == 1 && with_quants!(self.w.scheme, Q => dispatch_ints(self.isa, TakesBytes::<Q>(PhantomData)))
    }

    /// One tile of x times a unit.
    fn tile<Q: Quants>(&self, e: usize, unit: Unit, x: &[u32], out: &mut [UnitSums]) {
        // Two panels that follow each other are one stream of memory: one row, which leaves time for nothing else,
        // takes them in turn.
        let is_pair = unit.second == Some(unit.first + 1);
        let together = dispatch(self.isa, Shape).0 == 2 && (out.len() > 1 || !is_pair);
        let panels = [Some(unit.first), unit.second];
        let panel = |panel: Option<usize>| panel.map(|panel| self.panel(e, panel));
        let [first, second] = panels.map(panel);
        let (Some(first), columns, segments) = (first, &self.w.parts[e].columns, &self.segments) else {
            return;
        };
        let mut run = |panels: [Panel; 2], count, vector| {
            let out = &mut *out;
            let segments = segments.clone();
            let quants = PhantomData::<Q>;
            let next = if is_pair && together { 2 } else { 1 };
            let tile = Tile { panels, count, vector, next, columns, segments, x, out, quants };
            dispatch_ints(self.isa, tile);
        };
        match second {
            Some(second) if together => run([first, second], 2, 0),
            Some(second) => {
                run([first, first], 1, 0);
                run([second, second], 1, 1);
            }
            None => run([first, first], 1, 0),
        }
    }
}

impl<Q: Quants> Kernel for Tile<'_, Q> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        if self.count == 2 {
            with_rows!(self.out.len(), tile::<S, Q; 2>(s, self))
        } else {
            with_rows!(self.out.len(), tile::<S, Q; 1>(s, self))
        }
    }
}

#[inline(always)]
fn tile<S: Simd, Q: Quants, const M: usize, const N: usize>(s: S, mut t: Tile<Q>) {
    if M > S::DIRECT_ROWS || M > Q::DIRECT_ROWS || N > S::TILE_VECTORS {
        return; // Never taken; keeps tiles that this path does not use out of the binary.
    }
    if M == 1 {
        return row::tile::<S, Q, N>(s, t);
    }
    let Some((out, _)) = std::mem::take(&mut t.out).split_first_chunk_mut::<M>() else { return };
    let mut x = t.x;
    for (i, range) in t.columns.segments[t.segments.clone()].iter().enumerate() {
        let mut sums = [[[0.0; LANES]; N]; M];
        for block in &t.columns.blocks[range.clone()] {
            let (ints, rest) = x.split_at(block.steps() * STEP_WORDS * M);
            let (tail, rest) = rest.split_at(TAIL * M);
            x = rest;
            block_sums::<S, Q, M, N>(s, &t, *block, ints, tail, &mut sums);
        }
        for m in 0..M {
            let out: &mut [[f32; LANES]] = &mut out[m].as_chunks_mut().0[t.vector..];
            for n in 0..N {
                let sum = s.load(&sums[m][n]);
                s.store(if i == 0 { sum } else { s.add(s.load(&out[n]), sum) }, &mut out[n]);
            }
        }
    }
    const { assert!(UNIT == 2 * LANES) };
}

/// Adds the sums of one block.
#[inline(always)]
fn block_sums<S: Simd, Q: Quants, const M: usize, const N: usize>(
    s: S,
    t: &Tile<Q>,
    block: Block,
    ints: &[u32],
    tail: &[u32],
    sums: &mut [[[f32; LANES]; N]; M],
) {
    // The sum of x (q - zero) is the sum of x q less the sum of x times the zero point, where `acc` begins. Minima
    // come at the end.
    let has_minima = t.panels[0].minima.is_some();
    let mut acc = [[s.splat_word(0); N]; M];
    if !has_minima {
        for n in 0..N {
            let zero = t.panels[n].zero(s, block.group);
            for m in 0..M {
                acc[m][n] = s.mul_words(zero, s.splat_word(tail[M + m]));
            }
        }
    }
    let (q, ahead) = weights::<Q, N>(t, block);
    integer_sums::<S, Q, M, N>(s, &q, ints, ahead, &mut acc);
    for n in 0..N {
        t.panels[n].scales.ask(s, block.group, t.next);
        let scale = t.panels[n].scale::<S, Q>(s, block.group);
        for m in 0..M {
            let scale = s.mul(s.splat(f32::from_bits(tail[m])), scale);
            let sum = s.fma(s.ints(acc[m][n]), scale, s.load(&sums[m][n]));
            s.store(sum, &mut sums[m][n]);
        }
        if let Some(minima) = t.panels[n].minima {
            minima.ask(s, block.group, t.next);
            let minimum = minima.group(s, block.group);
            for m in 0..M {
                let sum = s.fma(s.splat(f32::from_bits(tail[M + m])), minimum, s.load(&sums[m][n]));
                s.store(sum, &mut sums[m][n]);
            }
        }
    }
}
