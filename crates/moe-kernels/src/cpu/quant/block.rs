//! A tile of a few rows of x with weights that are unpacked in registers, and the integer sums of one of its blocks.

use std::marker::PhantomData;
use std::ops::Range;

use super::one_row;
use super::panel::{Panel, STEP_WORDS, step};
use super::quants::Quants;
use crate::cpu::simd::Simd;
use crate::cpu::tile::UnitSums;
use crate::quant::{Block, Columns};

/// How many bytes after those in use weights are asked for. A thread that waits for nothing else takes this much in the
/// time in which memory answers.
const AHEAD: usize = 8192;

/// A tile of rows of x times one or two panels.
pub(super) struct Tile<'a, Q> {
    pub panels: [Panel<'a>; 2],
    /// Panels that are there.
    pub count: usize,
    /// The first one's place in the unit.
    pub vector: usize,
    /// Panels from one to that which is likely to be multiplied after it.
    pub next: usize,
    pub columns: &'a Columns,
    pub segments: Range<usize>,
    pub x: &'a [u32],
    pub out: &'a mut [UnitSums],
    pub quants: PhantomData<Q>,
}

/// The weights of a block of columns, and how many bytes after them weights are asked for.
#[inline(always)]
pub(super) fn weights<'a, Q: Quants, const N: usize>(
    t: &Tile<'a, Q>,
    block: Block,
) -> ([&'a [u8]; N], usize) {
    let at = block.step * Q::STEP_BYTES;
    let bytes = block.steps() * Q::STEP_BYTES;
    let mut q = [&t.panels[0].q[at..][..bytes]; N];
    for n in 1..N {
        q[n] = &t.panels[n].q[at..][..bytes];
    }
    // Panels side by side share the distance.
    let ahead = AHEAD / N;
    if t.next == 1 {
        return (q, ahead);
    }
    let len = t.panels[0].q.len();
    (q, ahead + (at + ahead) / len * (t.next - 1) * len)
}

/// Adds the integer sums of a block.
#[inline(always)]
pub(super) fn integer_sums<S: Simd, Q: Quants, const M: usize, const N: usize>(
    s: S,
    q: &[&[u8]; N],
    ints: &[u32],
    ahead: usize,
    acc: &mut [[S::Raw; N]; M],
) {
    let x = ints.as_chunks::<M>().0.as_chunks::<STEP_WORDS>().0;
    if M == 1 && one_row::fits::<S, Q>() {
        return one_row::add::<S, Q, M, N>(s, q, x, ahead, acc);
    }
    // A few sums in wide registers would wait for each other: odd pairs have sums of their own.
    let apart = S::TILE_VECTORS == 2 && M <= 2;
    let mut odd = [[s.splat_word(0); N]; M];
    for (i, x) in x.iter().enumerate() {
        let mut w = [[s.splat_word(0); STEP_WORDS]; N];
        for n in 0..N {
            w[n] = Q::pairs(s, step::<S, Q>(s, q[n], i, ahead));
        }
        for j in 0..STEP_WORDS {
            let acc = if apart && j % 2 == 1 { &mut odd } else { &mut *acc };
            for m in 0..M {
                for n in 0..N {
                    acc[m][n] = s.dot_i16(acc[m][n], x[j][m], w[n][j]);
                }
            }
        }
    }
    if apart {
        for m in 0..M {
            for n in 0..N {
                acc[m][n] = s.add_words(acc[m][n], odd[m][n]);
            }
        }
    }
}
