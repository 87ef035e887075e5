//! Gate product and routing in one launch, on CUDA.

use candle_core::Result;
use moe_kernels::cuda::{GateRoute, GateScoring, gate_route_fits, gate_route_into};
use moe_kernels::{Exec, TensorView, View};

use crate::config::{RouterConfig, Scoring, Selection};
use crate::router::{RouteOutput, Router};

impl Router {
    /// Whether [`gate_route_into`](Self::gate_route_into) does all that this configuration and the step
    /// ask for: plain top-k on scores or logits, nothing recorded or forced, sizes of the kernel.
    pub fn gate_route_fits(&self, hidden: View<'_>, ex: &Exec) -> bool {
        let c = &self.config;
        let width = hidden.dims().last().copied().unwrap_or(0);
        let step = &ex.step;
        let observed = step.capture.is_some() || step.heat.is_some();
        let forced = step.replay.is_some() || step.force_balance.is_some();
        is_plain(c)
            && !observed
            && !forced
            && gate_route_fits(width, c.num_experts, c.top_k, hidden.dtype(), ex)
    }

    /// `logits` [T, E] f32 of `hidden` [T, H] and `gate` [E, H], and the experts chosen by them: as a
    /// product and [`route_into`](Self::route_into), except that logits are not checked.
    ///
    /// # Errors
    /// What [`gate_route_fits`](Self::gate_route_fits) refuses; wrong dims or dtypes.
    pub fn gate_route_into(
        &self,
        hidden: View<'_>,
        gate: View<'_>,
        logits: moe_kernels::ViewMut<'_>,
        out: RouteOutput<'_>,
        ex: &mut Exec,
    ) -> Result<()> {
        let c = &self.config;
        let bias = self.bias.as_ref().map(TensorView::new).transpose()?;
        let args = GateRoute {
            x: hidden,
            gate,
            correction_bias: bias.as_ref().map(TensorView::view).transpose()?,
            scoring: match c.scoring {
                Scoring::Softmax => GateScoring::Softmax,
                Scoring::Sigmoid => GateScoring::Sigmoid,
                Scoring::SqrtSoftplus => GateScoring::SqrtSoftplus,
            },
            raw_logits: c.selection == Selection::RawLogits,
            renormalize: c.renormalize,
            scale: c.routed_scaling_factor,
            softcap: c.softcapping,
        };
        gate_route_into(&args, logits, out.topk_ids, out.topk_weights, ex)
    }
}

fn is_plain(c: &RouterConfig) -> bool {
    matches!(c.selection, Selection::TopK | Selection::RawLogits)
        && c.num_zero_experts == 0
        && c.num_fused_shared_experts == 0
}
