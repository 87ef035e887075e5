//! Integer products: 16-bit fixed point times 4-bit or 8-bit integers.
//!
//! A block of x with largest magnitude in 2^e .. 2^(e + 1) becomes integers round(x / 2^(e - 14)), |integer| < 2^15: values
//! of bf16 keep all their bits unless they lie more than 7 binades below the largest, and no error is above 2^-15 of it. The
//! order of additions:
//!
//! ```text
//! for segment:  for block:  integer sum of x (q - zero), exact
//!                           segment_sum = f32(integer) * (x scale * w scale) + segment_sum
//!               sum = first segment ? segment_sum : sum + segment_sum
//! ```
//!
//! A block with an infinity or NaN becomes NaN.

use std::marker::PhantomData;
use std::ops::Range;

use super::{Bytes, Form, Nibbles, PREFETCH, Quants, Unit, unpacked};
use crate::cpu::simd::{LANES, Lanes, Simd};
use crate::cpu::tile::{Shape, UNIT, UnitSums, with_rows};
use crate::cpu::{Kernel, dispatch};
use crate::exec::CpuIsa;
use crate::quant::{BLOCK, Block, Columns, QuantMatrix, STEP, ScalesView, middle};

/// Words that follow the integers of a block: its scale, and minus the sum of its integers.
pub(super) const TAIL: usize = 2;

/// Words of integers in a step.
pub(super) const STEP_WORDS: usize = STEP / 2;

/// The form; see the module.
pub(super) struct Ints<'a> {
    pub isa: CpuIsa,
    pub w: &'a QuantMatrix,
    pub segments: Range<usize>,
}

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
        let blocks = blocks(&self.w.parts[e].columns, &self.segments).iter();
        blocks.map(|block| block.steps() * STEP_WORDS + TAIL).sum()
    }

    fn pack(&self, e: usize, rows: &[&[T]], panel: &mut [u32]) {
        let columns = &self.w.parts[e].columns;
        let (blocks, order) = (blocks(columns, &self.segments), columns.x.as_deref());
        dispatch(self.isa, PackRows { rows, blocks, order, panel });
    }

    fn unit(&self, e: usize, unit: Unit, x: &[u32], sums: &mut [UnitSums]) {
        let words = Form::<T>::row_words(self, e);
        if sums.len() > dispatch(self.isa, DirectRows) {
            return unpacked::unit(self, e, unit, words, x, sums);
        }
        match self.w.step_bytes() == Nibbles::STEP_BYTES {
            true => self.tile(e, unit, x, sums, Nibbles),
            false => self.tile(e, unit, x, sums, Bytes),
        }
    }
}

/// The most rows of x for which weights are unpacked in registers.
struct DirectRows;

impl Kernel for DirectRows {
    type Output = usize;

    #[inline(always)]
    fn run<S: Simd>(self, _s: S) -> usize {
        S::DIRECT_ROWS
    }
}

impl Ints<'_> {
    /// One tile of x times a unit.
    fn tile<Q: Quants>(&self, e: usize, unit: Unit, x: &[u32], out: &mut [UnitSums], _: Q) {
        let together = dispatch(self.isa, Shape).0 == 2;
        let panels = [Some(unit.first), unit.second];
        let panel = |panel: Option<usize>| panel.map(|panel| self.panel(e, panel));
        let [first, second] = panels.map(panel);
        let (Some(first), columns, segments) = (first, &self.w.parts[e].columns, &self.segments) else {
            return;
        };
        let middle = u32::from(middle(self.w.scheme));
        let mut run = |panels: [Panel; 2], count, vector| {
            let out = &mut *out;
            let quants = PhantomData::<Q>;
            dispatch(
                self.isa,
                Tile { panels, count, vector, middle, columns, segments: segments.clone(), x, out, quants },
            );
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

    pub(super) fn panel(&self, e: usize, panel: usize) -> Panel<'_> {
        let zeros = self.w.packed.zeros.get(self.w.scales(e, panel)).unwrap_or_default();
        Panel { q: self.w.quants(e, panel), scales: self.w.panel_scales(e, panel), zeros }
    }
}

/// Sixteen rows of w.
#[derive(Clone, Copy)]
pub(super) struct Panel<'a> {
    pub q: &'a [u8],
    /// [groups, 16].
    pub scales: ScalesView<'a>,
    /// [groups, 16], or empty.
    zeros: &'a [u8],
}

impl Panel<'_> {
    /// The zero points of a group.
    #[inline(always)]
    pub(super) fn zero<S: Simd>(&self, s: S, group: usize, middle: u32) -> S::Raw {
        match self.zeros.get(group * LANES..).and_then(|z| z.first_chunk()) {
            Some(zeros) => s.widen_bytes(zeros),
            None => s.splat_word(middle),
        }
    }
}

/// Rows of x as 16-bit fixed point: for each block its integers by pairs, its scale, and minus their sum.
struct PackRows<'a, T> {
    rows: &'a [&'a [T]],
    blocks: &'a [Block],
    /// The column of x of each packed column.
    order: Option<&'a [u32]>,
    panel: &'a mut [u32],
}

impl<T: Lanes> Kernel for PackRows<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let m = self.rows.len();
        let (mut values, mut ints) = ([0.0; BLOCK], [0; BLOCK]);
        for (j, row) in self.rows.iter().enumerate() {
            let mut at = j;
            for block in self.blocks {
                let words = block.steps() * STEP_WORDS;
                let (values, ints) = (&mut values[..2 * words], &mut ints[..2 * words]);
                load(s, row, *block, self.order, values);
                let tail = fixed(values, ints);
                let (to, rest) = self.panel[at..].split_at_mut(words * m);
                for (word, pair) in to.iter_mut().step_by(m).zip(ints.as_chunks::<2>().0) {
                    *word = pair[0] as u32 & 0xffff | (pair[1] as u32) << 16;
                }
                for (i, word) in tail.into_iter().enumerate() {
                    rest[i * m] = word;
                }
                at += (words + TAIL) * m;
            }
        }
    }
}

/// The values of a block; what follows them is 0.
#[inline(always)]
fn load<S: Simd, T: Lanes>(s: S, row: &[T], block: Block, order: Option<&[u32]>, values: &mut [f32]) {
    if let Some(order) = order {
        let (values, rest) = values.split_at_mut(block.len);
        for (value, &i) in values.iter_mut().zip(&order[block.start..]) {
            *value = row[i as usize].widen();
        }
        rest.fill(0.0);
        return;
    }
    let row = &row[block.start..][..block.len];
    for (values, row) in values.chunks_mut(LANES).zip(row.chunks(LANES)) {
        f32::store_some(s, T::load_some(s, row), values);
    }
}

/// The integers of a block. Returns its scale and minus their sum.
#[inline(always)]
fn fixed(values: &[f32], ints: &mut [i32]) -> [u32; TAIL] {
    /// 1.5 * 2^23: a sum with it is rounded to an integer, which its low bits hold.
    const ROUND: f32 = 12_582_912.0;
    let largest = values.iter().fold(0, |most, v| (v.to_bits() & 0x7fff_ffff).max(most));
    // Biased exponents. Below 2^-112 the scale stays; the values are then too small to matter.
    let exponent = (largest >> 23).max(15);
    if exponent == 255 {
        ints.fill(0);
        return [f32::NAN.to_bits(), 0];
    }
    let inverse = f32::from_bits((268 - exponent) << 23);
    for (int, value) in ints.iter_mut().zip(values) {
        *int = ((value * inverse + ROUND).to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    }
    let sum: i32 = ints.iter().sum();
    [(exponent - 14) << 23, sum.wrapping_neg() as u32]
}

/// A tile of rows of x times one or two panels.
struct Tile<'a, Q> {
    panels: [Panel<'a>; 2],
    /// Panels that are there.
    count: usize,
    /// The first one's place in the unit.
    vector: usize,
    /// The zero point where panels have none.
    middle: u32,
    columns: &'a Columns,
    segments: Range<usize>,
    x: &'a [u32],
    out: &'a mut [UnitSums],
    quants: PhantomData<Q>,
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
    if M > S::DIRECT_ROWS || N > S::TILE_VECTORS {
        return; // Never taken; keeps tiles that this path does not use out of the binary.
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
    // The sum of x (q - zero) is that of x q, from minus the sum of x times the zero point.
    let mut acc = [[s.splat_word(0); N]; M];
    for n in 0..N {
        let zero = t.panels[n].zero(s, block.group, t.middle);
        for m in 0..M {
            acc[m][n] = s.mul_words(zero, s.splat_word(tail[M + m]));
        }
    }
    let at = block.step * Q::STEP_BYTES;
    let bytes = block.steps() * Q::STEP_BYTES;
    let mut q = [&t.panels[0].q[at..][..bytes]; N];
    for n in 1..N {
        q[n] = &t.panels[n].q[at..][..bytes];
    }
    for (i, x) in ints.as_chunks::<M>().0.as_chunks::<STEP_WORDS>().0.iter().enumerate() {
        let mut w = [[s.splat_word(0); STEP_WORDS]; N];
        for n in 0..N {
            let step = &q[n][i * Q::STEP_BYTES..][..Q::STEP_BYTES];
            s.prefetch(step.as_ptr().wrapping_add(PREFETCH));
            if Q::STEP_BYTES > 64 {
                s.prefetch(step.as_ptr().wrapping_add(PREFETCH + 64));
            }
            w[n] = Q::pairs(s, step);
        }
        for j in 0..STEP_WORDS {
            for m in 0..M {
                for n in 0..N {
                    acc[m][n] = s.dot_i16(acc[m][n], x[j][m], w[n][j]);
                }
            }
        }
    }
    for n in 0..N {
        let scale = t.panels[n].scales.group(s, block.group);
        for m in 0..M {
            let scale = s.mul(s.splat(f32::from_bits(tail[m])), scale);
            let sum = s.fma(s.ints(acc[m][n]), scale, s.load(&sums[m][n]));
            s.store(sum, &mut sums[m][n]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(values: &[f32]) -> (Vec<i32>, f32, i32) {
        let (mut block, mut ints) = ([0.0; STEP], [1; STEP]);
        block[..values.len()].copy_from_slice(values);
        let [scale, sum] = fixed(&block, &mut ints);
        (ints.to_vec(), f32::from_bits(scale), sum as i32)
    }

    #[test]
    fn a_block_is_fixed_point_around_its_largest_value() {
        let (ints, scale, sum) = words(&[1.0, -1.9921875, 0.0078125, 0.00001, 3e-5]);
        assert_eq!(ints, [16384, -32640, 128, 0, 0, 0, 0, 0]);
        assert_eq!((scale, sum), (1.0 / 16384.0, 16128));
        // Ties go to even.
        assert_eq!(words(&[1.0, 0.5 / 16384.0, 1.5 / 16384.0]).0[1..3], [0, 2]);
        assert_eq!(words(&[]), (vec![0; 8], f32::from_bits(1 << 23), 0));
        for bad in [f32::NAN, f32::INFINITY] {
            let (ints, scale, sum) = words(&[1.0, bad]);
            assert!(ints == [0; 8] && scale.is_nan() && sum == 0);
        }
        let (_, scale, _) = words(&[f32::MIN_POSITIVE]);
        assert!(scale > 0.0 && scale.is_finite());
    }
}
