//! Checks the arguments of routing: dtypes, dims, and whether the step context fits.

use candle_core::{DType, Result, Tensor, bail};
use moe_kernels::StepContext;
use moe_kernels::arguments::{
    Shaped, expect, expect_dims, expect_dtype, expect_float, expect_matrix, expect_optional,
};

use crate::io::{RouteInput, RouteOutput};
use crate::router::Router;

pub(crate) const OP: &str = "route";
pub(crate) const GATE_OP: &str = "gate_and_route";

impl Router {
    /// Checks logits [T, E + zero experts] f32 and optional hidden states [T, H], and returns T.
    pub(crate) fn check_input<S: Shaped>(&self, logits: &S, hidden: Option<&S>) -> Result<usize> {
        let (tokens, _) = expect_matrix(OP, "router_logits", logits)?;
        expect(OP, "router_logits", logits, DType::F32, &[tokens, self.config.num_logits()])?;
        if let Some(hidden) = hidden {
            let (_, size) = expect_matrix(OP, "hidden_states", hidden)?;
            expect_dims(OP, "hidden_states", hidden, &[tokens, size])?;
            expect_float(OP, "hidden_states", hidden)?;
        }
        Ok(tokens)
    }

    /// Checks hidden states [T, H] and a gate of the same dtype or in f32: its weight [E + zero experts, H] and its
    /// optional bias [E + zero experts].
    pub(crate) fn check_gate(&self, hidden: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<()> {
        let (_, size) = expect_matrix(GATE_OP, "hidden_states", hidden)?;
        expect_float(GATE_OP, "hidden_states", hidden)?;
        let experts = self.config.num_logits();
        let dtype = if weight.dtype() == DType::F32 { DType::F32 } else { hidden.dtype() };
        expect(GATE_OP, "gate weight", weight, dtype, &[experts, size])?;
        expect_optional(GATE_OP, "gate bias", bias, dtype, &[experts])
    }

    /// Checks dtypes and dims, and returns T.
    pub(crate) fn check_views(&self, input: &RouteInput<'_>, out: &RouteOutput<'_>) -> Result<usize> {
        let tokens = self.check_input(&input.logits, input.hidden.as_ref())?;
        let slots = [tokens, self.config.num_slots()];
        expect_dims(OP, "topk_ids", &out.topk_ids, &slots)?;
        expect_dtype(OP, "topk_ids", &out.topk_ids, DType::U32)?;
        expect_dims(OP, "topk_weights", &out.topk_weights, &slots)?;
        expect_dtype(OP, "topk_weights", &out.topk_weights, DType::F32)?;
        match &out.zero_expert_weights {
            Some(weights) => {
                expect_dims(OP, "zero_expert_weights", weights, &[tokens])?;
                expect_dtype(OP, "zero_expert_weights", weights, DType::F32)?;
            }
            None if self.config.num_zero_experts > 0 => bail!(
                "{OP}: a router with {} zero experts needs the output zero_expert_weights [{tokens}] f32",
                self.config.num_zero_experts
            ),
            None => {}
        }
        Ok(tokens)
    }

    /// Checks that the data of the step covers these rows and this layer, and returns the end of the rows.
    pub(crate) fn check_step(
        &self,
        input: &RouteInput<'_>,
        tokens: usize,
        step: &StepContext,
    ) -> Result<usize> {
        let Some(end) = input.first_row.checked_add(tokens) else {
            bail!("{OP}: rows {} + {tokens} overflow", input.first_row)
        };
        for (name, routed) in [("replay", step.replay.as_deref()), ("capture", step.capture.as_ref())] {
            let Some(routed) = routed else { continue };
            let got = (routed.tokens(), routed.layers(), routed.top_k());
            if got.0 < end || got.1 <= input.layer || got.2 != self.config.top_k {
                bail!(
                    "{OP}: the {name} holds [{}, {}, {}] ids, too few for rows {}..{end} of MoE layer {} with \
                     top-{}",
                    got.0,
                    got.1,
                    got.2,
                    input.first_row,
                    input.layer,
                    self.config.top_k
                )
            }
        }
        if let Some(heat) = &step.heat {
            let experts = heat.layer(input.layer).len();
            if experts != self.config.num_experts {
                bail!(
                    "{OP}: expert heat must count {} experts in MoE layer {}, it counts {experts} there and has \
                     {} layers",
                    self.config.num_experts,
                    input.layer,
                    heat.layers()
                )
            }
        }
        if let Some(asked) = step.asks_of_router().filter(|_| step.routing.is_some()) {
            bail!(
                "{OP}: {asked} by way of host memory, while the step has routing arrays on a device; use one of them"
            )
        }
        if step.force_balance.is_some() && step.replay.is_some() {
            bail!("{OP}: force_balance and replay both dictate the experts; use one of them")
        }
        if step.force_balance.is_some() && self.config.top_k > self.config.num_experts {
            bail!(
                "{OP}: force_balance cannot give {} distinct experts out of {}",
                self.config.top_k,
                self.config.num_experts
            )
        }
        Ok(end)
    }
}
