//! The memory of matrices that are packed for the CPU kernels.

use half::f16;

use crate::codes::e4m3;
use crate::cpu::simd::{LANES, Lanes, Simd};
use crate::element::Float;
use crate::scheme::{Levels, QuantScheme};

/// The memory of packed matrices.
#[derive(Clone, Debug, Default)]
pub(crate) struct Packed {
    /// [E, panels, steps]: see [`QuantMatrix`](super::QuantMatrix).
    pub q: Vec<u8>,
    pub scales: Scales,
    /// [E, panels, groups, 16]; empty where all are the same.
    pub zeros: Vec<u8>,
    /// Empty where the scheme has none.
    pub minima: Scales,
}

/// Scales, or minima, [E, panels, groups, 16].
#[derive(Clone, Debug)]
pub(crate) enum Scales {
    F16(Vec<f16>),
    F32(Vec<f32>),
    /// Factors are integers with a sign.
    Levels(SharedScales<f16>),
    /// Factors are E4M3 floats.
    Fp8(SharedScales<f32>),
}

/// Scales in two levels.
#[derive(Clone, Debug)]
pub(crate) struct SharedScales<T> {
    /// [E, panels, groups, 16].
    pub factors: Vec<u8>,
    /// [E, panels, shared, 16].
    pub shared: Vec<T>,
    /// Groups that share a float, as an exponent of two.
    pub shift: u32,
}

/// The scales of a panel.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ScalesView<'a> {
    F16(&'a [f16]),
    F32(&'a [f32]),
    Levels(SharedView<'a, f16>),
    Fp8(SharedView<'a, f32>),
}

/// [`SharedScales`] of a panel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SharedView<'a, T> {
    factors: &'a [u8],
    shared: &'a [T],
    shift: u32,
}

/// How many scales a panel has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScaleCounts {
    /// Groups times lanes.
    pub groups: usize,
    /// Floats that groups share, times lanes.
    pub shared: usize,
}

impl ScaleCounts {
    /// Those of a panel with rows of `width` logical columns.
    pub(crate) fn new(scheme: QuantScheme, width: usize) -> Self {
        Self { groups: scheme.groups(width) * LANES, shared: scheme.shared_scales(width) * LANES }
    }
}

/// The exponent of the number of groups that share a scale, or of a larger number; 0 where none do.
pub(crate) fn shift(scheme: QuantScheme) -> u32 {
    match scheme.levels {
        Levels::One => 0,
        Levels::Two(groups) => groups.max(1).ilog2(),
        Levels::Fp8 => usize::BITS - 1,
    }
}

impl Default for Scales {
    fn default() -> Self {
        Self::F16(Vec::new())
    }
}

impl Scales {
    /// Whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        match self {
            Self::F16(scales) => scales.is_empty(),
            Self::F32(scales) => scales.is_empty(),
            Self::Levels(levels) => levels.factors.is_empty(),
            Self::Fp8(levels) => levels.factors.is_empty(),
        }
    }

    /// The scales of panel `i`, counted over all matrices.
    pub(crate) fn panel(&self, i: usize, len: ScaleCounts) -> ScalesView<'_> {
        let groups = i * len.groups..(i + 1) * len.groups;
        match self {
            Self::F16(scales) => ScalesView::F16(&scales[groups]),
            Self::F32(scales) => ScalesView::F32(&scales[groups]),
            Self::Levels(levels) => ScalesView::Levels(levels.panel(i, len)),
            Self::Fp8(levels) => ScalesView::Fp8(levels.panel(i, len)),
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::F16(scales) => size_of_val(&scales[..]),
            Self::F32(scales) => size_of_val(&scales[..]),
            Self::Levels(levels) => levels.bytes(),
            Self::Fp8(levels) => levels.bytes(),
        }
    }
}

impl<T: Float> SharedScales<T> {
    fn panel(&self, i: usize, len: ScaleCounts) -> SharedView<'_, T> {
        SharedView {
            factors: &self.factors[i * len.groups..(i + 1) * len.groups],
            shared: &self.shared[i * len.shared..(i + 1) * len.shared],
            shift: self.shift,
        }
    }

    fn bytes(&self) -> usize {
        self.factors.len() + size_of_val(&self.shared[..])
    }
}

impl<'a, T: Float> SharedView<'a, T> {
    /// Prefetches both levels of a group of the panel that comes `panels` after this one.
    #[inline(always)]
    fn ask_both<S: Simd>(self, s: S, group: usize, panels: usize) {
        s.prefetch(self.factors.as_ptr().wrapping_add(group * LANES + panels * self.factors.len()));
        let at = (group >> self.shift) * LANES;
        s.prefetch(self.shared.as_ptr().wrapping_add(at + panels * self.shared.len()));
    }

    /// The factors of a group, and what it shares.
    #[inline(always)]
    fn both(self, group: usize) -> (&'a [u8; LANES], &'a [T; LANES]) {
        (&self.factors.as_chunks().0[group], &self.shared.as_chunks().0[group >> self.shift])
    }

    /// Factor and shared float of one row.
    fn one(self, group: usize, lane: usize) -> (u8, f32) {
        let (factors, shared) = self.both(group);
        (factors[lane], shared[lane].widen())
    }
}

/// Scales of a panel, as kernels read them.
pub(crate) trait GroupScales<'a>: Copy {
    /// The scales, if they are of this type.
    fn of(scales: ScalesView<'a>) -> Option<Self>;
    /// Prefetches the scales of a group of the panel that comes `panels` after this one.
    fn ask<S: Simd>(self, s: S, group: usize, panels: usize);
    /// The scales of a group of a panel. Products of an integer and an f16 are exact, others are rounded to f32.
    fn group<S: Simd>(self, s: S, group: usize) -> S::V;
}

impl<'a> GroupScales<'a> for &'a [f16] {
    #[inline(always)]
    fn of(scales: ScalesView<'a>) -> Option<Self> {
        if let ScalesView::F16(scales) = scales { Some(scales) } else { None }
    }
    #[inline(always)]
    fn ask<S: Simd>(self, s: S, group: usize, panels: usize) {
        s.prefetch(self.as_ptr().wrapping_add(group * LANES + panels * self.len()));
    }
    #[inline(always)]
    fn group<S: Simd>(self, s: S, group: usize) -> S::V {
        s.load_f16(&self.as_chunks().0[group])
    }
}

impl<'a> GroupScales<'a> for SharedView<'a, f16> {
    #[inline(always)]
    fn of(scales: ScalesView<'a>) -> Option<Self> {
        if let ScalesView::Levels(levels) = scales { Some(levels) } else { None }
    }
    #[inline(always)]
    fn ask<S: Simd>(self, s: S, group: usize, panels: usize) {
        self.ask_both(s, group, panels);
    }
    #[inline(always)]
    fn group<S: Simd>(self, s: S, group: usize) -> S::V {
        let (factors, shared) = self.both(group);
        s.mul(s.load_f16(shared), s.ints(s.widen_signed(factors)))
    }
}

/// Scales of a type that is asked for in each block of columns, so that kernels are not compiled for each.
impl<'a> GroupScales<'a> for ScalesView<'a> {
    #[inline(always)]
    fn of(scales: ScalesView<'a>) -> Option<Self> {
        Some(scales)
    }
    #[inline(always)]
    fn ask<S: Simd>(self, s: S, group: usize, panels: usize) {
        match self {
            Self::F16(scales) => scales.ask(s, group, panels),
            Self::F32(scales) => {
                s.prefetch(scales.as_ptr().wrapping_add(group * LANES + panels * scales.len()))
            }
            Self::Levels(levels) => levels.ask(s, group, panels),
            Self::Fp8(levels) => levels.ask_both(s, group, panels),
        }
    }
    #[inline(always)]
    fn group<S: Simd>(self, s: S, group: usize) -> S::V {
        match self {
            Self::F16(scales) => scales.group(s, group),
            Self::F32(scales) => f32::load_some(s, &scales[group * LANES..][..LANES]),
            Self::Levels(levels) => levels.group(s, group),
            Self::Fp8(levels) => {
                let (factors, shared) = levels.both(group);
                s.mul(s.load(shared), s.e4m3(s.widen_bytes(factors)))
            }
        }
    }
}

impl ScalesView<'_> {
    /// The scale of one row.
    pub(crate) fn one(self, group: usize, lane: usize) -> f32 {
        let at = group * LANES + lane;
        match self {
            Self::F16(scales) => scales[at].to_f32(),
            Self::F32(scales) => scales[at],
            Self::Levels(levels) => {
                let (factor, shared) = levels.one(group, lane);
                shared * f32::from(factor.cast_signed())
            }
            Self::Fp8(levels) => {
                let (factor, shared) = levels.one(group, lane);
                shared * e4m3(factor)
            }
        }
    }
}

impl Packed {
    pub(super) fn bytes(&self) -> usize {
        self.q.len() + self.scales.bytes() + self.zeros.len() + self.minima.bytes()
    }
}
