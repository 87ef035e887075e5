//! Quantised weights, as far as the choice of kernels depends on them.

use candle_core::DType;

use super::Reason;
use super::linear::expect_steps;
use crate::scheme::QuantScheme;

/// Columns that every fast kernel takes at a time.
const K_STEP: usize = 64;
/// Fewest integers that share a scale.
const INT_GROUP: usize = 32;
/// Fewest FP8 weights of a row that share one.
const FP8_GROUP: usize = 128;

/// How the weights of a product are quantised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuantWeights {
    /// The scheme, not [`QuantScheme::None`].
    pub scheme: QuantScheme,
    /// Dtype of the scales as they are held: f32, bf16 or f16.
    pub scales: DType,
    /// Whether gate and up rows lie together in tiles.
    pub gate_up: bool,
    /// Whether the rows 128 i to 128 i + 127 have the same scales, for every i: matrices in blocks that were put under
    /// each other may not.
    pub in_blocks: bool,
}

impl QuantWeights {
    /// Whether the kernels for bf16 activations read such a matrix [n, k]: whole tiles, columns in the order of x, groups of a
    /// power of two.
    ///
    /// # Errors
    /// The first reason why not.
    pub(super) fn expect_fast(&self, n: usize, k: usize) -> Result<(), Reason> {
        let refused = Reason::Quant { got: self.scheme };
        expect_steps("k", k, K_STEP)?;
        let (least, rows) = match self.scheme {
            QuantScheme::None | QuantScheme::Int { act_order: true, .. } => return Err(refused),
            QuantScheme::Int { .. } if self.scales == DType::F32 => {
                return Err(Reason::Scales { got: self.scales.as_str(), accepted: vec!["f16", "bf16"] });
            }
            QuantScheme::Int { .. } => (INT_GROUP, 16),
            QuantScheme::Fp8 { .. } => (FP8_GROUP, 32),
        };
        expect_steps("n", n, rows)?;
        let group = self.scheme.group_size(k);
        let is_step = group.is_power_of_two() && group >= least;
        if group >= k || is_step { Ok(()) } else { Err(refused) }
    }
}

/// Fails unless weights are floats.
pub(super) fn expect_floats(quant: Option<QuantWeights>) -> Result<(), Reason> {
    match quant {
        None => Ok(()),
        Some(QuantWeights { scheme, .. }) => Err(Reason::Quant { got: scheme }),
    }
}

/// Fails unless weights are quantised.
pub(super) fn expect_quantised(quant: Option<QuantWeights>) -> Result<QuantWeights, Reason> {
    quant.ok_or(Reason::Floats)
}

/// The name of a kernel that has a form for floats and one for quantised weights.
pub(super) fn kernel_name(name: &str, is_quantised: bool) -> String {
    if is_quantised { format!("quant_{name}") } else { name.to_string() }
}

/// Whether the streaming kernels may multiply such weights as they are, by digits of rows of x, which take the most room
/// (`has_digits` in quant/row_steps.cuh; in groups of 32 they do not).
pub(super) fn takes_digits(scheme: QuantScheme) -> bool {
    !matches!(scheme, QuantScheme::Fp8 { .. })
}

/// Bytes between rows of x of so many columns in the streaming kernels (`row_pitch` in quant/row_steps.cuh).
pub(super) fn row_pitch(columns: usize, digits: bool) -> usize {
    const PAD: usize = 16;
    PAD + if digits { columns.div_ceil(128) * (256 + 32) } else { 2 * columns }
}
