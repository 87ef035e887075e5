//! The block of a decode step on CUDA together with what surrounds it: for a few tokens all in one launch; for more,
//! the end of the experts with the addition to the residual stream and the next norm.

use moe_dispatch::Combine;
use moe_kernels::candle::{Result, bail};
use moe_kernels::cuda::{
    PreNorm, norm_experts_add_into, route_experts_add_norm_fits, route_experts_add_norm_into,
    route_experts_fit, route_experts_into, small_experts_fit,
};
use moe_kernels::{Exec, StepContext, TensorView, View, ViewMut};
use moe_router::Router;

use crate::block::{Family, SparseMoeBlock};
use crate::chunked::Path;

impl SparseMoeBlock {
    /// Whether [`add_normed_into`](Self::add_normed_into) runs this block for so many tokens in this step.
    pub fn fuses(&self, tokens: usize, context: &StepContext, ex: &Exec) -> bool {
        self.fused_parts().is_some_and(|(router, weights)| {
            let (config, shape) = (router.config(), weights.shape());
            let experts = (config.num_experts, config.top_k);
            let widths = (shape.hidden_size, shape.intermediate_size);
            router.is_plain(context) && small_experts_fit(tokens, experts, widths, ex)
        })
    }

    /// `residual` [T, H] f32 += block(norm(`residual`)), in one launch.
    ///
    /// # Errors
    /// What [`fuses`](Self::fuses) refuses; wrong dims or dtypes.
    pub fn add_normed_into(
        &self,
        norm: &PreNorm<'_>,
        residual: ViewMut<'_>,
        context: &StepContext,
        ex: &mut Exec,
    ) -> Result<()> {
        let Some((router, weights)) = self.fused_parts() else {
            bail!("{}: these experts are not computed together with their router", self.experts_name())
        };
        let gate = TensorView::new(self.gate())?;
        let (w13, w2) = (TensorView::new(weights.w13())?, TensorView::new(weights.w2())?);
        let packs = (w13.view()?, w2.view()?);
        let top_k = router.config().top_k;
        router.with_gate(gate.view()?, None, context, |gate| {
            norm_experts_add_into(norm, gate, top_k, packs, residual, ex)
        })
    }

    /// Whether [`forward_add_norm_into`](Self::forward_add_norm_into) runs this block for so many tokens in this step.
    pub fn fuses_next_norm(&self, tokens: usize, context: &StepContext, ex: &Exec) -> bool {
        self.chunk_size().is_none()
            && self.fused_parts().is_some_and(|(router, weights)| {
                let (config, shape) = (router.config(), weights.shape());
                let experts = (config.num_experts, config.top_k);
                let widths = (shape.hidden_size, shape.intermediate_size);
                router.is_plain(context) && route_experts_add_norm_fits(tokens, experts, widths, ex)
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
        context: &StepContext,
        ex: &mut Exec,
    ) -> Result<()> {
        let Some((router, weights)) = self.fused_parts() else {
            bail!("{}: these experts are not computed together with the next norm", self.experts_name())
        };
        let gate = TensorView::new(self.gate())?;
        let (w13, w2) = (TensorView::new(weights.w13())?, TensorView::new(weights.w2())?);
        let packs = (w13.view()?, w2.view()?);
        let top_k = router.config().top_k;
        router.with_gate(gate.view()?, None, context, |gate| {
            route_experts_add_norm_into(hidden, (gate, top_k), packs, norm, residual, out, ex)
        })
    }

    /// Whether [`forward_partial_into`](Self::forward_partial_into) runs this block for so many tokens in this step.
    pub fn fuses_routing(&self, tokens: usize, context: &StepContext, ex: &Exec) -> bool {
        self.chunk_size().is_none()
            && self.rank_parts().is_some_and(|(router, weights, _)| {
                let (config, shape) = (router.config(), weights.shape());
                let experts = (config.num_experts, config.top_k);
                let widths = (shape.hidden_size, shape.intermediate_size);
                router.is_plain(context) && route_experts_fit(tokens, experts, widths, ex)
            })
    }

    /// `out` [T, H] f32 = this rank's part of block(`hidden` [T, H]), whose experts the ranks have cut: router and experts in
    /// as few launches as there are for so many tokens.
    ///
    /// # Errors
    /// What [`fuses_routing`](Self::fuses_routing) refuses; wrong dims or dtypes.
    pub fn forward_partial_into(
        &self,
        hidden: View<'_>,
        out: ViewMut<'_>,
        context: &StepContext,
        ex: &mut Exec,
    ) -> Result<()> {
        let Some((router, weights, map)) = self.rank_parts() else {
            bail!("{}: these experts are not computed together with their router", self.experts_name())
        };
        let gate = TensorView::new(self.gate())?;
        let (w13, w2) = (TensorView::new(weights.w13())?, TensorView::new(weights.w2())?);
        let packs = (w13.view()?, w2.view()?);
        let top_k = router.config().top_k;
        router.with_gate(gate.view()?, None, context, |gate| {
            route_experts_into(hidden, (gate, top_k), packs, map, out, ex)
        })
    }

    /// Router, weights and, where whole experts live here, the expert map of a block whose sum over ranks is left to the
    /// caller.
    fn rank_parts(&self) -> Option<(&Router, &moe_experts::ExpertWeights, Option<View<'_>>)> {
        let Family::Modular { router, path: Path { prepare, experts }, decode: None } = self.family() else {
            return None;
        };
        let map = prepare.local_experts().and_then(|experts| experts.expert_map());
        Some((router, experts.packed().filter(|_| prepare.combine().is_local())?, map))
    }

    /// Router and weights of a block without communication, zero experts or shared experts.
    fn fused_parts(&self) -> Option<(&Router, &moe_experts::ExpertWeights)> {
        let Family::Modular { router, path: Path { prepare, experts }, decode: None } = self.family() else {
            return None;
        };
        let local = prepare.combine() == Combine::Here && prepare.local_experts().is_none();
        let weights = experts.packed().filter(|_| local && !self.has_shared_experts())?;
        Some((router, weights))
    }
}
