//! Implements rounding to nearest: the scale and zero point of a group, and the integers of a matrix.

use anyhow::{Result, bail};
use moe_quant::write::{IntMatrix, round_scale};
use moe_quant::{Format, GptqZeros, IntFormat};
use rayon::prelude::*;
use safetensors::Dtype;

/// The values that a group of weights may have: scale * (q - zero), where q is from 0 to 2^bits - 1.
#[derive(Clone, Copy, Debug)]
pub struct Grid {
    /// The number of bits, the group size and the kind of zero points.
    pub int: IntFormat,
    /// The dtype of the scales.
    pub scales: Dtype,
    /// The lowest allowed zero point. Version 1 of GPTQ stores zero points minus one, and readers disagree about a
    /// stored -1.
    pub lowest_zero: u8,
}

/// The scale and zero point of a group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GroupScale {
    /// The scale, rounded to the scales' dtype.
    pub scale: f32,
    /// The integer that means the weight 0.
    pub zero: u8,
}

impl Grid {
    /// Returns the grid of an integer format.
    ///
    /// # Errors
    /// The format is not an integer format.
    pub fn new(format: Format, scales: Dtype) -> Result<Self> {
        let Some(int) = format.int() else { bail!("{} has no integers to round to", format.name()) };
        let version_1 = matches!(format, Format::Gptq { zeros: GptqZeros::V1, .. });
        Ok(Self { int, scales, lowest_zero: u8::from(version_1) })
    }

    /// Returns the number of columns of a group, for rows of k columns.
    pub fn group_size(&self, k: usize) -> usize {
        self.int.group.columns(k)
    }

    /// Checks that the grid fits a matrix, and returns the number of columns of a group.
    ///
    /// # Errors
    /// `weights` is not [n, k] with at least one row and one column, or a row does not consist of whole groups.
    pub(crate) fn check(&self, weights: &[f32], n: usize, k: usize) -> Result<usize> {
        if n == 0 || k == 0 || n.checked_mul(k) != Some(weights.len()) {
            bail!("expected weights [{n}, {k}], with at least one row and column, got {}", weights.len())
        }
        match self.group_size(k) {
            size if size > 0 && k.is_multiple_of(size) => Ok(size),
            size => {
                bail!("groups of {size} columns do not divide {k}; use another group size, or whole rows")
            }
        }
    }

    fn most(&self) -> u8 {
        ((1u16 << self.int.bits) - 1) as u8
    }

    /// Returns the smallest scale with which every weight of a group is at most half a step outside the range of
    /// values. Returns `None` if the scales' dtype cannot represent it, or if a weight is not finite.
    pub fn fit(&self, weights: impl Iterator<Item = f32> + Clone) -> Option<GroupScale> {
        if !weights.clone().all(f32::is_finite) {
            return None;
        }
        let (low, high) = weights.fold((0f32, 0f32), |(low, high), w| (low.min(w), high.max(w)));
        let most = f32::from(self.most());
        let middle = self.int.middle();
        if low == high {
            return Some(GroupScale {
                scale: 1.0,
                zero: if self.int.zero_point { self.lowest_zero.max(1) } else { middle },
            });
        }
        if !self.int.zero_point {
            let scale = round_scale(low.abs().max(high) / (most / 2.0), self.scales)?;
            return Some(GroupScale { scale, zero: middle });
        }
        let scale = round_scale((high - low) / most, self.scales)?;
        let zero = (-low / scale).round_ties_even().min(most) as u8;
        if zero >= self.lowest_zero {
            return Some(GroupScale { scale, zero });
        }
        // There are hardly any negative weights, so the values begin at -lowest_zero steps.
        let scale = round_scale(high / (most - f32::from(self.lowest_zero)), self.scales)?;
        Some(GroupScale { scale, zero: self.lowest_zero })
    }

    /// Returns the integer whose value is nearest to a weight.
    pub fn round(&self, weight: f32, group: GroupScale) -> u8 {
        let q = (weight / group.scale).round_ties_even() + f32::from(group.zero);
        q.clamp(0.0, f32::from(self.most())) as u8
    }
}

impl GroupScale {
    /// Returns the weight that an integer means.
    pub fn weight(self, q: u8) -> f32 {
        self.scale * f32::from(i16::from(q) - i16::from(self.zero))
    }
}

/// Returns a matrix [n, k] with each weight rounded to the nearest value of its group. It ignores act-order.
///
/// # Errors
/// Sizes do not match, a group does not divide a size, or weights are not finite or too large for the scales' dtype.
/// The last error names the row.
pub fn round_to_nearest(grid: &Grid, weights: &[f32], n: usize, k: usize) -> Result<IntMatrix> {
    let size = grid.check(weights, n, k)?;
    let groups = k / size;
    let mut matrix = IntMatrix {
        n,
        k,
        q: vec![0; n * k],
        scale: vec![0.0; n * groups],
        zero: vec![0; n * groups],
        g_idx: grid.int.act_order.then(|| (0..k).map(|column| (column / size) as u32).collect()),
    };
    let rows = matrix
        .q
        .par_chunks_mut(k)
        .zip(matrix.scale.par_chunks_mut(groups))
        .zip(matrix.zero.par_chunks_mut(groups));
    rows.zip(weights.par_chunks(k)).enumerate().try_for_each(|(row, (((q, scale), zero), weights))| {
        for (group, (q, weights)) in q.chunks_mut(size).zip(weights.chunks(size)).enumerate() {
            let Some(fitted) = grid.fit(weights.iter().copied()) else {
                bail!(
                    "row {row} holds weights that are not finite, or too large for scales in {:?}",
                    grid.scales
                )
            };
            (scale[group], zero[group]) = (fitted.scale, fitted.zero);
            q.iter_mut().zip(weights).for_each(|(q, w)| *q = grid.round(*w, fitted));
        }
        Ok(())
    })?;
    Ok(matrix)
}
