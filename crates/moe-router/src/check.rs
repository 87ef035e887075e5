//! The door of routing: dtypes, dims, and a step context that fits.

use candle_core::{DType, Result, bail};
use moe_kernels::StepContext;
use moe_kernels::door::{expect_dims, expect_dtype, expect_matrix};

use crate::io::{RouteInput, RouteOutput};
use crate::router::Router;

const OP: &str = "route";

impl Router {
    /// Dtypes and dims; returns T.
    pub(crate) fn check_views(&self, input: &RouteInput<'_>, out: &RouteOutput<'_>) -> Result<usize> {
        let (tokens, _) = expect_matrix(OP, "router_logits", &input.logits)?;
        expect_dims(OP, "router_logits", &input.logits, &[tokens, self.config.num_logits()])?;
        expect_dtype(OP, "router_logits", &input.logits, DType::F32)?;
        if let Some(hidden) = &input.hidden {
            let (_, size) = expect_matrix(OP, "hidden_states", hidden)?;
            expect_dims(OP, "hidden_states", hidden, &[tokens, size])?;
        }
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

    /// What the step carries must cover these rows and this layer; returns the end of the rows.
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
