//! Routing inside a launch: the data about the rule for kernels that contain a router.

use candle_core::Result;
use moe_kernels::plan::Reason;
#[cfg(feature = "cuda")]
use moe_kernels::plan::{Form, RouterCall, RouterForm};
#[cfg(feature = "cuda")]
use moe_kernels::{Exec, StepContext, ViewMut};
use moe_kernels::{Gate, GateGroups, GateScoring, LayerRouting, Log2Phy, TensorView, View};

use crate::config::{Scoring, Selection};
#[cfg(feature = "cuda")]
use crate::gate::GateInput;
#[cfg(feature = "cuda")]
use crate::io::RouteOutput;
use crate::router::Router;

/// The data of a step for a launch that contains its router.
#[derive(Clone, Copy, Debug, Default)]
pub struct GateStep<'a> {
    /// The same as [`Gate::padded`].
    pub padded: bool,
    /// The same as [`Gate::routing`].
    pub routing: LayerRouting<'a>,
    /// The same as [`Gate::log2phy`].
    pub log2phy: Option<Log2Phy<'a>>,
}

impl Router {
    /// Whether a single launch can do everything that this configuration and the step require.
    #[cfg(feature = "cuda")]
    pub(crate) fn is_one_launch(&self, input: &GateInput<'_>, context: &StepContext, ex: &Exec) -> bool {
        let c = &self.config;
        let call = RouterCall {
            hidden: input.hidden.dims().last().copied().unwrap_or(0),
            experts: c.num_experts + c.num_fused_shared_experts,
            top_k: c.num_slots(),
            dtype: input.hidden.dtype(),
            gate: input.weight.dtype(),
        };
        let plain = self.kernel_rule().is_ok() && context.asks_of_router().is_none();
        plain && RouterForm::choose(&call, &ex.machine()) == Some(RouterForm::OneLaunch)
    }

    /// Computes gate and routing in one launch. [`is_one_launch`](Self::is_one_launch) must have returned true.
    #[cfg(feature = "cuda")]
    pub(crate) fn gate_route(
        &self,
        input: &GateInput<'_>,
        logits: ViewMut<'_>,
        out: RouteOutput<'_>,
        context: &StepContext,
        ex: &mut Exec,
    ) -> Result<()> {
        ex.launched(|| RouterForm::OneLaunch.name());
        let step = GateStep {
            padded: context.padded,
            routing: context.routing.layer(input.layer, input.first_row)?,
            log2phy: input.log2phy,
        };
        self.with_gate(input.weight.rows("gate_route")?, input.bias, step, |gate| {
            moe_kernels::cuda::gate_route_into(input.hidden, gate, logits, out.topk_ids, out.topk_weights, ex)
        })?;
        match out.zero_expert_weights {
            Some(zeros) => moe_kernels::fill_into(0.0, zeros, ex),
            None => Ok(()),
        }
    }

    /// Whether kernels that contain a router support this rule: the best K scores or logits, of all experts or of the
    /// best groups.
    ///
    /// # Errors
    /// The reason why they do not.
    pub fn kernel_rule(&self) -> std::result::Result<(), Reason> {
        let c = &self.config;
        if !matches!(c.selection, Selection::TopK | Selection::RawLogits | Selection::Grouped { .. }) {
            return Err(Reason::Part { part: "another routing rule than the best K" });
        }
        if let Some((got, _)) = c.limiting_groups().filter(|(groups, _)| *groups > GateGroups::MOST) {
            let dimension = "num_expert_group";
            return Err(Reason::TooLarge { dimension, most: GateGroups::MOST, got });
        }
        if c.num_zero_experts > 0 {
            return Err(Reason::Part { part: "zero experts" });
        }
        Ok(())
    }

    /// Passes the gate with this rule, and the step's routing, to a kernel that contains a router.
    /// [`kernel_rule`](Self::kernel_rule) says whether a kernel may contain it.
    ///
    /// # Errors
    /// Any error of `launch`.
    pub fn with_gate<R>(
        &self,
        weight: View<'_>,
        bias: Option<View<'_>>,
        step: GateStep<'_>,
        launch: impl FnOnce(&Gate<'_>) -> Result<R>,
    ) -> Result<R> {
        let c = &self.config;
        let correction = self.bias.as_ref().map(TensorView::new).transpose()?;
        launch(&Gate {
            weight,
            bias,
            correction_bias: correction.as_ref().map(TensorView::view).transpose()?,
            top_k: c.top_k,
            shared: c.num_fused_shared_experts,
            shared_weight: c.fused_shared_weight,
            scoring: gate_scoring(c.scoring),
            raw_logits: c.selection == Selection::RawLogits,
            groups: c.limiting_groups().map(|(count, kept)| GateGroups { count, kept }),
            renormalize: c.renormalize,
            scale: c.routed_scaling_factor,
            softcap: c.softcapping,
            padded: step.padded,
            routing: step.routing,
            log2phy: step.log2phy,
        })
    }
}

/// Converts a scoring to the kernels' type.
pub(crate) fn gate_scoring(scoring: Scoring) -> GateScoring {
    match scoring {
        Scoring::Softmax => GateScoring::Softmax,
        Scoring::Sigmoid => GateScoring::Sigmoid,
        Scoring::SqrtSoftplus => GateScoring::SqrtSoftplus,
    }
}
