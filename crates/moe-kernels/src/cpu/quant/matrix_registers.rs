//! Integer products of many rows of x on the matrix registers of AMX.
//!
//! A 16-bit integer of x is 256 * high + low, of a signed and an unsigned byte; weights are unsigned bytes, as they lie
//! (8 bits) or unpacked to cache (fewer bits) once for all rows of x. One instruction multiplies up to 16 rows of x
//! with 16 of w over 64 columns. The sum of a block is exact and ends as in [`super::ints`], so both have the same
//! bits.

use std::marker::PhantomData;
use std::ops::Range;

use super::form::{LOCAL, PREFETCH, Rows, Unit, add};
use super::panel::{Ints, Panel, STEP_WORDS, TAIL};
use super::quants::{Quants, with_quants};
use crate::cpu::amx::{ByteSums, configure_bytes, is_supported_int8, multiply_bytes, release, take_bytes};
use crate::cpu::simd::{LANES, Simd};
use crate::cpu::tile::{CACHE_LINE, UNIT, UnitSums};
use crate::cpu::units::even_parts;
use crate::cpu::{Kernel, dispatch};
use crate::exec::CpuIsa;
use crate::quant::{BLOCK, Block, Columns, GroupScales, STEP};

/// Rows of x of a tile.
pub(super) const ROWS: usize = LANES;

/// Whether the machine has the instructions and blocks are wide enough to gain by them.
pub(super) fn fits(isa: CpuIsa, columns: &Columns) -> bool {
    isa == CpuIsa::AmxBf16 && columns.is_wide && is_supported_int8()
}

/// Columns of a block that are multiplied at a time.
fn chunk(block: Block) -> usize {
    if block.len.is_multiple_of(64) { 64 } else { 32 }
}

/// Puts the integers of a block, of row `j` of a tile of `m`, where [`unit`] wants them: for each chunk of columns the
/// high bytes of all rows, then the low bytes, in the order of the bytes of weights.
#[inline(always)]
pub(super) fn put(ints: &[u16], is_bytes: bool, block: Block, j: usize, m: usize, out: &mut [u32]) {
    let order = if is_bytes { [[0, 2, 1, 3], [4, 6, 5, 7]] } else { [[0, 4, 1, 5], [2, 6, 3, 7]] };
    let chunk = chunk(block);
    for (ints, out) in ints.chunks_exact(chunk).zip(out.chunks_exact_mut(chunk / 2 * m)) {
        let (high, low) = out.split_at_mut(chunk / 4 * m);
        let row = j * (chunk / 4)..(j + 1) * (chunk / 4);
        let words = high[row.clone()].iter_mut().zip(&mut low[row]);
        let quads =
            ints.as_chunks::<STEP>().0.iter().flat_map(|step| order.map(|quad| quad.map(|i| step[i])));
        for ((high, low), quad) in words.zip(quads) {
            *high = u32::from_le_bytes(quad.map(|x| (x >> 8) as u8));
            *low = u32::from_le_bytes(quad.map(|x| x as u8));
        }
    }
}

/// A unit of matrix `e` times packed rows of x.
pub(super) fn unit(ints: &Ints, e: usize, unit: Unit, x: Rows, sums: &mut [UnitSums]) {
    let columns = &ints.w.parts[e].columns;
    // The place of a missing panel repeats the other one.
    let panels = [unit.first, unit.second.unwrap_or(unit.first)].map(|panel| ints.panel(e, panel));
    LOCAL.with_borrow_mut(|(unpacked, partial)| {
        partial.resize(sums.len(), [0.0; UNIT]);
        unpacked.resize(unpacked.len().max(2 * PANEL_WORDS + LANES), 0);
        let first = unpacked.as_ptr().align_offset(CACHE_LINE).min(LANES);
        let unpacked = &mut unpacked[first..][..2 * PANEL_WORDS];
        let mut at = x.first;
        let mut configured = (0, 0);
        let mut tiles = [ByteSums([[0; LANES]; LANES]); 4];
        for segment in ints.segments.clone() {
            partial.fill([0.0; UNIT]);
            for block in &columns.blocks[columns.segments[segment].clone()] {
                let w = weights(ints, &panels, *block, unpacked);
                let len = block.steps() * STEP_WORDS;
                let chunk = chunk(*block);
                for (start, m) in even_parts(sums.len(), sums.len().div_ceil(ROWS)) {
                    if configured != (m, chunk) {
                        configure_bytes(m, chunk);
                        configured = (m, chunk);
                    }
                    let first = start * x.row_words + at * m;
                    let (x, tail) = x.words[first..][..(len + TAIL) * m].split_at(len * m);
                    for (i, x) in x.chunks_exact(chunk / 2 * m).enumerate() {
                        let bytes = i * chunk * LANES..(i + 1) * chunk * LANES;
                        let w = w.map(|w| &w[bytes.clone()]);
                        multiply_bytes(x.split_at(chunk / 4 * m).into(), w, m, chunk);
                    }
                    take_bytes(&mut tiles);
                    let out = &mut partial[start..start + m];
                    with_quants!(ints.w.scheme, Q => {
                        let quants = PhantomData::<Q>;
                        let end = End { panels: &panels, group: block.group, tiles: &tiles, tail, out, quants };
                        dispatch(ints.isa, end);
                    });
                }
                at += len + TAIL;
            }
            add(partial, sums, segment != ints.segments.start, 0..UNIT);
        }
        release();
    });
}

/// Words of a block of one panel, a byte for each weight.
const PANEL_WORDS: usize = BLOCK * LANES / 4;

/// The bytes of a block of both panels: themselves, or unpacked.
fn weights<'a>(ints: &Ints, panels: &[Panel<'a>; 2], block: Block, unpacked: &'a mut [u32]) -> [&'a [u8]; 2] {
    let bytes = ints.w.step_bytes();
    let range: Range<usize> = block.step * bytes..(block.step + block.steps()) * bytes;
    let q = panels.map(|panel| &panel.q[range.clone()]);
    if ints.w.scheme.bits() == 8 {
        return q;
    }
    let (first, second) = unpacked.split_at_mut(PANEL_WORDS);
    [(q[0], first), (q[1], second)].map(|(q, out)| {
        with_quants!(ints.w.scheme, Q => dispatch(ints.isa, Unpack::<Q>(q, out, PhantomData)));
        as_bytes(out)
    })
}

/// Words as their bytes.
fn as_bytes(words: &[u32]) -> &[u8] {
    // SAFETY: every bit pattern is a byte, and bytes need no alignment.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), size_of_val(words)) }
}

/// Integers of fewer bits to bytes: a step becomes two rows of 16 words.
struct Unpack<'a, Q>(&'a [u8], &'a mut [u32], PhantomData<Q>);

impl<Q: Quants> Kernel for Unpack<'_, Q> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let steps = self.0.chunks_exact(Q::STEP_BYTES);
        for (step, out) in steps.zip(self.1.as_chunks_mut::<LANES>().0.as_chunks_mut::<2>().0) {
            s.prefetch(step.as_ptr().wrapping_add(PREFETCH));
            let [low, high] = Q::bytes(s, step);
            s.store_words(low, &mut out[0]);
            s.store_words(high, &mut out[1]);
        }
    }
}

/// Adds the sums of a block to those of a segment.
struct End<'a, Q> {
    panels: &'a [Panel<'a>; 2],
    group: usize,
    /// Sums of the high bytes with both panels, then of the low bytes.
    tiles: &'a [ByteSums; 4],
    /// Scales of the rows of x, then minus the sums of their integers, or of their values.
    tail: &'a [u32],
    out: &'a mut [UnitSums],
    quants: PhantomData<Q>,
}

impl<Q: Quants> Kernel for End<'_, Q> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let m = self.out.len();
        let (scales, minus_sums) = self.tail.split_at(m);
        for n in 0..2 {
            let panel = &self.panels[n];
            let zero = panel.zero(s, self.group);
            let w_scale = panel.scale::<S, Q>(s, self.group);
            let minimum = panel.minima.map(|minima| minima.group(s, self.group));
            let high = &self.tiles[n].0;
            let low = &self.tiles[2 + n].0;
            for (i, out) in self.out.iter_mut().enumerate() {
                let sum = s.shift_left(s.load_words(&high[i]), 8);
                let sum = s.add_words(sum, s.load_words(&low[i]));
                let scale = s.mul(s.splat(f32::from_bits(scales[i])), w_scale);
                let out = &mut out.as_chunks_mut().0[n];
                if let Some(minimum) = minimum {
                    let total = s.fma(s.ints(sum), scale, s.load(out));
                    s.store(s.fma(s.splat(f32::from_bits(minus_sums[i])), minimum, total), out);
                    continue;
                }
                let sum = s.add_words(sum, s.mul_words(zero, s.splat_word(minus_sums[i])));
                s.store(s.fma(s.ints(sum), scale, s.load(out)), out);
            }
        }
    }
}
