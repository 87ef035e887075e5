//! A layer that ends in the residual stream, with the norm of the next sub-layer.

use moe_dispatch::{AddNorm, Combine};
use moe_kernels::candle::{Result, bail};
use moe_kernels::{Exec, StepContext, View};

use crate::block::SparseMoeBlock;
use crate::chunked::{End, Path};

impl SparseMoeBlock {
    /// Whether the norm behind the layer is better left to it, by [`forward_add_norm_into`](Self::forward_add_norm_into): where the
    /// sums of modular experts return from other ranks, and nothing else is added.
    pub(crate) fn adds_norm(&self) -> bool {
        let alone = self.router().config().num_zero_experts == 0 && self.shared_experts().is_none();
        let returns = |path: &Path| path.prepare.combine() == Combine::ByRank;
        alone && [false, true].map(|only_decode| self.path_of(only_decode)).into_iter().all(returns)
    }

    /// Modular experts with what follows them in a decoder layer, where [`choose`](Self::choose) says [`Fusion::AddNorm`].
    ///
    /// [`Fusion::AddNorm`]: moe_kernels::plan::Fusion::AddNorm
    ///
    /// # Errors
    /// As [`forward_into`](Self::forward_into).
    pub fn forward_add_norm_into(
        &self,
        hidden: View<'_>,
        end: AddNorm<'_>,
        observe: &mut dyn FnMut(View<'_>) -> Result<()>,
        context: &mut StepContext,
        ex: &mut Exec,
    ) -> Result<()> {
        if !self.adds_norm() {
            bail!(
                "{}: something else is added behind the experts, or no sums return to it",
                self.path().prepare.name()
            )
        }
        self.modular(hidden, End::AddNorm(end), observe, context, ex)
    }
}
