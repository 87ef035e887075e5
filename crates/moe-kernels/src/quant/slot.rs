//! One expert of a quantised pack as bytes: its codes, its scales as f32, its zero points and its minima.
//!
//! A pack keeps its scales as f16 where that is exact for all of its experts, so two packs of the same model may keep
//! the scales of one expert differently. Bytes hold f32, and a pack of f16 into which an expert comes that needs f32
//! keeps f32 from then on. Both mean the same numbers.

use std::ops::Range;

use candle_core::{Result, bail};
use half::f16;

use super::QuantMatrix;
use super::packed::{Scales, ScalesView};
use crate::cpu::simd::LANES;

/// Why an expert cannot take the place of another one.
pub(crate) const ACT_ORDER: &str = "experts with act-order have an order of columns of their own and cannot move; requantise without it \
                                    (desc_act)";

impl QuantMatrix {
    /// Bytes of one expert.
    ///
    /// # Errors
    /// Experts each with an order of columns of its own (act-order): they do not take each other's place.
    pub(crate) fn expert_len(&self) -> Result<usize> {
        if self.parts.iter().any(|part| part.columns.x.is_some()) {
            bail!("an expert's weights: {ACT_ORDER}")
        }
        let scales = self.panels() * self.groups() * LANES;
        let zeros = if self.packed.zeros.is_empty() { 0 } else { scales };
        let minima = if self.packed.minima.is_empty() { 0 } else { 4 * scales };
        Ok(self.parts.first().map_or(0, |_| self.quants_of(0).len()) + 4 * scales + zeros + minima)
    }

    /// The bytes of `expert`.
    ///
    /// # Errors
    /// The errors of [`expert_len`](Self::expert_len).
    pub(crate) fn expert_bytes(&self, expert: usize) -> Result<Vec<u8>> {
        let mut bytes = Vec::with_capacity(self.expert_len()?);
        bytes.extend_from_slice(&self.packed.q[self.quants_of(expert)]);
        let scales = self.scales_of(expert);
        match self.packed.scales.range(scales.clone()) {
            ScalesView::F16(scales) => scales.iter().for_each(|s| bytes.extend(s.to_f32().to_le_bytes())),
            ScalesView::F32(scales) => scales.iter().for_each(|s| bytes.extend(s.to_le_bytes())),
        }
        bytes.extend_from_slice(self.packed.zeros.get(scales.clone()).unwrap_or_default());
        let minima = self.packed.minima.get(scales).unwrap_or_default();
        minima.iter().for_each(|minimum| bytes.extend(minimum.to_le_bytes()));
        Ok(bytes)
    }

    /// Overwrites `expert`.
    ///
    /// # Errors
    /// The errors of [`expert_len`](Self::expert_len); another number of bytes. Then nothing has changed.
    pub(crate) fn write_expert(&mut self, expert: usize, bytes: &[u8]) -> Result<()> {
        let len = self.expert_len()?;
        let q = self.quants_of(expert);
        let scales = self.scales_of(expert);
        if bytes.len() != len {
            bail!("an expert's weights: expected {len} bytes, got {}", bytes.len())
        }
        let (quants, rest) = bytes.split_at(q.len());
        let (new, rest) = rest.split_at(4 * scales.len());
        let (zeros, minima) = rest.split_at(if self.packed.zeros.is_empty() { 0 } else { scales.len() });
        let floats = |bytes: &[u8]| -> Vec<f32> {
            bytes.as_chunks::<4>().0.iter().map(|&s| f32::from_le_bytes(s)).collect()
        };
        let new = floats(new);
        let minima = floats(minima);
        let exact = |s: &f32| f16::from_f32(*s).to_f32().to_bits() == s.to_bits();
        if let Scales::F16(narrow) = &self.packed.scales
            && !new.iter().all(exact)
        {
            self.packed.scales = Scales::F32(narrow.iter().map(|s| s.to_f32()).collect());
        }
        match &mut self.packed.scales {
            Scales::F16(all) => {
                all[scales.clone()].iter_mut().zip(&new).for_each(|(s, x)| *s = f16::from_f32(*x))
            }
            Scales::F32(all) => all[scales.clone()].copy_from_slice(&new),
        }
        self.packed.q[q].copy_from_slice(quants);
        if let Some(all) = self.packed.zeros.get_mut(scales.clone()) {
            all.copy_from_slice(zeros);
        }
        if let Some(all) = self.packed.minima.get_mut(scales) {
            all.copy_from_slice(&minima);
        }
        Ok(())
    }

    fn quants_of(&self, expert: usize) -> Range<usize> {
        let part = &self.parts[expert];
        part.first..part.first + part.columns.steps() * self.step_bytes() * self.panels()
    }

    /// The range of scales of `expert`, and of zero points where there are some.
    fn scales_of(&self, expert: usize) -> Range<usize> {
        let len = self.panels() * self.groups() * LANES;
        expert * len..(expert + 1) * len
    }
}
