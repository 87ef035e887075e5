//! Rows of x as 16-bit fixed point.
//!
//! A block of x with largest magnitude in 2^e .. 2^(e + 1) becomes integers round(x / 2^(e - 14)), |integer| < 2^15:
//! values of bf16 keep all their bits unless they lie more than 7 binades below the largest, and no error is above
//! 2^-15 of it. A block with an infinity or NaN becomes NaN.

use super::panel::{STEP_WORDS, TAIL};
use super::shift::is_in_range;
use crate::cpu::Kernel;
use crate::cpu::simd::{LANES, Lanes, Simd};
use crate::quant::{BLOCK, Block};

/// Columns after which the values of a row are asked for: 16 cache lines of bf16.
const AHEAD: usize = 512;

/// Sixteens of a block of 32 columns.
const SHORT: usize = 2;

/// Rows of x as 16-bit fixed point: for each block its integers, its scale, and minus their sum. Returns whether all
/// scales are [in range](is_in_range).
pub(super) struct PackRows<'a, T, P> {
    pub rows: &'a [&'a [T]],
    pub blocks: &'a [Block],
    /// The column of x of each packed column.
    pub order: Option<&'a [u32]>,
    /// Whether the scheme has minima.
    pub has_minima: bool,
    pub panel: &'a mut [u32],
    /// Puts the integers of a block of row j of the tile into the words of this block of all rows.
    pub put: P,
}

impl<T: Lanes, P: Fn(&[u16], Block, usize, &mut [u32])> Kernel for PackRows<'_, T, P> {
    type Output = bool;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> bool {
        let m = self.rows.len();
        let mut all_in_range = true;
        let mut ints = [0; BLOCK];
        for (j, row) in self.rows.iter().enumerate() {
            let mut at = 0;
            for block in self.blocks {
                let words = block.steps() * STEP_WORDS;
                let tail = convert(s, row, *block, self.order, &mut ints);
                all_in_range &= is_in_range(tail[0]);
                let tail = if self.has_minima { for_minima(tail) } else { tail };
                let (to, rest) = self.panel[at..].split_at_mut(words * m);
                (self.put)(&ints[..2 * words], *block, j, to);
                for (i, word) in tail.into_iter().enumerate() {
                    rest[i * m + j] = word;
                }
                at += (words + TAIL) * m;
            }
        }
        all_in_range
    }
}

/// [`PackRows`] of a tile of pairs: word i of row j of m goes to place i * m + j of a block. The rows of a block are
/// transposed, which takes less than to put each word.
pub(super) struct PackPairs<'a, T> {
    pub rows: &'a [&'a [T]],
    pub blocks: &'a [Block],
    pub order: Option<&'a [u32]>,
    pub has_minima: bool,
    pub panel: &'a mut [u32],
}

impl<T: Lanes> Kernel for PackPairs<'_, T> {
    type Output = bool;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> bool {
        let m = self.rows.len();
        let mut at = 0;
        let mut all_in_range = true;
        let mut ints = [[0; BLOCK]; LANES];
        let mut tails = [[0; LANES]; TAIL];
        for block in self.blocks {
            for (j, (row, ints)) in self.rows.iter().zip(&mut ints).enumerate() {
                // Rows come from another core's cache, too many side by side for the processor to see where each goes
                // on.
                s.prefetch(row.as_ptr().wrapping_add(block.start + AHEAD));
                let tail = convert(s, row, *block, self.order, ints);
                all_in_range &= is_in_range(tail[0]);
                let tail = if self.has_minima { for_minima(tail) } else { tail };
                for i in 0..TAIL {
                    tails[i][j] = tail[i];
                }
            }
            let words = block.steps() * STEP_WORDS;
            put_tile(s, &ints, words, m, &mut self.panel[at..]);
            at += words * m;
            for tail in &tails {
                self.panel[at..at + m].copy_from_slice(&tail[..m]);
                at += m;
            }
        }
        all_in_range
    }
}

/// Puts `words` words of m rows. Surplus lanes land where the next words go, and those overwrite them.
#[inline(always)]
fn put_tile<S: Simd>(s: S, ints: &[[u16; BLOCK]; LANES], words: usize, m: usize, out: &mut [u32]) {
    // Rows that no tile of the path has stay constants, so that nothing is done for them.
    let most = if S::TILE_ROWS > LANES / 2 { LANES } else { LANES / 2 };
    for first in (0..words).step_by(LANES) {
        let mut rows = [s.splat_word(0); LANES];
        for j in 0..most {
            if let Some(ints) = ints[j][2 * first..].first_chunk() {
                rows[j] = s.words_u16(ints);
            }
        }
        let columns = s.transpose(rows);
        let out = &mut out[first * m..];
        // The usual case apart, unrolled, so that columns stay in registers.
        if words - first >= LANES && out.len() >= (LANES - 1) * m + LANES {
            for i in 0..LANES {
                if let Some(out) = out[i * m..].first_chunk_mut() {
                    s.store_words(columns[i], out);
                }
            }
            continue;
        }
        for i in 0..LANES.min(words - first) {
            let mut column = [0; LANES];
            s.store_words(columns[i], &mut column);
            let out = &mut out[i * m..];
            let room = out.len().min(LANES);
            out[..room].copy_from_slice(&column[..room]);
        }
    }
}

/// The integers of a block of a row, its scale and minus their sum. What follows them up to the next sixteen is 0.
#[inline(always)]
fn convert<S: Simd, T: Lanes>(
    s: S,
    row: &[T],
    block: Block,
    order: Option<&[u32]>,
    ints: &mut [u16; BLOCK],
) -> [u32; TAIL] {
    let ints = ints.as_chunks_mut().0;
    if order.is_none() && block.len.is_multiple_of(LANES) {
        let values = row[block.start..][..block.len].as_chunks().0;
        // The shortest usual block as a constant, so that its loops are unrolled.
        return match (<&[_; SHORT]>::try_from(values), ints.first_chunk_mut::<SHORT>()) {
            (Ok(values), Some(ints)) => fixed(s, values, ints),
            _ => fixed(s, values, ints),
        };
    }
    let mut values = [T::default(); BLOCK];
    match order {
        Some(order) => {
            for (value, &i) in values[..block.len].iter_mut().zip(&order[block.start..]) {
                *value = row[i as usize];
            }
        }
        None => values[..block.len].copy_from_slice(&row[block.start..][..block.len]),
    }
    fixed(s, &values.as_chunks().0[..block.len.div_ceil(LANES)], ints)
}

/// The integers of sixteens of values. Returns their scale and minus their sum.
#[inline(always)]
fn fixed<S: Simd, T: Lanes>(s: S, values: &[[T; LANES]], ints: &mut [[u16; LANES]]) -> [u32; TAIL] {
    /// 1.5 * 2^23: a sum with it is rounded to an integer, which its low bits hold.
    const ROUND: f32 = 12_582_912.0;
    let mut largest = s.splat_word(0);
    for values in values {
        largest = s.max_words(largest, s.magnitude(T::load(s, values)));
    }
    let largest = s.fold_max_words(largest);
    // Biased exponents. Below 2^-112 the scale stays; the values are then too small to matter. Zeros have any.
    let exponent = if largest == 0 { 127 } else { (largest >> 23).max(15) };
    if exponent == 255 {
        ints[..values.len()].fill([0; LANES]);
        return [f32::NAN.to_bits(), 0];
    }
    let inverse = s.splat(f32::from_bits((268 - exponent) << 23));
    let round = s.splat(ROUND);
    let bias = s.splat_word(ROUND.to_bits().wrapping_neg());
    let mut sums = s.splat_word(0);
    for (ints, values) in ints.iter_mut().zip(values) {
        let rounded = s.to_words(s.add(s.mul(T::load(s, values), inverse), round));
        let int = s.add_words(rounded, bias);
        sums = s.add_words(sums, int);
        s.store_i16(int, ints);
    }
    [(exponent - 14) << 23, s.fold_add_words(sums).wrapping_neg()]
}

/// The scale of a block and minus the sum of its values, which minima are multiplied with. The sum of so few integers
/// is exact in f32, and so is its product with a power of two.
#[inline(always)]
fn for_minima([scale, minus_sum]: [u32; TAIL]) -> [u32; TAIL] {
    let sum = minus_sum.cast_signed() as f32 * f32::from_bits(scale);
    [scale, sum.to_bits()]
}

/// Puts the integers of one row as pairs.
#[inline(always)]
pub(super) fn put_pairs(ints: &[u16], out: &mut [u32]) {
    for (word, pair) in out.iter_mut().zip(ints.as_chunks::<2>().0) {
        *word = u32::from(pair[0]) | u32::from(pair[1]) << 16;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::dispatch;
    use crate::exec::CpuIsa;

    /// The values of one block, as all paths convert them.
    struct Convert<'a>(&'a [f32]);

    impl Kernel for Convert<'_> {
        type Output = (Vec<u16>, [u32; TAIL]);

        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> Self::Output {
            let mut ints = [1; BLOCK];
            let block = Block { start: 0, len: self.0.len(), group: 0, step: 0 };
            let tail = convert(s, self.0, block, None, &mut ints);
            (ints[..2 * STEP_WORDS * block.steps()].to_vec(), tail)
        }
    }

    fn words(values: &[f32]) -> (Vec<i16>, f32, i32) {
        // Whole sixteens, and as they are.
        let mut whole = values.to_vec();
        whole.resize(values.len().next_multiple_of(LANES), 0.0);
        let mut first = None;
        for isa in CpuIsa::ALL.into_iter().filter(|isa| isa.is_supported()) {
            let (ints, tail) = dispatch(isa, Convert(values));
            let (more, same) = dispatch(isa, Convert(&whole));
            assert_eq!((&more[..ints.len()], same), (&ints[..], tail), "{isa:?}");
            assert!(more[ints.len()..].iter().all(|int| *int == 0));
            assert_eq!(*first.get_or_insert((ints.clone(), tail)), (ints, tail), "{isa:?}");
        }
        let (ints, [scale, sum]) = first.unwrap();
        (ints.iter().map(|int| *int as i16).collect(), f32::from_bits(scale), sum as i32)
    }

    #[test]
    fn a_block_is_fixed_point_around_its_largest_value() {
        let (ints, scale, sum) = words(&[1.0, -1.9921875, 0.0078125, 0.00001, 3e-5]);
        assert_eq!(ints, [16384, -32640, 128, 0, 0, 0, 0, 0]);
        assert_eq!((scale, sum), (1.0 / 16384.0, 16128));
        // Ties go to even.
        assert_eq!(words(&[1.0, 0.5 / 16384.0, 1.5 / 16384.0]).0[1..3], [0, 2]);
        assert_eq!(words(&[0.0; 32]), (vec![0; 32], 1.0 / 16384.0, 0));
        // The largest in each place of a block, which have to meet in one maximum and one sum.
        for place in 0..48 {
            let mut values = [0.5; 48];
            values[place] = -1.5;
            let (ints, scale, sum) = words(&values);
            assert_eq!((ints[place], ints[(place + 1) % 48]), (-24576, 8192), "{place}");
            assert_eq!((scale, sum), (1.0 / 16384.0, 24576 - 47 * 8192), "{place}");
        }
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let (ints, scale, sum) = words(&[1.0, bad]);
            assert!(ints == [0; 8] && scale.is_nan() && sum == 0);
        }
        let (_, scale, _) = words(&[f32::MIN_POSITIVE]);
        assert!(scale > 0.0 && scale.is_finite());
    }

    struct Both<'a>(&'a [&'a [f32]], &'a [Block]);

    impl Kernel for Both<'_> {
        type Output = [Vec<u32>; 2];

        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> [Vec<u32>; 2] {
            let Self(rows, blocks) = self;
            let words = |block: &Block| block.steps() * STEP_WORDS + TAIL;
            let len = rows.len() * blocks.iter().map(words).sum::<usize>();
            let mut pairs = vec![7; len];
            let mut each = vec![8; len];
            let put = |ints: &[u16], _: Block, j: usize, out: &mut [u32]| {
                let mut words = vec![0; ints.len() / 2];
                put_pairs(ints, &mut words);
                words.iter().enumerate().for_each(|(i, word)| out[i * rows.len() + j] = *word);
            };
            PackRows { rows, blocks, order: None, has_minima: false, panel: &mut each, put }.run(s);
            PackPairs { rows, blocks, order: None, has_minima: false, panel: &mut pairs }.run(s);
            [pairs, each]
        }
    }

    /// Whole tiles have the words that rows by themselves have, for blocks of any length.
    #[test]
    fn transposed_tiles_are_their_rows() {
        let mut blocks = Vec::new();
        let mut start = 0;
        let mut step = 0;
        for len in [32, 128, 8, 40, 1, 64, 96, 23, 128] {
            let block = Block { start, len, group: 0, step };
            (start, step) = (start + len, step + block.steps());
            blocks.push(block);
        }
        let data: Vec<Vec<f32>> = (0..crate::cpu::tile::MAX_ROWS)
            .map(|j| (0..start).map(|i| ((i * 37 + j * 91) % 113) as f32 - 50.0).collect())
            .collect();
        let rows: Vec<&[f32]> = data.iter().map(|row| &row[..]).collect();
        for isa in CpuIsa::ALL.into_iter().filter(|isa| isa.is_supported()) {
            for m in 1..=dispatch(isa, crate::cpu::tile::Shape).1 {
                let [pairs, each] = dispatch(isa, Both(&rows[..m], &blocks));
                assert_eq!(pairs, each, "{isa:?} {m}");
            }
        }
    }
}
