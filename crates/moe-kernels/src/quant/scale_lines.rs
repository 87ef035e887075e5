//! Scales, or minima, of panels that are being packed.

use half::f16;

use super::TwoLevels;
use super::packed::{ScaleCounts, Scales, SharedScales, shift};
use crate::cpu::simd::LANES;
use crate::element::Float;
use crate::scheme::{Levels, QuantScheme};

/// The scales of all panels: floats of C, or factors and what they share.
pub(super) struct Buffer<C> {
    floats: Vec<C>,
    factors: Vec<u8>,
    shared: Vec<f32>,
}

/// Those of one panel, [groups, 16] and [shared, 16].
pub(super) struct Lines<'a, C> {
    floats: &'a mut [C],
    factors: &'a mut [u8],
    shared: &'a mut [f32],
}

/// Those of rows of which one, for a lane, is put.
pub(super) struct RowScales<'a> {
    /// [count, groups].
    pub floats: &'a [f32],
    pub levels: &'a TwoLevels,
    pub lane: usize,
    pub count: usize,
}

impl<C: Float> Buffer<C> {
    /// Zeros for `panels` panels.
    pub(super) fn new(scheme: QuantScheme, panels: usize, len: ScaleCounts) -> Self {
        let floats = vec![C::default(); if scheme.levels == Levels::One { panels * len.groups } else { 0 }];
        let factors = vec![0; if floats.is_empty() { panels * len.groups } else { 0 }];
        Self { floats, factors, shared: vec![0.0; panels * len.shared] }
    }

    /// Panel by panel.
    pub(super) fn panels(&mut self, len: ScaleCounts) -> Panels<'_, C> {
        Panels { floats: &mut self.floats, factors: &mut self.factors, shared: &mut self.shared, len }
    }

    /// As a pack holds them.
    pub(super) fn held(self, scheme: QuantScheme, held: fn(Vec<C>) -> Scales) -> Scales {
        let Self { floats, factors, shared } = self;
        let shift = shift(scheme);
        match scheme.levels {
            Levels::One => held(floats),
            Levels::Two(_) => {
                let shared = shared.into_iter().map(f16::from_f32).collect();
                Scales::Levels(SharedScales { factors, shared, shift })
            }
            Levels::Fp8 => Scales::Fp8(SharedScales { factors, shared, shift }),
        }
    }
}

/// What is left of a buffer.
pub(super) struct Panels<'a, C> {
    floats: &'a mut [C],
    factors: &'a mut [u8],
    shared: &'a mut [f32],
    len: ScaleCounts,
}

impl<'a, C> Panels<'a, C> {
    /// The lines of the next panel, or empty lines after the last one.
    pub(super) fn next(&mut self) -> Lines<'a, C> {
        Lines {
            floats: take(&mut self.floats, self.len.groups),
            factors: take(&mut self.factors, self.len.groups),
            shared: take(&mut self.shared, self.len.shared),
        }
    }
}

/// The first values, which leave the slice; as many as there are.
fn take<'a, T>(from: &mut &'a mut [T], len: usize) -> &'a mut [T] {
    let all = std::mem::take(from);
    let (first, rest) = all.split_at_mut(len.min(all.len()));
    *from = rest;
    first
}

impl<C: Float> Lines<'_, C> {
    /// Puts a row into its lane; whether C holds its scales.
    pub(super) fn put(&mut self, row: &RowScales) -> bool {
        put_lane(row.lane, self.factors, row.of(&row.levels.factor));
        put_lane(row.lane, self.shared, row.of(&row.levels.shared));
        if self.floats.is_empty() {
            return true;
        }
        let scales = row.of(row.floats);
        for (to, scale) in self.floats[row.lane..].iter_mut().step_by(LANES).zip(scales) {
            *to = C::narrow(*scale);
        }
        let kept = self.floats[row.lane..].iter().step_by(LANES);
        kept.zip(scales).all(|(kept, scale)| kept.widen() == *scale || scale.is_nan())
    }
}

impl RowScales<'_> {
    /// Where the values of the row are among the values of all rows.
    fn of<'a, T>(&self, all: &'a [T]) -> &'a [T] {
        let len = all.len() / self.count.max(1);
        &all[self.lane * len..(self.lane + 1) * len]
    }
}

fn put_lane<T: Copy>(lane: usize, to: &mut [T], row: &[T]) {
    for (to, value) in to.iter_mut().skip(lane).step_by(LANES).zip(row) {
        *to = *value;
    }
}
