//! The block of a decode step on CUDA together with what surrounds it: for a few tokens all in one launch; for more,
//! the end of the experts with the addition to the residual stream and the next norm.

use moe_kernels::candle::{DType, Result, bail};
use moe_kernels::cuda::{
    FusedExperts, PreNorm, experts_add_norm_fits, experts_add_norm_into, norm_experts_add_into,
    small_experts_fit,
};
use moe_kernels::{Exec, TensorView, View, ViewMut};
use moe_router::{GateInput, RouteOutput, Router};
use tracing::trace_span;

use crate::block::{Family, SparseMoeBlock};
use crate::chunked::Path;

impl SparseMoeBlock {
    /// Whether [`add_normed_into`](Self::add_normed_into) runs this block for so many tokens in this step.
    pub fn fuses(&self, tokens: usize, ex: &Exec) -> bool {
        self.fused_parts().is_some_and(|(router, weights)| {
            let (config, shape) = (router.config(), weights.shape());
            let experts = (config.num_experts, config.top_k);
            let widths = (shape.hidden_size, shape.intermediate_size);
            router.is_plain(ex) && small_experts_fit(tokens, experts, widths, ex)
        })
    }

    /// `residual` [T, H] f32 += block(norm(`residual`)), in one launch.
    ///
    /// # Errors
    /// What [`fuses`](Self::fuses) refuses; wrong dims or dtypes.
    pub fn add_normed_into(&self, norm: &PreNorm<'_>, residual: ViewMut<'_>, ex: &mut Exec) -> Result<()> {
        let Some((router, weights)) = self.fused_parts() else {
            bail!("{}: these experts are not computed together with their router", self.experts_name())
        };
        let gate = TensorView::new(self.gate())?;
        let (w13, w2) = (TensorView::new(weights.w13())?, TensorView::new(weights.w2())?);
        let packs = (w13.view()?, w2.view()?);
        let top_k = router.config().top_k;
        router.with_gate(gate.view()?, None, |gate| {
            norm_experts_add_into(norm, gate, top_k, packs, residual, ex)
        })
    }

    /// Whether [`forward_add_norm_into`](Self::forward_add_norm_into) runs this block for so many tokens in this step.
    pub fn fuses_next_norm(&self, tokens: usize, ex: &Exec) -> bool {
        self.chunk_size().is_none()
            && self.fused_parts().is_some_and(|(router, weights)| {
                let shape = weights.shape();
                let widths = (shape.hidden_size, shape.intermediate_size);
                router.is_plain(ex) && experts_add_norm_fits(tokens, shape.num_local_experts, widths, ex)
            })
    }

    /// `residual` [T, H] f32 += block(`hidden` [T, H]), then `out` [T, H] = norm(`residual`): the norm of the next
    /// sub-layer. The same bits as one after the other.
    ///
    /// # Errors
    /// What [`fuses_next_norm`](Self::fuses_next_norm) refuses; wrong dims or dtypes.
    pub fn forward_add_norm_into(
        &self,
        hidden: View<'_>,
        norm: &PreNorm<'_>,
        residual: ViewMut<'_>,
        out: ViewMut<'_>,
        ex: &mut Exec,
    ) -> Result<()> {
        let Some((router, weights)) = self.fused_parts() else {
            bail!("{}: these experts are not computed together with the next norm", self.experts_name())
        };
        let (tokens, slots) = (hidden.rows(), router.config().num_slots());
        let gate = TensorView::new(self.gate())?;
        let (w13, w2) = (TensorView::new(weights.w13())?, TensorView::new(weights.w2())?);
        let mut logits = ex.scratch(DType::F32, &[tokens, router.config().num_logits()])?;
        let mut topk_ids = ex.scratch(DType::U32, &[tokens, slots])?;
        let mut topk_weights = ex.scratch(DType::F32, &[tokens, slots])?;
        let output = RouteOutput {
            topk_ids: topk_ids.view_mut(),
            topk_weights: topk_weights.view_mut(),
            zero_expert_weights: None,
        };
        let input = GateInput::new(hidden, gate.view()?, self.layer());
        trace_span!("router")
            .in_scope(|| router.gate_and_route_into(&input, Some(logits.view_mut()), output, ex))?;
        let args = FusedExperts {
            x: hidden,
            w13: w13.view()?,
            w2: w2.view()?,
            topk_ids: topk_ids.view(),
            topk_weights: topk_weights.view(),
            expert_map: None,
        };
        trace_span!("experts").in_scope(|| experts_add_norm_into(&args, norm, residual, out, ex))
    }

    /// Router and weights of a block without communication, zero experts or shared experts.
    fn fused_parts(&self) -> Option<(&Router, &moe_experts::ExpertWeights)> {
        let Family::Modular { router, path: Path { prepare, experts }, decode: None } = self.family() else {
            return None;
        };
        let local = prepare.finalize_copies_reduced() && prepare.local_experts().is_none();
        let weights = experts.packed().filter(|_| local && !self.has_shared_experts())?;
        Some((router, weights))
    }
}
