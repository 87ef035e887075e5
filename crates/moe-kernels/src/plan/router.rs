//! The gate product and the choice of experts: one launch, or a product and a choice.

use candle_core::DType;

use super::checks::{expect_at_most, expect_bf16, expect_gate, expect_steps};
use super::{Form, Machine, Reason, TENSOR_CORES};

/// Limits of the one launch.
const MAX_EXPERTS: usize = 1024;
const MAX_TOP_K: usize = 32;

/// Sizes of a router whose rule the kernels support (`Gate`).
#[derive(Clone, Copy, Debug)]
pub struct RouterCall {
    /// Width of a row, H.
    pub hidden: usize,
    /// The number of experts E, including shared experts that are slots of every token.
    pub experts: usize,
    /// Slots of a token, K.
    pub top_k: usize,
    /// Dtype of the rows.
    pub dtype: DType,
    /// Dtype of the gate: the same, or f32.
    pub gate: DType,
}

/// The kernels of a router.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RouterForm {
    /// Product and choice in one launch (`gate_route`).
    OneLaunch,
    /// A product, then the choice by any rule.
    Apart,
}

impl Form for RouterForm {
    type Call = RouterCall;

    const ALL: &'static [Self] = &[Self::OneLaunch, Self::Apart];

    fn name(self) -> &'static str {
        match self {
            Self::OneLaunch => "gate_route",
            Self::Apart => "gate product, then route",
        }
    }

    fn fits(self, call: &RouterCall, machine: &Machine) -> Result<(), Reason> {
        if self == Self::Apart {
            return Ok(());
        }
        machine.expect_tuned(TENSOR_CORES)?;
        machine.expect_batch_variant()?;
        expect_bf16(call.dtype)?;
        expect_gate(call.gate, call.dtype)?;
        expect_steps("hidden_size", call.hidden, 64)?;
        expect_at_most("num_experts", MAX_EXPERTS, call.experts)?;
        expect_at_most("top_k", MAX_TOP_K.min(call.experts), call.top_k)
    }
}
