//! The memory of matrices that are packed for the CPU kernels.

use std::ops::Range;

use half::f16;

use crate::cpu::simd::{LANES, Lanes, Simd};

/// The memory of packed matrices.
#[derive(Clone, Debug)]
pub(crate) struct Packed {
    /// [E, panels, steps]: see [`QuantMatrix`](super::QuantMatrix).
    pub q: Vec<u8>,
    pub scales: Scales,
    /// [E, panels, groups, 16]; empty where all are the same.
    pub zeros: Vec<u8>,
    /// [E, panels, groups, 16]; empty where the scheme has none.
    pub minima: Vec<f32>,
}

/// Scales [E, panels, groups, 16].
#[derive(Clone, Debug)]
pub(crate) enum Scales {
    F16(Vec<f16>),
    F32(Vec<f32>),
}

/// A run of scales. Kernels ask for its type once in a block of columns, so that they are not compiled for each.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ScalesView<'a> {
    F16(&'a [f16]),
    F32(&'a [f32]),
}

impl Scales {
    /// These scales.
    pub(crate) fn range(&self, range: Range<usize>) -> ScalesView<'_> {
        match self {
            Self::F16(scales) => ScalesView::F16(&scales[range]),
            Self::F32(scales) => ScalesView::F32(&scales[range]),
        }
    }
}

impl ScalesView<'_> {
    /// Asks for the scales of a group of the panel that lies so many behind this one.
    #[inline(always)]
    pub(crate) fn ask<S: Simd>(self, s: S, group: usize, panels: usize) {
        match self {
            Self::F16(scales) => {
                s.prefetch(scales.as_ptr().wrapping_add(group * LANES + panels * scales.len()))
            }
            Self::F32(scales) => {
                s.prefetch(scales.as_ptr().wrapping_add(group * LANES + panels * scales.len()))
            }
        }
    }

    /// The scales of a group of a panel, [groups, 16].
    #[inline(always)]
    pub(crate) fn group<S: Simd>(self, s: S, group: usize) -> S::V {
        match self {
            Self::F16(scales) => f16::load_some(s, &scales[group * LANES..][..LANES]),
            Self::F32(scales) => f32::load_some(s, &scales[group * LANES..][..LANES]),
        }
    }
}

impl Default for Packed {
    fn default() -> Self {
        Self { q: Vec::new(), scales: Scales::F16(Vec::new()), zeros: Vec::new(), minima: Vec::new() }
    }
}

impl Packed {
    pub(super) fn bytes(&self) -> usize {
        let scales = match &self.scales {
            Scales::F16(scales) => size_of_val(&scales[..]),
            Scales::F32(scales) => size_of_val(&scales[..]),
        };
        self.q.len() + scales + self.zeros.len() + size_of_val(&self.minima[..])
    }
}
