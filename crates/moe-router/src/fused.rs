//! Gate product and routing in one launch, on CUDA.

use candle_core::Result;
use moe_kernels::cuda::{GateRoute, GateScoring, gate_route_fits, gate_route_into};
use moe_kernels::{Exec, TensorView, View, ViewMut};

use crate::config::{RouterConfig, Scoring, Selection};
use crate::gate::GateInput;
use crate::router::{RouteOutput, Router};

impl Router {
    /// Whether one launch does all that this configuration and the step ask for: plain top-k on scores
    /// or logits, nothing recorded or forced, sizes of the kernel.
    pub(crate) fn gate_route_fits(&self, hidden: View<'_>, ex: &Exec) -> bool {
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

    /// Gate and route in one launch; [`gate_route_fits`](Self::gate_route_fits) has said yes.
    pub(crate) fn gate_route(
        &self,
        input: &GateInput<'_>,
        logits: ViewMut<'_>,
        out: RouteOutput<'_>,
        ex: &mut Exec,
    ) -> Result<()> {
        let c = &self.config;
        let bias = self.bias.as_ref().map(TensorView::new).transpose()?;
        let args = GateRoute {
            x: input.hidden,
            gate: input.weight,
            gate_bias: input.bias,
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
        gate_route_into(&args, logits, out.topk_ids, out.topk_weights, ex)?;
        match out.zero_expert_weights {
            Some(zeros) => moe_kernels::fill_into(0.0, zeros, ex),
            None => Ok(()),
        }
    }
}

fn is_plain(c: &RouterConfig) -> bool {
    matches!(c.selection, Selection::TopK | Selection::RawLogits)
        && c.num_zero_experts == 0
        && c.num_fused_shared_experts == 0
}
