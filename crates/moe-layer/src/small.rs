//! The block of a decode step of a few tokens on CUDA, in one launch.

use moe_kernels::candle::{Result, bail};
use moe_kernels::cuda::{PreNorm, norm_experts_add_into, small_experts_fit};
use moe_kernels::{Exec, TensorView, ViewMut};
use moe_router::Router;

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

    /// Router and weights of a block without communication, zero experts or shared experts.
    fn fused_parts(&self) -> Option<(&Router, &moe_experts::ExpertWeights)> {
        let Family::Modular { router, path: Path { prepare, experts }, decode: None } = self.family() else {
            return None;
        };
        let local = prepare.num_dispatchers() == 1 && prepare.local_experts().is_none();
        let local = local && prepare.finalize_copies_reduced();
        let weights = experts.packed().filter(|_| local && !self.has_shared_experts())?;
        Some((router, weights))
    }
}
