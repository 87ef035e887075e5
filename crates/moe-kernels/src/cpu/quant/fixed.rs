//! Rows of x as 16-bit fixed point.
//!
//! A block of x with largest magnitude in 2^e .. 2^(e + 1) becomes integers round(x / 2^(e - 14)), |integer| < 2^15: values
//! of bf16 keep all their bits unless they lie more than 7 binades below the largest, and no error is above 2^-15 of it. A block
//! with an infinity or NaN becomes NaN.

use super::ints::{STEP_WORDS, TAIL};
use super::shift::is_in_range;
use crate::cpu::Kernel;
use crate::cpu::simd::{LANES, Lanes, Simd};
use crate::quant::{BLOCK, Block, STEP};

/// Values that are converted at a time in blocks that are longer. Of arrays of [`STEP`] the compiler then gathers the same place of
/// several into a vector.
const WIDE: usize = 32;

/// Rows of x as 16-bit fixed point: for each block its integers, its scale, and minus their sum. Returns whether all scales
/// are [in range](is_in_range).
pub(super) struct PackRows<'a, T, P> {
    pub rows: &'a [&'a [T]],
    pub blocks: &'a [Block],
    /// The column of x of each packed column.
    pub order: Option<&'a [u32]>,
    pub panel: &'a mut [u32],
    /// Puts the integers of a block of row j of the tile into the words of this block of all rows.
    pub put: P,
}

impl<T: Lanes, P: Fn(&[u16], Block, usize, &mut [u32])> Kernel for PackRows<'_, T, P> {
    type Output = bool;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> bool {
        let (m, mut all_in_range) = (self.rows.len(), true);
        let (mut values, mut ints) = ([0.0; BLOCK], [0; BLOCK]);
        for (j, row) in self.rows.iter().enumerate() {
            let mut at = 0;
            for block in self.blocks {
                let words = block.steps() * STEP_WORDS;
                let tail = convert(s, row, *block, self.order, &mut values, &mut ints);
                all_in_range &= is_in_range(tail[0]);
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

/// [`PackRows`] of a tile of pairs: word i of row j of m goes to place i * m + j of a block. The rows of a block are transposed,
/// which takes less than to put each word.
pub(super) struct PackPairs<'a, T> {
    pub rows: &'a [&'a [T]],
    pub blocks: &'a [Block],
    pub order: Option<&'a [u32]>,
    pub panel: &'a mut [u32],
}

impl<T: Lanes> Kernel for PackPairs<'_, T> {
    type Output = bool;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> bool {
        let (m, mut at, mut all_in_range) = (self.rows.len(), 0, true);
        let (mut values, mut ints, mut tails) = ([0.0; BLOCK], [[0; BLOCK]; LANES], [[0; LANES]; TAIL]);
        for block in self.blocks {
            for (j, (row, ints)) in self.rows.iter().zip(&mut ints).enumerate() {
                let tail = convert(s, row, *block, self.order, &mut values, ints);
                all_in_range &= is_in_range(tail[0]);
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
        for i in 0..LANES.min(words - first) {
            let out = &mut out[(first + i) * m..];
            match out.first_chunk_mut() {
                Some(out) => s.store_words(columns[i], out),
                None => {
                    let mut column = [0; LANES];
                    s.store_words(columns[i], &mut column);
                    let room = out.len().min(m);
                    out[..room].copy_from_slice(&column[..room]);
                }
            }
        }
    }
}

/// The integers of a block of a row, its scale and minus their sum; `values` is room for it.
#[inline(always)]
fn convert<S: Simd, T: Lanes>(
    s: S,
    row: &[T],
    block: Block,
    order: Option<&[u32]>,
    values: &mut [f32; BLOCK],
    ints: &mut [u16; BLOCK],
) -> [u32; TAIL] {
    let width = if block.len > WIDE { WIDE } else { STEP };
    let filled = block.len.next_multiple_of(width);
    let (values, ints) = (&mut values[..filled], &mut ints[..filled]);
    load(s, row, block, order, values);
    match width {
        WIDE => fixed::<WIDE>(values, ints),
        _ => fixed::<STEP>(values, ints),
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
    let whole = block.len.next_multiple_of(LANES);
    if let Some(rest) = values.get_mut(whole..).filter(|rest| !rest.is_empty()) {
        rest.fill(0.0);
    }
    let row = &row[block.start..][..block.len];
    for (values, row) in values.chunks_mut(LANES).zip(row.chunks(LANES)) {
        f32::store_some(s, T::load_some(s, row), values);
    }
}

/// The integers of a block, a multiple of W filled up with zeros. Returns its scale and minus their sum.
#[inline(always)]
fn fixed<const W: usize>(values: &[f32], ints: &mut [u16]) -> [u32; TAIL] {
    /// 1.5 * 2^23: a sum with it is rounded to an integer, which its low bits hold.
    const ROUND: f32 = 12_582_912.0;
    let values = values.as_chunks::<W>().0;
    let mut largest = [0; W];
    for values in values {
        for (most, value) in largest.iter_mut().zip(values) {
            *most = (value.to_bits() & 0x7fff_ffff).max(*most);
        }
    }
    let largest = largest.into_iter().fold(0, u32::max);
    // Biased exponents. Below 2^-112 the scale stays; the values are then too small to matter. Zeros have any.
    let exponent = if largest == 0 { 127 } else { (largest >> 23).max(15) };
    if exponent == 255 {
        ints.fill(0);
        return [f32::NAN.to_bits(), 0];
    }
    let inverse = f32::from_bits((268 - exponent) << 23);
    let mut sums = [0i32; W];
    for (ints, values) in ints.as_chunks_mut::<W>().0.iter_mut().zip(values) {
        for i in 0..W {
            let int = (values[i] * inverse + ROUND).to_bits().wrapping_sub(ROUND.to_bits()) as i32;
            ints[i] = int as u16;
            sums[i] += int;
        }
    }
    let sum: i32 = sums.into_iter().sum();
    [(exponent - 14) << 23, sum.wrapping_neg() as u32]
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

    fn words(values: &[f32]) -> (Vec<i16>, f32, i32) {
        let (mut block, mut ints) = ([0.0; WIDE], [1; WIDE]);
        block[..values.len()].copy_from_slice(values);
        let [scale, sum] = fixed::<WIDE>(&block, &mut ints);
        let mut few = [1; WIDE];
        assert_eq!((fixed::<STEP>(&block, &mut few), few), ([scale, sum], ints));
        (ints.map(|int| int as i16).to_vec(), f32::from_bits(scale), sum as i32)
    }

    #[test]
    fn a_block_is_fixed_point_around_its_largest_value() {
        let (ints, scale, sum) = words(&[1.0, -1.9921875, 0.0078125, 0.00001, 3e-5]);
        assert_eq!(ints[..8], [16384, -32640, 128, 0, 0, 0, 0, 0]);
        assert_eq!((scale, sum), (1.0 / 16384.0, 16128));
        // Ties go to even.
        assert_eq!(words(&[1.0, 0.5 / 16384.0, 1.5 / 16384.0]).0[1..3], [0, 2]);
        assert_eq!(words(&[]), (vec![0; WIDE], 1.0 / 16384.0, 0));
        for bad in [f32::NAN, f32::INFINITY] {
            let (ints, scale, sum) = words(&[1.0, bad]);
            assert!(ints == [0; WIDE] && scale.is_nan() && sum == 0);
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
            let (mut pairs, mut each) = (vec![7; len], vec![8; len]);
            let put = |ints: &[u16], _: Block, j: usize, out: &mut [u32]| {
                let mut words = vec![0; ints.len() / 2];
                put_pairs(ints, &mut words);
                words.iter().enumerate().for_each(|(i, word)| out[i * rows.len() + j] = *word);
            };
            PackRows { rows, blocks, order: None, panel: &mut each, put }.run(s);
            PackPairs { rows, blocks, order: None, panel: &mut pairs }.run(s);
            [pairs, each]
        }
    }

    /// Whole tiles have the words that rows by themselves have, for blocks of any length.
    #[test]
    fn transposed_tiles_are_their_rows() {
        let (mut blocks, mut start, mut step) = (Vec::new(), 0, 0);
        for len in [32, 128, 8, 40, 1, 64, 96, 23, 128] {
            let block = Block { start, len, group: 0, step };
            (start, step) = (start + len, step + block.steps());
            blocks.push(block);
        }
        let data: Vec<Vec<f32>> = (0..crate::cpu::tile::MAX_ROWS)
            .map(|j| (0..start).map(|i| ((i * 37 + j * 91) % 113) as f32 - 50.0).collect())
            .collect();
        let rows: Vec<&[f32]> = data.iter().map(|row| &row[..]).collect();
        for isa in crate::exec::CpuIsa::ALL.into_iter().filter(|isa| isa.is_supported()) {
            for m in 1..=crate::cpu::dispatch(isa, crate::cpu::tile::Shape).1 {
                let [pairs, each] = crate::cpu::dispatch(isa, Both(&rows[..m], &blocks));
                assert_eq!(pairs, each, "{isa:?} {m}");
            }
        }
    }
}
