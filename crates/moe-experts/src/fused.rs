//! The candle door: fused experts as a module over tensors.

use std::fmt;

use candle_core::{DType, Result, Tensor};
use candle_nn::VarBuilder;
use moe_kernels::{Activation, Buffer, Dispatched, Exec, TensorView, Workspace, weighted_sum_into};

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
    workspace: Workspace,
}

impl FusedExperts {
    /// Experts with these weights; the backend is the oracle's choice for them.
    pub fn new(weights: ExpertWeights, activation: Activation) -> Result<Self> {
        let selection = select(&weights.spec(activation, 1), None)?;
        let experts = build(&selection, weights)?.into_modular("FusedExperts")?;
        Ok(Self { experts, workspace: Workspace::new() })
    }

    /// Loads the experts under `vb`, whose prefix is that of the experts
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
    /// # Errors
    /// Wrong dims or dtypes, an id that is no expert, a tensor that is not contiguous.
    pub fn forward(&self, hidden: &Tensor, topk_ids: &Tensor, topk_weights: &Tensor) -> Result<Tensor> {
        let mut ex = Exec::for_tensor(hidden, &self.workspace)?;
        let guards = (TensorView::new(hidden)?, TensorView::new(topk_ids)?, TensorView::new(topk_weights)?);
        let (x, ids, weights) = (guards.0.view()?, guards.1.view()?, guards.2.view()?);
        let rows = Dispatched::standard(x, ids, weights);
        let mut slots = ex.scratch(DType::F32, &self.experts.out_dims(&rows)?)?;
        self.experts.apply(&rows, slots.view_mut(), &mut ex)?;
        let mut out = Buffer::zeros(hidden.dtype(), hidden.dims())?;
        weighted_sum_into(slots.view(), ids, weights, out.view_mut(), &mut ex)?;
        out.into_tensor()
    }
}

impl fmt::Debug for FusedExperts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FusedExperts({}, {:?})", self.experts.name(), self.experts.shape())
    }
}
