//! The names of the tensors of a sparse block.

use candle_nn::VarBuilder;
use moe_kernels::names::{CorrectionBiasNames, MlpNames};

/// Names below the prefix of a block (`model.layers.0.mlp`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockNames {
    /// Prefix of the router's `weight` [E + zero experts, H].
    pub gate: &'static str,
    /// Correction bias of the router, if it has one.
    pub correction_bias: CorrectionBiasNames,
    /// Prefix of the experts; empty if they are right below the block.
    pub experts: &'static str,
    /// Prefix of the MLP of the shared experts.
    pub shared_experts: &'static str,
    /// Prefix of the `weight` [1, H] of their gate.
    pub shared_expert_gate: &'static str,
    /// Matrices of experts, routed and shared.
    pub matrices: MlpNames,
    /// Matrices of the shared experts.
    pub shared_matrices: MlpNames,
}

impl BlockNames {
    /// `gate`, `experts` and `shared_experts`, with the matrices' usual names: DeepSeek's.
    pub const USUAL: Self = Self {
        gate: "gate",
        correction_bias: CorrectionBiasNames::USUAL,
        experts: "experts",
        shared_experts: "shared_experts",
        shared_expert_gate: "shared_expert_gate",
        matrices: MlpNames::USUAL,
        shared_matrices: MlpNames::USUAL,
    };
}

/// The builder below a name of a block; an empty name is the block itself.
pub(super) fn below<'a>(block: &VarBuilder<'a>, name: &str) -> VarBuilder<'a> {
    if name.is_empty() { block.clone() } else { block.pp(name) }
}

impl Default for BlockNames {
    fn default() -> Self {
        Self::USUAL
    }
}
