//! One row of x times one or two panels, with all sums in registers.
//!
//! A block of 32 columns is 256 bytes of weights, for which memory takes about as long as for thirty instructions. So the
//! type of the scales is asked for once in a panel here, where tiles of more rows ask once in a block. The order of
//! additions is that of [`super::ints`].

use half::f16;

use super::block::{Tile, integer_sums, weights};
use super::panel::{STEP_WORDS, TAIL};
use super::quants::Quants;
use crate::cpu::simd::{LANES, Simd};
use crate::quant::{GroupScales, ScalesView, SharedView};

/// The sums of a tile of one row.
#[inline(always)]
pub(super) fn tile<S: Simd, Q: Quants, const N: usize>(s: S, t: Tile<Q>) {
    match t.panels[0].scales {
        ScalesView::F16(_) => sums::<S, Q, &[f16], N>(s, t),
        ScalesView::Levels(_) => sums::<S, Q, SharedView<f16>, N>(s, t),
        _ => sums::<S, Q, ScalesView, N>(s, t),
    }
}

/// [`tile`] with scales, and minima, of type L.
#[inline(always)]
fn sums<'a, S: Simd, Q: Quants, L: GroupScales<'a>, const N: usize>(s: S, t: Tile<'a, Q>) {
    let [first, second] = t.panels;
    let (Some(a), Some(b)) = (L::of(first.scales), L::of(second.scales)) else { return };
    let scales = [a, b];
    let minima = match (first.minima.and_then(L::of), second.minima.and_then(L::of)) {
        (Some(a), Some(b)) => Some([a, b]),
        _ => None,
    };
    let mut x = t.x;
    for (i, range) in t.columns.segments[t.segments.clone()].iter().enumerate() {
        let mut sums = [s.splat(0.0); N];
        for block in &t.columns.blocks[range.clone()] {
            let (ints, rest) = x.split_at(block.steps() * STEP_WORDS);
            let (tail, rest) = rest.split_at(TAIL);
            x = rest;
            let mut acc = [[s.splat_word(0); N]];
            if minima.is_none() {
                for n in 0..N {
                    acc[0][n] = t.panels[n].zero_times(s, block.group, tail[1]);
                }
            }
            let (q, ahead) = weights::<Q, N>(&t, *block);
            integer_sums::<S, Q, 1, N>(s, &q, ints, ahead, &mut acc);
            let x_scale = s.splat(f32::from_bits(tail[0]));
            for n in 0..N {
                scales[n].ask(s, block.group, t.next);
                let scale = scales[n].group(s, block.group);
                let scale = if Q::UNIT == 1.0 { scale } else { s.mul(scale, s.splat(Q::UNIT)) };
                sums[n] = s.fma(s.ints(acc[0][n]), s.mul(x_scale, scale), sums[n]);
            }
            let Some(minima) = minima else { continue };
            let minus_sum = s.splat(f32::from_bits(tail[1]));
            for n in 0..N {
                minima[n].ask(s, block.group, t.next);
                sums[n] = s.fma(minus_sum, minima[n].group(s, block.group), sums[n]);
            }
        }
        let out: &mut [[f32; LANES]] = &mut t.out[0].as_chunks_mut().0[t.vector..];
        for n in 0..N {
            let sum = if i == 0 { sums[n] } else { s.add(s.load(&out[n]), sums[n]) };
            s.store(sum, &mut out[n]);
        }
    }
}
