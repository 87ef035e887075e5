//! One row of x times integers of a few bits, the product of a decode step of one sequence.
//!
//! Both forms give the exact integer sums of a block, so they have the same bits.

use super::panel::{STEP_WORDS, step};
use super::quants::{Nibbles, Quants, words};
use crate::cpu::simd::Simd;

/// Steps of blocks of 16, 32, 64 and 128 columns.
const SHORTEST: usize = 2;
const SHORT: usize = 4;
const MIDDLE: usize = 8;
const LONG: usize = 16;

/// Adds the integer sums of a block of weights and prefetches the weights `ahead` bytes further on. Where a path has dot
/// products of bytes, x is packed by [`put_bytes`], else in pairs. [`fits`] says for which integers.
#[inline(always)]
pub(super) fn add<S: Simd, Q: Quants, const M: usize, const N: usize>(
    s: S,
    q: &[&[u8]; N],
    x: &[[[u32; M]; STEP_WORDS]],
    ahead: usize,
    acc: &mut [[S::Raw; N]; M],
) {
    // The usual lengths as constants, so that the loops over steps are unrolled.
    if let Ok(x) = <&[_; SHORTEST]>::try_from(x) {
        add_steps::<S, Q, M, N>(s, q, x, ahead, acc);
    } else if let Ok(x) = <&[_; SHORT]>::try_from(x) {
        add_steps::<S, Q, M, N>(s, q, x, ahead, acc);
    } else if let Ok(x) = <&[_; MIDDLE]>::try_from(x) {
        add_steps::<S, Q, M, N>(s, q, x, ahead, acc);
    } else if let Ok(x) = <&[_; LONG]>::try_from(x) {
        add_steps::<S, Q, M, N>(s, q, x, ahead, acc);
    } else {
        add_steps::<S, Q, M, N>(s, q, x, ahead, acc);
    }
}

#[inline(always)]
fn add_steps<S: Simd, Q: Quants, const M: usize, const N: usize>(
    s: S,
    q: &[&[u8]; N],
    x: &[[[u32; M]; STEP_WORDS]],
    ahead: usize,
    acc: &mut [[S::Raw; N]; M],
) {
    match S::HAS_BYTE_DOTS {
        true => in_bytes::<S, Q, M, N>(s, q, x, ahead, acc),
        false => in_place::<S, M, N>(s, q, x, ahead, acc),
    }
}

/// Puts the integers of a block as bytes, in the order of [`Quants::bytes`] for 4 to 6 bits. An integer is 256 times a
/// signed byte plus an unsigned one: the words of a step are the signed bytes of both fours, then their unsigned ones.
#[inline(always)]
pub(super) fn put_bytes(ints: &[u16], out: &mut [u32]) {
    const LOW: u64 = 0x00ff_00ff_00ff_00ff;
    let four = |ints: &[u16; 4]| ints.iter().rev().fold(0, |word, int| word << 16 | u64::from(*int));
    for (ints, out) in ints.as_chunks().0.as_chunks::<2>().0.iter().zip(out.as_chunks_mut::<STEP_WORDS>().0) {
        let first = four(&ints[0]);
        let second = four(&ints[1]);
        let (signed, unsigned) = (first >> 8 & LOW | second & !LOW, first & LOW | (second & LOW) << 8);
        *out = [signed as u32, (signed >> 32) as u32, unsigned as u32, (unsigned >> 32) as u32];
    }
}

/// Whether one row of x is multiplied here: by bytes where both are there, else nibbles.
#[inline(always)]
pub(super) fn fits<S: Simd, Q: Quants>() -> bool {
    if S::HAS_BYTE_DOTS { Q::SMALL } else { Q::NIBBLES }
}

/// By dot products of bytes: of nibbles three instructions to unpack 128 weights, and four to multiply them.
#[inline(always)]
fn in_bytes<S: Simd, Q: Quants, const M: usize, const N: usize>(
    s: S,
    q: &[&[u8]; N],
    x: &[[[u32; M]; STEP_WORDS]],
    ahead: usize,
    acc: &mut [[S::Raw; N]; M],
) {
    // The sums of each word of x, apart so that they do not wait for each other.
    let mut sums = [[s.splat_word(0); N]; STEP_WORDS];
    for (i, x) in x.iter().enumerate() {
        let mut bytes = [s.splat_word(x[0][0]); STEP_WORDS];
        for j in 1..STEP_WORDS {
            bytes[j] = s.splat_word(x[j][0]);
        }
        for n in 0..N {
            let [low, high] = Q::bytes(s, step::<S, Q>(s, q[n], i, ahead));
            sums[0][n] = s.dot_bytes(sums[0][n], low, bytes[0]);
            sums[1][n] = s.dot_bytes(sums[1][n], high, bytes[1]);
            sums[2][n] = s.dot_bytes(sums[2][n], bytes[2], low);
            sums[3][n] = s.dot_bytes(sums[3][n], bytes[3], high);
        }
    }
    for n in 0..N {
        let signed = s.shift_left(s.add_words(sums[0][n], sums[1][n]), 8);
        let sum = s.add_words(signed, s.add_words(sums[2][n], sums[3][n]));
        acc[0][n] = s.add_words(acc[0][n], sum);
    }
}

/// By dot products of pairs of 16 bits. The second and third of the four nibbles of 16 bits are multiplied where they
/// stand, 16 and 256 times too large, and summed apart: four instructions to unpack in the place of six. On wide
/// registers the fourth nibble has sums of its own, because the sums of one would wait for each other. The sums are
/// divided exactly, before those of the third nibble, 256 * 15 * 32767 for a column, can pass 2^31.
#[inline(always)]
fn in_place<S: Simd, const M: usize, const N: usize>(
    s: S,
    q: &[&[u8]; N],
    x: &[[[u32; M]; STEP_WORDS]],
    ahead: usize,
    acc: &mut [[S::Raw; N]; M],
) {
    /// Steps with two columns of each place.
    const STEPS: usize = 8;
    const { assert!(2 * STEPS * 256 * 15 * 32767 < 1 << 31) };
    let apart = S::TILE_VECTORS == 2;
    let mut second = [[s.splat_word(0); N]; M];
    let mut fourth = [[s.splat_word(0); N]; M];
    for (at, x) in x.chunks(STEPS).enumerate() {
        let mut third = [[s.splat_word(0); N]; M];
        for (i, x) in x.iter().enumerate() {
            for n in 0..N {
                let w = s.nibbles_in_place(words(s, step::<S, Nibbles>(s, q[n], at * STEPS + i, ahead)));
                for m in 0..M {
                    acc[m][n] = s.dot_i16(acc[m][n], x[0][m], w[0]);
                    second[m][n] = s.dot_i16(second[m][n], x[1][m], w[1]);
                    third[m][n] = s.dot_i16(third[m][n], x[2][m], w[2]);
                    let last = if apart { &mut fourth } else { &mut *acc };
                    last[m][n] = s.dot_i16(last[m][n], x[3][m], w[3]);
                }
            }
        }
        for m in 0..M {
            for n in 0..N {
                second[m][n] = s.add_words(second[m][n], s.sixteenth(third[m][n]));
            }
        }
    }
    for m in 0..M {
        for n in 0..N {
            acc[m][n] = s.add_words(acc[m][n], s.sixteenth(second[m][n]));
            if apart {
                acc[m][n] = s.add_words(acc[m][n], fourth[m][n]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{Kernel, dispatch_ints, simd::LANES};
    use crate::exec::CpuIsa;

    struct InBytes<'a>(&'a [u8], &'a [u16]);

    impl Kernel for InBytes<'_> {
        type Output = [u32; LANES];

        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> [u32; LANES] {
            let mut x = vec![[[0; 1]; STEP_WORDS]; self.1.len() / 8];
            put_bytes(self.1, x.as_flattened_mut().as_flattened_mut());
            let mut acc = [[s.splat_word(5)]];
            in_bytes::<S, Nibbles, 1, 1>(s, &[self.0], &x, 0, &mut acc);
            let mut sums = [0; LANES];
            s.store_words(acc[0][0], &mut sums);
            sums
        }
    }

    /// The largest integers and weights saturate nothing, on any path.
    #[test]
    fn sums_by_bytes_are_those_of_the_integers() {
        for (seed, steps) in [(1u64, 1), (2, 4), (3, 7), (4, 16)] {
            let mut state = seed;
            let mut random = || {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (state >> 33) as u32
            };
            let extreme =
                |v: u32| [32767, -32767, 0, 255, -256, (v % 65535) as i32 - 32767][v as usize % 6] as i16;
            let x: Vec<i16> = (0..8 * steps).map(|_| extreme(random())).collect();
            let q: Vec<u8> = (0..64 * steps).map(|_| [0xff, random() as u8][random() as usize % 2]).collect();
            let want: Vec<u32> = (0..LANES)
                .map(|lane| {
                    let word = |step: usize| &q[64 * step + 4 * lane..][..4];
                    // Column 2i at bits 4i, column 2i + 1 at bits 16 + 4i.
                    let weight = |c: usize| {
                        let bits = 4 * (c % 8 / 2) + 16 * (c % 2);
                        u32::from_le_bytes(word(c / 8).try_into().unwrap()) >> bits & 15
                    };
                    let sum: i32 = x.iter().enumerate().map(|(c, x)| i32::from(*x) * weight(c) as i32).sum();
                    sum as u32 + 5
                })
                .collect();
            for isa in CpuIsa::ALL.into_iter().filter(|isa| isa.is_supported()) {
                let x: Vec<u16> = x.iter().map(|x| *x as u16).collect();
                assert_eq!(dispatch_ints(isa, InBytes(&q, &x)).to_vec(), want, "{isa:?} {steps}");
            }
        }
    }
}
