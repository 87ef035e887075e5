//! The candle door: fused experts as a module over tensors.

use std::fmt;

use candle_core::{DType, Result, Tensor};
use candle_nn::VarBuilder;
use moe_kernels::{Activation, Dispatched, WeightAndReduce, copy_rows_into, weighted_sum_into, with_tensors};

use crate::build::build;
use crate::experts::Experts;
use crate::load::LoadSpec;
use crate::oracle::select;
use crate::weights::ExpertWeights;

/// The experts of a layer as one call on candle tensors: every token through its K experts,
/// weighted and summed. Routing (softmax, top-k) is the caller's.
///
/// The sum is over k ascending in f32 with one rounding, and no expert product depends on the
/// batch, so a token's output has the same bits whatever other tokens are computed beside it.
pub struct FusedExperts {
    experts: Box<dyn Experts>,
}

impl FusedExperts {
    /// Experts with these weights; the backend is the oracle's choice for them.
    pub fn new(weights: ExpertWeights, activation: Activation) -> Result<Self> {
        let selection = select(&weights.spec(activation, 1), None)?;
        let experts = build(&selection, weights)?;
        Ok(Self { experts })
    }

    /// Loads the experts under `vb`, which has the prefix of the experts
    /// (`vb.pp("model.layers.0.mlp.experts")`); see [`ExpertWeights::load`].
    pub fn load(spec: &LoadSpec, activation: Activation, vb: VarBuilder) -> Result<Self> {
        Self::new(ExpertWeights::load(spec, vb)?, activation)
    }

    /// `out[t] = Σ_k topk_weights[t, k] · MLP(expert topk_ids[t, k], hidden[t])`.
    ///
    /// | tensor | shape, dtype |
    /// |---|---|
    /// | `hidden` | [T, H] in the weights' dtype |
    /// | `topk_ids` | [T, K] u32; `u32::MAX` = no expert |
    /// | `topk_weights` | [T, K] f32 |
    /// | result | [T, H] in the weights' dtype |
    ///
    /// All on the device of the weights, the CPU or a CUDA device. On a CUDA device ids are not checked:
    /// an id that is no expert adds nothing.
    ///
    /// # Errors
    /// Wrong dims, dtypes or devices; on the CPU an id that is no expert.
    pub fn forward(&self, hidden: &Tensor, topk_ids: &Tensor, topk_weights: &Tensor) -> Result<Tensor> {
        with_tensors([hidden, topk_ids, topk_weights], [], |[x, ids, weights], [], ex| {
            let rows = Dispatched::standard(x, ids, weights);
            let mut expert_out = ex.scratch(DType::F32, &self.experts.out_dims(&rows)?)?;
            self.experts.apply(&rows, expert_out.view_mut(), ex)?;
            let mut out = ex.output(x.dtype(), x.dims())?;
            match self.experts.weight_and_reduce() {
                WeightAndReduce::NoOp => copy_rows_into(expert_out.view(), out.view_mut(), ex)?,
                _ => weighted_sum_into(expert_out.view(), ids, weights, out.view_mut(), ex)?,
            }
            out.into_tensor()
        })
    }
}

impl fmt::Debug for FusedExperts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FusedExperts({}, {:?})", self.experts.name(), self.experts.shape())
    }
}
