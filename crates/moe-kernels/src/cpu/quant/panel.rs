//! Panels of integer weights, as every way to multiply them reads them.

use std::ops::Range;

use super::quants::Quants;
use crate::codes::IntBook;
use crate::cpu::simd::{LANES, Simd};
use crate::cpu::tile::CACHE_LINE;
use crate::exec::CpuIsa;
use crate::quant::{GroupScales, QuantMatrix, STEP, ScalesView};
use crate::scheme::{Codes, QuantScheme};

/// Words that follow the integers of a block: its scale, and minus the sum of its integers. With minima, which
/// multiply that sum, the second is the product of both, an f32.
pub(super) const TAIL: usize = 2;

/// Words of integers in a step.
pub(super) const STEP_WORDS: usize = STEP / 2;

/// Products with integer weights; see [`super::ints`].
pub(super) struct Ints<'a> {
    pub isa: CpuIsa,
    pub w: &'a QuantMatrix,
    pub segments: Range<usize>,
    /// Whether other matrices share its rows of x, which then are packed in tiles of one size.
    pub is_stacked: bool,
}

impl Ints<'_> {
    /// A panel of matrix `e`.
    #[inline]
    pub(super) fn panel(&self, e: usize, panel: usize) -> Panel<'_> {
        let w = self.w;
        Panel {
            q: w.quants(e, panel),
            scales: w.panel_scales(e, panel),
            zeros: w.panel_zeros(e, panel),
            minima: w.panel_minima(e, panel),
            middle: middle(w.scheme),
        }
    }
}

/// The integer that stands for 0 in groups without zero points of their own.
fn middle(scheme: QuantScheme) -> u32 {
    u32::from(match scheme.codes {
        Codes::E2m1 => IntBook::E2M1.middle,
        Codes::Iq4Nl => IntBook::IQ4_NL.middle,
        _ => scheme.middle(),
    })
}

/// Sixteen rows of w.
#[derive(Clone, Copy)]
pub(super) struct Panel<'a> {
    pub q: &'a [u8],
    pub scales: ScalesView<'a>,
    /// [groups, 16], or empty.
    zeros: &'a [u8],
    pub minima: Option<ScalesView<'a>>,
    middle: u32,
}

impl Panel<'_> {
    /// The zero points of a group.
    #[inline(always)]
    pub(super) fn zero<S: Simd>(&self, s: S, group: usize) -> S::Raw {
        match self.zeros.get(group * LANES..).and_then(|z| z.first_chunk()) {
            Some(zeros) => s.widen_bytes(zeros),
            None => s.splat_word(self.middle),
        }
    }

    /// The zero points of a group times an integer.
    #[inline(always)]
    pub(super) fn zero_times<S: Simd>(&self, s: S, group: usize, x: u32) -> S::Raw {
        match self.zeros.is_empty() {
            true => s.splat_word(self.middle.wrapping_mul(x)),
            false => s.mul_words(self.zero(s, group), s.splat_word(x)),
        }
    }

    /// The scales of a group of integers.
    #[inline(always)]
    pub(super) fn scale<S: Simd, Q: Quants>(&self, s: S, group: usize) -> S::V {
        let scale = self.scales.group(s, group);
        if Q::UNIT == 1.0 { scale } else { s.mul(scale, s.splat(Q::UNIT)) }
    }
}

/// Returns step `i` of a block and prefetches what is `ahead` bytes further on.
#[inline(always)]
pub(super) fn step<S: Simd, Q: Quants>(s: S, q: &[u8], i: usize, ahead: usize) -> &[u8] {
    let step = &q[i * Q::STEP_BYTES..][..Q::STEP_BYTES];
    for line in (0..Q::STEP_BYTES).step_by(CACHE_LINE) {
        s.prefetch(step.as_ptr().wrapping_add(ahead + line));
    }
    step
}
