//! Gate and routing in one call. On a device one fused kernel can do both.
//!
//! Here it is the composition of a product with f32 logits and [`Router::route_into`]. The logits
//! are never rounded to the model dtype: a rounded logit makes ties that the model does not have.

use candle_core::{DType, Result};
use moe_kernels::arguments::{expect_dims, expect_dtype, expect_matrix};
use moe_kernels::plan::{Form, RouterForm};
use moe_kernels::{
    Exec, Log2Phy, StepContext, View, ViewMut, WeightView, copy_rows_into, linear_into, physical_ids_into,
};

use crate::check::GATE_OP;
use crate::io::{RouteInput, RouteOutput};
use crate::router::Router;

/// Hidden states, the gate, and their place in the step.
#[derive(Clone, Copy, Debug)]
pub struct GateInput<'a> {
    /// Hidden states [T, H] in the model dtype.
    pub hidden: View<'a>,
    /// Gate weight [num_experts + num_zero_experts, H], in any order; on a GPU in rows. It has the same dtype, or is in
    /// f32, and then the rows are widened to f32 for the product.
    pub weight: WeightView<'a>,
    /// Gate bias [num_experts + num_zero_experts] of the weight's dtype (gpt-oss). Part of the logits, unlike the
    /// correction bias.
    pub bias: Option<View<'a>>,
    /// MoE layer, as in [`RouteInput::layer`].
    pub layer: usize,
    /// First row, as in [`RouteInput::first_row`].
    pub first_row: usize,
    /// The table from chosen experts to the copies that compute them. With it, [`RouteOutput`] receives ids of copies.
    /// The step records and forces ids of experts in any case.
    pub log2phy: Option<Log2Phy<'a>>,
}

impl<'a> GateInput<'a> {
    /// A gate without bias over a whole step.
    pub fn new(hidden: View<'a>, weight: impl Into<WeightView<'a>>, layer: usize) -> Self {
        Self { hidden, weight: weight.into(), bias: None, layer, first_row: 0, log2phy: None }
    }

    /// `logits` [T, E] f32 = hidden · weightᵀ + bias, summed in f32.
    fn logits_into(&self, logits: ViewMut<'_>, ex: &mut Exec) -> Result<()> {
        let widens = self.weight.dtype() == DType::F32 && self.hidden.dtype() != DType::F32;
        if !widens {
            return linear_into(self.hidden, self.weight, self.bias, logits, ex);
        }
        let mut wide = ex.scratch(DType::F32, self.hidden.dims())?;
        copy_rows_into(self.hidden, wide.view_mut(), ex)?;
        linear_into(wide.view(), self.weight, self.bias, logits, ex)
    }
}

impl Router {
    /// Computes the router logits hidden · weightᵀ + bias in f32, then routes them as
    /// [`route_into`](Self::route_into) does. `router_logits` [T, E] f32 receives the logits for
    /// callers that want to see them. With [`GateInput::log2phy`] the ids are physical: of copies.
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
        let op = GATE_OP;
        let (tokens, size) = expect_matrix(op, "hidden_states", &input.hidden)?;
        let experts = self.config.num_logits();
        expect_dims(op, "gate weight", &input.weight, &[experts, size])?;
        let mut scratch;
        let mut logits = match router_logits {
            Some(logits) => logits,
            None => {
                scratch = ex.scratch(DType::F32, &[tokens, experts])?;
                scratch.view_mut()
            }
        };
        expect_dtype(op, "router_logits", &logits, DType::F32)?;
        #[cfg(feature = "cuda")]
        if self.is_one_launch(input, context, ex) {
            return self.gate_route(input, logits, out, context, ex);
        }
        let both = ex.launched_as_one(|| RouterForm::Apart.name());
        input.logits_into(logits.reborrow(), ex)?;
        let route = RouteInput {
            logits: logits.as_view(),
            hidden: Some(input.hidden),
            layer: input.layer,
            first_row: input.first_row,
        };
        let Some(log2phy) = &input.log2phy else { return self.route_into(&route, out, context, ex) };
        let RouteOutput { topk_ids, topk_weights, zero_expert_weights } = out;
        let mut chosen = ex.scratch(DType::U32, topk_ids.dims())?;
        let out = RouteOutput { topk_ids: chosen.view_mut(), topk_weights, zero_expert_weights };
        self.route_into(&route, out, context, ex)?;
        drop(both);
        physical_ids_into(chosen.view(), log2phy, topk_ids, ex)
    }
}

#[cfg(test)]
mod tests {
    use moe_kernels::Spread;

    use super::*;
    use crate::config::RouterConfig;
    use crate::router::RouterParams;

    #[test]
    fn chosen_experts_become_their_copies() -> Result<()> {
        // Expert e has column e of a row as its logit. Experts 0 and 3 have two copies.
        let hidden = [3f32, 1., 2., 0., 0., 1., 2., 3.];
        let weight = [1f32, 0., 0., 0., 0., 1., 0., 0., 0., 0., 1., 0., 0., 0., 0., 1.];
        let table = [4i32, 5, 1, -1, 2, -1, 0, 3];
        let log2phy = Log2Phy { ids: View::new(&table, &[4, 2])?, spread: Spread::InTurns, first_row: 1 };
        let router = Router::new(
            RouterConfig { renormalize: true, ..RouterConfig::new(4, 2) },
            RouterParams::default(),
        )?;
        let mut heat =
            StepContext { heat: Some(moe_kernels::ExpertHeat::new(1, 4)), ..StepContext::default() };
        let mut route = |log2phy| -> Result<([u32; 4], [f32; 4])> {
            let mut ids = [9; 4];
            let mut weights = [0.0; 4];
            let out = RouteOutput {
                topk_ids: ViewMut::new(&mut ids, &[2, 2])?,
                topk_weights: ViewMut::new(&mut weights, &[2, 2])?,
                zero_expert_weights: None,
            };
            let hidden = View::new(&hidden, &[2, 4])?;
            let weight = View::new(&weight, &[4, 4])?;
            let input = GateInput { log2phy, ..GateInput::new(hidden, weight, 0) };
            router.gate_and_route_into(&input, None, out, &mut heat, &mut Exec::cpu())?;
            Ok((ids, weights))
        };
        let (chosen, weights) = route(None)?;
        assert_eq!(chosen, [0, 2, 3, 2]);
        // Row 0 has the number 1, so it uses copy (1 + 0) % 2 of expert 0 and copy (2 + 3) % 2 of expert 3.
        assert_eq!(route(Some(log2phy))?, ([5, 2, 3, 2], weights));
        assert_eq!(heat.heat.map(|heat| heat.layer(0).to_vec()), Some(vec![2, 0, 4, 2]));
        Ok(())
    }
}
