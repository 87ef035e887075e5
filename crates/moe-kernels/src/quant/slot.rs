//! One expert of a quantised pack as bytes: its codes, its scales, its zero points and its minima.
//!
//! A pack keeps its scales as f16 where that is exact for all of its experts, so two packs of the same model may keep
//! the scales of one expert differently. Bytes hold f32, and a pack of f16 into which an expert comes that needs f32
//! keeps f32 from then on. Both mean the same numbers. Scales in two levels are bytes as they are. Minima are as
//! scales.

use std::ops::Range;

use candle_core::{Result, bail};
use half::f16;

use super::QuantMatrix;
use super::packed::{ScaleCounts, Scales, SharedScales};
use crate::element::Float;

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
        let counts = self.counts_of_expert();
        let zeros = if self.packed.zeros.is_empty() { 0 } else { counts.groups };
        let scales = self.packed.scales.expert_len(counts) + self.packed.minima.expert_len(counts);
        Ok(self.parts.first().map_or(0, |_| self.quants_of(0).len()) + scales + zeros)
    }

    /// The bytes of `expert`.
    ///
    /// # Errors
    /// The errors of [`expert_len`](Self::expert_len).
    pub(crate) fn expert_bytes(&self, expert: usize) -> Result<Vec<u8>> {
        let counts = self.counts_of_expert();
        let mut bytes = Vec::with_capacity(self.expert_len()?);
        bytes.extend_from_slice(&self.packed.q[self.quants_of(expert)]);
        self.packed.scales.read_expert(expert, counts, &mut bytes);
        let zeros = expert * counts.groups..(expert + 1) * counts.groups;
        bytes.extend_from_slice(self.packed.zeros.get(zeros).unwrap_or_default());
        self.packed.minima.read_expert(expert, counts, &mut bytes);
        Ok(bytes)
    }

    /// Overwrites `expert`.
    ///
    /// # Errors
    /// The errors of [`expert_len`](Self::expert_len); another number of bytes. Then nothing has changed.
    pub(crate) fn write_expert(&mut self, expert: usize, bytes: &[u8]) -> Result<()> {
        let len = self.expert_len()?;
        if bytes.len() != len {
            bail!("an expert's weights: expected {len} bytes, got {}", bytes.len())
        }
        let counts = self.counts_of_expert();
        let q = self.quants_of(expert);
        let (quants, rest) = bytes.split_at(q.len());
        let (scales, rest) = rest.split_at(self.packed.scales.expert_len(counts));
        let (zeros, minima) = rest.split_at(if self.packed.zeros.is_empty() { 0 } else { counts.groups });
        self.packed.q[q].copy_from_slice(quants);
        self.packed.scales.write_expert(expert, counts, scales);
        if let Some(all) = self.packed.zeros.get_mut(expert * counts.groups..(expert + 1) * counts.groups) {
            all.copy_from_slice(zeros);
        }
        self.packed.minima.write_expert(expert, counts, minima);
        Ok(())
    }

    fn quants_of(&self, expert: usize) -> Range<usize> {
        let part = &self.parts[expert];
        part.first..part.first + part.columns.steps() * self.step_bytes() * self.panels()
    }

    /// How many scales an expert has.
    fn counts_of_expert(&self) -> ScaleCounts {
        let panel = self.scale_counts;
        ScaleCounts { groups: self.panels() * panel.groups, shared: self.panels() * panel.shared }
    }
}

impl Scales {
    /// Bytes of the scales of an expert, of which there are `counts`.
    fn expert_len(&self, counts: ScaleCounts) -> usize {
        match self {
            _ if self.is_empty() => 0,
            Self::F16(_) | Self::F32(_) => counts.groups * size_of::<f32>(),
            Self::Levels(_) => counts.groups + counts.shared * size_of::<f16>(),
            Self::Fp8(_) => counts.groups + counts.shared * size_of::<f32>(),
        }
    }

    /// Adds the bytes of the scales of an expert.
    fn read_expert(&self, expert: usize, counts: ScaleCounts, bytes: &mut Vec<u8>) {
        if self.is_empty() {
            return;
        }
        let groups = expert * counts.groups..(expert + 1) * counts.groups;
        match self {
            Self::F16(scales) => {
                scales[groups].iter().for_each(|scale| bytes.extend(scale.to_f32().to_le_bytes()));
            }
            Self::F32(scales) => scales[groups].iter().for_each(|scale| bytes.extend(scale.to_le_bytes())),
            Self::Levels(levels) => levels.read_expert(expert, counts, f16::to_le_bytes, bytes),
            Self::Fp8(levels) => levels.read_expert(expert, counts, f32::to_le_bytes, bytes),
        }
    }

    /// Overwrites the scales of an expert.
    fn write_expert(&mut self, expert: usize, counts: ScaleCounts, bytes: &[u8]) {
        if self.is_empty() {
            return;
        }
        match self {
            Self::Levels(levels) => return levels.write_expert(expert, counts, bytes, f16::from_le_bytes),
            Self::Fp8(levels) => return levels.write_expert(expert, counts, bytes, f32::from_le_bytes),
            Self::F16(_) | Self::F32(_) => {}
        }
        let groups = expert * counts.groups..(expert + 1) * counts.groups;
        let new: Vec<f32> = bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        let is_exact = |scale: &f32| f16::from_f32(*scale).to_f32().to_bits() == scale.to_bits();
        if let Self::F16(narrow) = self
            && !new.iter().all(is_exact)
        {
            *self = Self::F32(narrow.iter().map(|scale| scale.to_f32()).collect());
        }
        match self {
            Self::F16(all) => {
                all[groups].iter_mut().zip(&new).for_each(|(to, scale)| *to = f16::from_f32(*scale));
            }
            Self::F32(all) => all[groups].copy_from_slice(&new),
            Self::Levels(_) | Self::Fp8(_) => {}
        }
    }
}

impl<T: Float> SharedScales<T> {
    fn read_expert<const N: usize>(
        &self,
        expert: usize,
        counts: ScaleCounts,
        to_bytes: fn(T) -> [u8; N],
        bytes: &mut Vec<u8>,
    ) {
        bytes.extend(&self.factors[expert * counts.groups..(expert + 1) * counts.groups]);
        let shared = &self.shared[expert * counts.shared..(expert + 1) * counts.shared];
        bytes.extend(shared.iter().flat_map(|scale| to_bytes(*scale)));
    }

    fn write_expert<const N: usize>(
        &mut self,
        expert: usize,
        counts: ScaleCounts,
        bytes: &[u8],
        from_bytes: fn([u8; N]) -> T,
    ) {
        let (factors, shared) = bytes.split_at(counts.groups);
        self.factors[expert * counts.groups..(expert + 1) * counts.groups].copy_from_slice(factors);
        let to = &mut self.shared[expert * counts.shared..(expert + 1) * counts.shared];
        to.iter_mut().zip(shared.as_chunks().0).for_each(|(to, bytes)| *to = from_bytes(*bytes));
    }
}
