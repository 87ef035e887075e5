//! Experts on CUDA that weight and reduce by themselves: from topk_ids to token rows.

use candle_core::{DType, Result, bail};
use moe_kernels::cuda::{FusedExperts, fused_experts_into};
use moe_kernels::{
    ActivationFormat, Dims, Dispatched, Exec, ExpertsSpec, TensorView, ViewMut, WeightAndReduce, fill_into,
};

use crate::experts::{Experts, Reservation};
use crate::oracle::Backend;
use crate::reason::Reason;
use crate::weights::{ExpertWeights, ExpertsShape};

/// bf16 SwiGLU experts on CUDA in the Standard format: few rows per expert by streaming the weights,
/// many by grouped products on tensor cores. `out` is [T, H] f32, weighted and reduced.
#[derive(Clone, Debug)]
pub struct CudaFusedExperts(ExpertWeights);

impl CudaFusedExperts {
    /// Experts with these weights, which must be bf16 on a CUDA device, without biases.
    pub fn new(weights: ExpertWeights) -> Result<Self> {
        let name = Backend::CudaFused.name();
        if !weights.device().is_cuda() || weights.has_bias() || weights.shape().dtype != DType::BF16 {
            bail!(
                "{name} experts: expected bf16 weights without bias on a CUDA device, got {} on {:?}",
                weights.shape().dtype.as_str(),
                weights.device().location()
            )
        }
        Ok(Self(weights))
    }
}

impl Experts for CudaFusedExperts {
    fn name(&self) -> &str {
        Backend::CudaFused.name()
    }

    fn activation_format(&self) -> ActivationFormat {
        ActivationFormat::Standard
    }

    fn shape(&self) -> ExpertsShape {
        self.0.shape()
    }

    fn supports(&self, spec: &ExpertsSpec) -> std::result::Result<(), Reason> {
        Backend::CudaFused.supports(spec)
    }

    fn packed(&self) -> Option<&ExpertWeights> {
        Some(&self.0)
    }

    fn weight_and_reduce(&self) -> WeightAndReduce {
        WeightAndReduce::NoOp
    }

    fn out_dims(&self, dispatched: &Dispatched) -> Result<Dims> {
        Dims::new(dispatched.rows.view().dims())
    }

    fn workspace(&self, max_tokens: usize, top_k: usize) -> Result<Reservation> {
        let shape = self.shape();
        Reservation::new()
            .with(DType::BF16, &[max_tokens, top_k, shape.intermediate_size])?
            .with(DType::F32, &[max_tokens, top_k, shape.hidden_size])
    }

    fn apply(&self, dispatched: &Dispatched, out: ViewMut, ex: &mut Exec) -> Result<()> {
        if dispatched.format != ActivationFormat::Standard || dispatched.weights_applied {
            bail!("{}: expected rows in the Standard format without their router weights", self.name())
        }
        if self.shape().num_local_experts == 0 {
            // More ranks than experts: this one adds nothing.
            return fill_into(0., out, ex);
        }
        let (w13, w2) = (TensorView::new(self.0.w13())?, TensorView::new(self.0.w2())?);
        let args = FusedExperts {
            x: dispatched.rows.view(),
            w13: w13.view()?,
            w2: w2.view()?,
            topk_ids: dispatched.topk_ids()?,
            topk_weights: dispatched.topk_weights()?,
            expert_map: dispatched.expert_map,
        };
        fused_experts_into(&args, out, ex)
    }
}
