//! Fused experts as a module over candle tensors.

use std::fmt;
use std::sync::Arc;

use candle_core::{DType, Result, Tensor, bail};
use candle_nn::VarBuilder;
use moe_kernels::arguments::{expect, expect_matrix, expect_rows};
use moe_kernels::{
    Activation, CpuIsa, Dispatched, WeightAndReduce, copy_rows_into, weighted_sum_into, with_tensors,
};

use crate::build::build;
use crate::experts::Experts;
use crate::load::LoadSpec;
use crate::oracle::select;
use crate::weights::ExpertWeights;

/// The name of the calls in errors.
const OP: &str = "experts";

/// The experts of a layer as one call on candle tensors. Every token passes through its K experts, whose outputs are
/// weighted and summed. The caller computes the routing (softmax, top-k).
///
/// The sum is computed in f32 in the order of k and rounded once, and no product depends on the other tokens. So a
/// token's output has the same bits with any other tokens in the batch. Clones share the weights.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use moe_experts::{Activation, ExpertWeights, FusedExperts};
///
/// let cpu = &Device::Cpu;
/// let w13 = Tensor::randn(0f32, 0.1, (4, 2 * 6, 8), cpu)?; // [E, 2I, H]: gate rows, then up rows
/// let w2 = Tensor::randn(0f32, 0.1, (4, 8, 6), cpu)?; // [E, H, I]
/// let experts = FusedExperts::new(ExpertWeights::new(w13, w2, None, None)?, Activation::SwiGlu)?;
/// let hidden = Tensor::randn(0f32, 1., (2, 8), cpu)?; // [T, H]
/// let topk_ids = Tensor::new(&[[0u32, 3], [1, u32::MAX]], cpu)?; // [T, K]; MAX = no expert
/// let topk_weights = Tensor::new(&[[0.7f32, 0.3], [1., 0.]], cpu)?;
/// let out = experts.forward(&hidden, &topk_ids, &topk_weights)?;
/// assert_eq!(out.dims(), [2, 8]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone)]
#[must_use = "it computes nothing until it is called"]
pub struct FusedExperts {
    experts: Arc<dyn Experts>,
}

impl FusedExperts {
    /// Makes experts with these weights. The oracle chooses the backend. Weights on the CPU are packed for this machine
    /// ([`ExpertWeights::packed`]), which copies them; the caller's own tensors stay in rows.
    ///
    /// # Errors
    /// No backend supports the weights; no memory is left.
    pub fn new(weights: ExpertWeights, activation: Activation) -> Result<Self> {
        Self::keeping_order(weights.packed(Some(CpuIsa::detect()))?, activation)
    }

    /// Does the same as [`new`](Self::new) without reordering the weights, so that tensors which the caller keeps are
    /// not copied. Results have the same bits.
    ///
    /// # Errors
    /// No backend supports the weights.
    pub fn keeping_order(weights: ExpertWeights, activation: Activation) -> Result<Self> {
        let selection = select(&weights.spec(activation, 1), None)?;
        let experts = build(&selection, weights)?.into();
        Ok(Self { experts })
    }

    /// Loads the experts under `vb`, which has the prefix of the experts
    /// (`vb.pp("model.layers.0.mlp.experts")`), and packs them; see [`ExpertWeights::load`].
    ///
    /// # Errors
    /// The errors of `ExpertWeights::load` and [`new`](Self::new).
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
    /// All tensors are on the device of the weights, the CPU or a CUDA device. On a CUDA device ids are not checked; an
    /// id that is not an expert adds nothing.
    ///
    /// # Errors
    /// Wrong dims, dtypes or devices; on the CPU also an id that is not an expert.
    pub fn forward(&self, hidden: &Tensor, topk_ids: &Tensor, topk_weights: &Tensor) -> Result<Tensor> {
        let top_k = self.expect("hidden", hidden, topk_ids)?;
        expect(OP, "topk_weights", topk_weights, DType::F32, &[hidden.dims()[0], top_k])?;
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

    /// Computes the experts' rows without weighting and adding them, for callers that do this elsewhere. moe-dispatch's
    /// `Dispatcher` takes such rows from the closure that it calls.
    ///
    /// | tensor | shape, dtype |
    /// |---|---|
    /// | `rows` | [T, H] in the weights' dtype |
    /// | `topk_ids` | [T, K] u32; `u32::MAX` = no expert |
    /// | `expert_map` | \[P\] i32: expert id to expert of these weights, -1 = elsewhere; `None` = identity |
    /// | result | [T, K, H] f32; rows of slots without an expert here may hold anything |
    ///
    /// # Errors
    /// The errors of [`forward`](Self::forward).
    pub fn slot_rows(&self, rows: &Tensor, topk_ids: &Tensor, expert_map: Option<&Tensor>) -> Result<Tensor> {
        let top_k = self.expect("rows", rows, topk_ids)?;
        let tokens = rows.dims()[0];
        if let Some(map) = expert_map {
            expect(OP, "expert_map", map, DType::I32, &[map.elem_count()])?;
        }
        with_tensors([rows, topk_ids], [expert_map], |[x, ids], [map], ex| {
            // The rows are not weighted, so any weights will do.
            let weights = ex.zeros(DType::F32, ids.dims())?;
            let mut dispatched = Dispatched::standard(x, ids, weights.view());
            dispatched.expert_map = map;
            if self.experts.weight_and_reduce() != WeightAndReduce::NoOp {
                let mut out = ex.output(DType::F32, &self.experts.out_dims(&dispatched)?)?;
                self.experts.apply(&dispatched, out.view_mut(), ex)?;
                return out.into_tensor();
            }
            let Some(slots) = self.experts.slot_rows(&dispatched, ex)? else {
                bail!("{} returns weighted sums only, no rows of slots", self.experts.name())
            };
            let mut out = ex.output(DType::F32, slots.view().dims())?;
            ex.copy(slots.view(), out.view_mut())?;
            out.into_tensor()?.reshape((tokens, top_k, x.dims()[1]))
        })
    }

    /// Checks that `rows` are [T, H] of the experts' dtype and `topk_ids` [T, K] u32, and returns K.
    fn expect(&self, name: &str, rows: &Tensor, topk_ids: &Tensor) -> Result<usize> {
        let shape = self.experts.shape();
        expect_rows(OP, name, rows, shape.hidden_size, shape.dtype)?;
        let (tokens, _) = expect_matrix(OP, name, rows)?;
        let (_, top_k) = expect_matrix(OP, "topk_ids", topk_ids)?;
        expect(OP, "topk_ids", topk_ids, DType::U32, &[tokens, top_k])?;
        Ok(top_k)
    }
}

impl fmt::Debug for FusedExperts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FusedExperts({}, {:?})", self.experts.name(), self.experts.shape())
    }
}
