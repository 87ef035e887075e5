//! Quantised weights, as far as the choice of kernels depends on them.

use candle_core::DType;

use super::Reason;
use crate::scheme::QuantScheme;

/// How the weights of a product are quantised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuantWeights {
    /// The scheme, not [`QuantScheme::None`].
    pub scheme: QuantScheme,
    /// Dtype of the scales as they are held: f32, bf16 or f16.
    pub scales: DType,
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
