//! Gate and route in one call: the seam at which a device with a fused kernel replaces both.
//!
//! Here it is the composition of a product with f32 logits and [`Router::route_into`]. The logits
//! are never rounded to the model dtype: a rounded logit makes ties that the model does not have.

use candle_core::{DType, Result};
use moe_kernels::door::{expect_dims, expect_dtype, expect_matrix};
use moe_kernels::{Exec, StepContext, View, ViewMut, WeightView, linear_into};

use crate::router::{RouteInput, RouteOutput, Router};

/// Hidden states, the gate, and their place in the step.
#[derive(Clone, Copy, Debug)]
pub struct GateInput<'a> {
    /// Hidden states [T, H] in the model dtype.
    pub hidden: View<'a>,
    /// Gate weight [num_experts + num_zero_experts, H], same dtype, in any order; on a GPU in rows.
    pub weight: WeightView<'a>,
    /// Gate bias [num_experts + num_zero_experts], same dtype (gpt-oss). Part of the logits,
    /// unlike the correction bias.
    pub bias: Option<View<'a>>,
    /// MoE layer, as in [`RouteInput::layer`].
    pub layer: usize,
    /// First row, as in [`RouteInput::first_row`].
    pub first_row: usize,
}

impl<'a> GateInput<'a> {
    /// A gate without bias over a whole step.
    pub fn new(hidden: View<'a>, weight: impl Into<WeightView<'a>>, layer: usize) -> Self {
        Self { hidden, weight: weight.into(), bias: None, layer, first_row: 0 }
    }
}

impl Router {
    /// Computes the router logits hidden · weightᵀ + bias in f32, then routes them as
    /// [`route_into`](Self::route_into) does. `router_logits` [T, E] f32 receives the logits for
    /// callers that want to see them.
    ///
    /// # Errors
    ///
    /// Wrong dims or dtypes, and everything that [`route_into`](Self::route_into) refuses.
    pub fn gate_and_route_into(
        &self,
        input: &GateInput<'_>,
        router_logits: Option<ViewMut<'_>>,
        out: RouteOutput<'_>,
        context: &mut StepContext,
        ex: &mut Exec,
    ) -> Result<()> {
        let op = "gate_and_route";
        let (tokens, size) = expect_matrix(op, "hidden_states", &input.hidden)?;
        let experts = self.config.num_logits();
        expect_dims(op, "gate weight", &input.weight, &[experts, size])?;
        let mut scratch = match router_logits {
            Some(_) => None,
            None => Some(ex.scratch(DType::F32, &[tokens, experts])?),
        };
        let Some(mut logits) = router_logits.or(scratch.as_mut().map(|s| s.view_mut())) else {
            return Ok(());
        };
        expect_dtype(op, "router_logits", &logits, DType::F32)?;
        #[cfg(feature = "cuda")]
        if self.is_one_launch(input.hidden, context, ex) {
            return self.gate_route(input, logits, out, context, ex);
        }
        linear_into(input.hidden, input.weight, input.bias, logits.reborrow(), ex)?;
        let input = RouteInput {
            logits: logits.as_view(),
            hidden: Some(input.hidden),
            layer: input.layer,
            first_row: input.first_row,
        };
        self.route_into(&input, out, context, ex)
    }
}
