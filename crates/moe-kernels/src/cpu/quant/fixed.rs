//! Rows of x as 16-bit fixed point.
//!
//! A block of x with largest magnitude in 2^e .. 2^(e + 1) becomes integers round(x / 2^(e - 14)), |integer| < 2^15: values
//! of bf16 keep all their bits unless they lie more than 7 binades below the largest, and no error is above 2^-15 of it. A block
//! with an infinity or NaN becomes NaN.

use super::ints::{STEP_WORDS, TAIL};
use crate::cpu::Kernel;
use crate::cpu::simd::{LANES, Lanes, Simd};
use crate::quant::{BLOCK, Block, STEP};

/// Rows of x as 16-bit fixed point: for each block its integers, its scale, and minus their sum.
pub(super) struct PackRows<'a, T, P> {
    pub rows: &'a [&'a [T]],
    pub blocks: &'a [Block],
    /// The column of x of each packed column.
    pub order: Option<&'a [u32]>,
    pub panel: &'a mut [u32],
    /// Puts the integers of a block of row j of the tile into the words of this block of all rows.
    pub put: P,
}

impl<T: Lanes, P: Fn(&[i16], Block, usize, &mut [u32])> Kernel for PackRows<'_, T, P> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let m = self.rows.len();
        let (mut values, mut ints) = ([0.0; BLOCK], [0; BLOCK]);
        for (j, row) in self.rows.iter().enumerate() {
            let mut at = 0;
            for block in self.blocks {
                let words = block.steps() * STEP_WORDS;
                let (values, ints) = (&mut values[..2 * words], &mut ints[..2 * words]);
                load(s, row, *block, self.order, values);
                let tail = fixed(values, ints);
                let (to, rest) = self.panel[at..].split_at_mut(words * m);
                (self.put)(ints, *block, j, to);
                for (i, word) in tail.into_iter().enumerate() {
                    rest[i * m + j] = word;
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

/// The integers of a block of whole steps. Returns its scale and minus their sum.
#[inline(always)]
fn fixed(values: &[f32], ints: &mut [i16]) -> [u32; TAIL] {
    /// 1.5 * 2^23: a sum with it is rounded to an integer, which its low bits hold.
    const ROUND: f32 = 12_582_912.0;
    // By whole steps, so that the compiler has vectors of one length and no rest.
    let values = values.as_chunks::<STEP>().0;
    let mut largest = [0; STEP];
    for values in values {
        for (most, value) in largest.iter_mut().zip(values) {
            *most = (value.to_bits() & 0x7fff_ffff).max(*most);
        }
    }
    let largest = largest.into_iter().fold(0, u32::max);
    // Biased exponents. Below 2^-112 the scale stays; the values are then too small to matter.
    let exponent = (largest >> 23).max(15);
    if exponent == 255 {
        ints.fill(0);
        return [f32::NAN.to_bits(), 0];
    }
    let inverse = f32::from_bits((268 - exponent) << 23);
    let mut sums = [0i32; STEP];
    for (ints, values) in ints.as_chunks_mut::<STEP>().0.iter_mut().zip(values) {
        for i in 0..STEP {
            ints[i] = (values[i] * inverse + ROUND).to_bits().wrapping_sub(ROUND.to_bits()) as i16;
            sums[i] += i32::from(ints[i]);
        }
    }
    let sum: i32 = sums.into_iter().sum();
    [(exponent - 14) << 23, sum.wrapping_neg() as u32]
}

/// Puts the integers of row `j` of `m` as pairs: word i of row j goes to `out[i * m + j]`.
#[inline(always)]
pub(super) fn put_pairs(ints: &[i16], j: usize, m: usize, out: &mut [u32]) {
    if m == 1 {
        for (word, pair) in out.iter_mut().zip(ints.as_chunks::<2>().0) {
            *word = u32::from(pair[0] as u16) | u32::from(pair[1] as u16) << 16;
        }
        return;
    }
    for (words, pair) in out.chunks_exact_mut(m).zip(ints.as_chunks::<2>().0) {
        words[j] = u32::from(pair[0] as u16) | u32::from(pair[1] as u16) << 16;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(values: &[f32]) -> (Vec<i16>, f32, i32) {
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
