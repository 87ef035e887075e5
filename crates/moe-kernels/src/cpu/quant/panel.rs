//! Panels of integer weights, as every way to multiply them reads them.

use std::ops::Range;

use super::quants::Quants;
use crate::cpu::simd::{LANES, Simd};
use crate::cpu::tile::CACHE_LINE;
use crate::exec::CpuIsa;
use crate::quant::{QuantMatrix, STEP, ScalesView};

/// Words that follow the integers of a block: its scale, and minus the sum of its integers.
pub(super) const TAIL: usize = 2;

/// Words of integers in a step.
pub(super) const STEP_WORDS: usize = STEP / 2;

/// Products with integer weights; see [`super::ints`].
pub(super) struct Ints<'a> {
    pub isa: CpuIsa,
    pub w: &'a QuantMatrix,
    pub segments: Range<usize>,
}

impl Ints<'_> {
    /// A panel of matrix `e`.
    #[inline]
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

/// Step `i` of a block; asks for what lies `ahead` bytes behind it.
#[inline(always)]
pub(super) fn step<S: Simd, Q: Quants>(s: S, q: &[u8], i: usize, ahead: usize) -> &[u8] {
    let step = &q[i * Q::STEP_BYTES..][..Q::STEP_BYTES];
    for line in (0..Q::STEP_BYTES).step_by(CACHE_LINE) {
        s.prefetch(step.as_ptr().wrapping_add(ahead + line));
    }
    step
}
