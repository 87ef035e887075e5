//! Gate product and routing in one launch, on CUDA.

use candle_core::Result;
use moe_kernels::cuda::{Gate, GateScoring, gate_route_fits, gate_route_into};
use moe_kernels::{Exec, StepContext, TensorView, View, ViewMut};

use crate::config::{RouterConfig, Scoring, Selection};
use crate::gate::GateInput;
use crate::router::{RouteOutput, Router};

impl Router {
    /// Whether one launch does all that this configuration and the step ask for: plain top-k on scores
    /// or logits, nothing recorded or forced, sizes of the kernel.
    pub(crate) fn gate_route_fits(&self, hidden: View<'_>, context: &StepContext, ex: &Exec) -> bool {
        let c = &self.config;
        let width = hidden.dims().last().copied().unwrap_or(0);
        self.is_plain(context) && gate_route_fits(width, c.num_experts, c.top_k, hidden.dtype(), ex)
    }

    /// Gate and route in one launch; [`gate_route_fits`](Self::gate_route_fits) has said yes.
    pub(crate) fn gate_route(
        &self,
        input: &GateInput<'_>,
        logits: ViewMut<'_>,
        out: RouteOutput<'_>,
        context: &StepContext,
        ex: &mut Exec,
    ) -> Result<()> {
        self.with_gate(input.weight, input.bias, context, |gate| {
            gate_route_into(input.hidden, gate, logits, out.topk_ids, out.topk_weights, ex)
        })?;
        match out.zero_expert_weights {
            Some(zeros) => moe_kernels::fill_into(0.0, zeros, ex),
            None => Ok(()),
        }
    }

    /// Whether kernels with a built-in router route like this one in this step: plain top-k, nothing
    /// recorded or forced.
    pub fn is_plain(&self, context: &StepContext) -> bool {
        let observed = context.capture.is_some() || context.heat.is_some();
        let forced = context.replay.is_some() || context.force_balance.is_some();
        is_plain(&self.config) && !observed && !forced
    }

    /// Shows the gate with this routing to a kernel that has a router inside;
    /// [`is_plain`](Self::is_plain) has said that it may.
    ///
    /// # Errors
    /// Those of `launch`.
    pub fn with_gate<R>(
        &self,
        weight: View<'_>,
        bias: Option<View<'_>>,
        context: &StepContext,
        launch: impl FnOnce(&Gate<'_>) -> Result<R>,
    ) -> Result<R> {
        let c = &self.config;
        let correction = self.bias.as_ref().map(TensorView::new).transpose()?;
        launch(&Gate {
            weight,
            bias,
            correction_bias: correction.as_ref().map(TensorView::view).transpose()?,
            scoring: gate_scoring(c.scoring),
            raw_logits: c.selection == Selection::RawLogits,
            renormalize: c.renormalize,
            scale: c.routed_scaling_factor,
            softcap: c.softcapping,
            padded: context.padded,
        })
    }
}

fn is_plain(c: &RouterConfig) -> bool {
    matches!(c.selection, Selection::TopK | Selection::RawLogits)
        && c.num_zero_experts == 0
        && c.num_fused_shared_experts == 0
}

/// How the kernels name a scoring function.
pub(crate) fn gate_scoring(scoring: Scoring) -> GateScoring {
    match scoring {
        Scoring::Softmax => GateScoring::Softmax,
        Scoring::Sigmoid => GateScoring::Sigmoid,
        Scoring::SqrtSoftplus => GateScoring::SqrtSoftplus,
    }
}
