//! Routing on a CUDA device. Every method is one launch and makes the same choices as on the CPU.
//!
//! The parts of the step context in host memory are copied to the device and back. A step whose routing is in arrays on
//! the device (`StepContext::routing`), or that has none, needs no copy.

use candle_core::{DType, Result, bail};
use moe_kernels::cuda::{Choice, Route, RouteOut, balance_ids_into, route_into};
use moe_kernels::{Exec, ForcedWeights, LayerRouting, NO_EXPERT, Scratch, StepContext, TensorView, View};

use crate::config::Selection;
use crate::custom::RoutingFunction;
use crate::fused::gate_scoring;
use crate::io::{RouteInput, RouteOutput};
use crate::router::Router;

/// Ids and weights [T, K] that do not come from logits.
struct Given {
    ids: Scratch,
    weights: Scratch,
}

impl Router {
    /// Does the work of [`route_into`](Self::route_into) on the device of `ex`. The arguments have been checked.
    pub(crate) fn route_on_device(
        &self,
        input: &RouteInput<'_>,
        out: RouteOutput<'_>,
        context: &mut StepContext,
        ex: &mut Exec,
    ) -> Result<()> {
        let config = &self.config;
        let tokens = input.logits.rows();
        let forced = self.forced_on_host(input, context, ex)?;
        let recorded = context.capture.is_some() || context.heat.is_some();
        let ids = recorded.then(|| ex.scratch(DType::U32, &[tokens, config.top_k])).transpose()?;
        let routing = match context.asks_of_router() {
            Some(_) => LayerRouting {
                heat: None,
                routed: ids.as_ref().map(|ids| ids.view()),
                forced: forced.as_ref().map(|(ids, weights)| (ids.view(), *weights)),
                stride: config.top_k,
            },
            None => context.routing.layer(input.layer, input.first_row)?,
        };
        let token_ids = self.token_ids(input, context, ex)?;
        let given = self.given(input, &routing, context, ex)?;
        let bias = self.bias.as_ref().map(TensorView::new).transpose()?;
        let table = self.table.as_ref().map(TensorView::new).transpose()?;
        let route = Route {
            choice: match (&config.selection, &given, &table, &token_ids) {
                (_, Some(given), ..) => {
                    Choice::Given { ids: given.ids.view(), weights: Some(given.weights.view()) }
                }
                (Selection::Hash { .. }, _, Some(table), Some(token_ids)) => {
                    Choice::Hash { table: table.view()?, token_ids: token_ids.view() }
                }
                (Selection::Hash { .. }, ..) => {
                    bail!("hash routing: the step carries no token ids for its rows")
                }
                (&Selection::Grouped { num_expert_group: groups, topk_group }, ..) => {
                    Choice::Grouped { groups, topk_group, top_two: config.correction_bias }
                }
                (Selection::RawLogits, ..) => Choice::RawLogits,
                _ => Choice::TopK,
            },
            bias: bias.as_ref().map(TensorView::view).transpose()?,
            shared: (config.num_fused_shared_experts, config.fused_shared_weight),
            routing,
            ..self.plain(input, context)
        };
        let out = RouteOut {
            topk_ids: out.topk_ids,
            topk_weights: out.topk_weights,
            zero_weights: out.zero_expert_weights,
        };
        route_into(&route, out, ex)?;
        let Some(ids) = ids else { return Ok(()) };
        let ids = ex.to_host(ids.view())?;
        let rows = ids.view().cpu::<u32>()?.chunks_exact(config.top_k);
        self.record(input, input.first_row + tokens, rows, context)
    }

    /// Returns a routing by the best scores, without a bias and without data of the step.
    fn plain<'a>(&self, input: &RouteInput<'a>, context: &StepContext) -> Route<'a> {
        let config = &self.config;
        Route {
            logits: input.logits,
            bias: None,
            choice: Choice::TopK,
            scoring: gate_scoring(config.scoring),
            experts: config.num_experts,
            top_k: config.top_k,
            shared: (0, 0.0),
            renormalize: config.renormalize,
            scale: config.routed_scaling_factor,
            softcap: config.softcapping,
            routing: LayerRouting::default(),
            padded: context.padded,
        }
    }

    /// Returns the ids [T, K] that host memory forces, checked and copied to the device.
    fn forced_on_host(
        &self,
        input: &RouteInput<'_>,
        context: &StepContext,
        ex: &Exec,
    ) -> Result<Option<(Scratch, ForcedWeights)>> {
        let tokens = input.logits.rows();
        let top_k = self.config.top_k;
        if let Some(seed) = context.force_balance {
            let step = ex.scratch_from_host(View::new(&[context.step as u32], &[1])?)?;
            let mut ids = ex.scratch(DType::U32, &[tokens, 1, top_k])?;
            let place = (input.first_row, input.layer);
            balance_ids_into(seed, step.view(), place, self.config.num_experts, ids.view_mut(), ex)?;
            return Ok(Some((ids, ForcedWeights::OfChosen)));
        }
        if context.replay.is_none() {
            return Ok(None);
        }
        let rows = self.step_rows(input, context);
        let mut ids = vec![NO_EXPERT; tokens * top_k];
        for (t, ids) in ids.chunks_exact_mut(top_k).enumerate() {
            if let Some(forced) = rows.forced(t)? {
                ids.copy_from_slice(forced);
            }
        }
        Ok(Some((ex.scratch_from_host(View::new(&ids, &[tokens, top_k])?)?, ForcedWeights::OfForced)))
    }

    /// Returns the token ids \[T\] of hash routing, on the device.
    fn token_ids(&self, input: &RouteInput<'_>, context: &StepContext, ex: &Exec) -> Result<Option<Scratch>> {
        if !matches!(self.config.selection, Selection::Hash { .. }) {
            return Ok(None);
        }
        let rows = input.first_row..input.first_row + input.logits.rows();
        match context.token_ids.as_deref().and_then(|ids| ids.get(rows.clone())) {
            Some(ids) => ex.scratch_from_host(View::new(ids, &[rows.len()])?).map(Some),
            None => Ok(None),
        }
    }

    /// Returns the choices of a routing function or a simulation, including forced ids.
    fn given(
        &self,
        input: &RouteInput<'_>,
        routing: &LayerRouting<'_>,
        context: &StepContext,
        ex: &mut Exec,
    ) -> Result<Option<Given>> {
        let dims = [input.logits.rows(), self.config.top_k];
        if let (Some(strategy), &Selection::Simulated { seed, .. }) = (&self.strategy, &self.config.selection)
        {
            let rows = self.step_rows(input, context);
            let mut ids = vec![0u32; dims[0] * dims[1]];
            let mut weights = vec![0f32; dims[0] * dims[1]];
            let slots = ids.chunks_exact_mut(dims[1]).zip(weights.chunks_exact_mut(dims[1]));
            for (t, (ids, weights)) in slots.enumerate() {
                rows.simulate(t, strategy.as_ref(), seed, rows.forced(t)?, ids, weights)?;
            }
            let ids = View::new(&ids, &dims)?;
            let weights = View::new(&weights, &dims)?;
            return Ok(Some(Given {
                ids: ex.scratch_from_host(ids)?,
                weights: ex.scratch_from_host(weights)?,
            }));
        }
        let Some(function) = &self.function else { return Ok(None) };
        let mut ids = ex.scratch(DType::U32, &dims)?;
        let mut weights = ex.scratch(DType::F32, &dims)?;
        function.select(&self.config, input, ids.view_mut(), ex)?;
        self.check_chosen(function.as_ref(), input, ids.view(), context, ex)?;
        if let Some((_, ForcedWeights::OfForced)) = routing.forced {
            let mut forced = ex.scratch(DType::U32, &dims)?;
            let choice = Choice::Given { ids: ids.view(), weights: None };
            let routing = LayerRouting { heat: None, routed: None, ..*routing };
            let route = Route { choice, routing, ..self.plain(input, context) };
            let out = RouteOut {
                topk_ids: forced.view_mut(),
                topk_weights: weights.view_mut(),
                zero_weights: None,
            };
            route_into(&route, out, ex)?;
            ids = forced;
        }
        function.weigh(&self.config, input, ids.view(), weights.view_mut(), ex)?;
        Ok(Some(Given { ids, weights }))
    }

    /// Checks that the ids [T, K] of a routing function keep the promises of [`RoutingFunction::select`], except in
    /// forced rows.
    fn check_chosen(
        &self,
        function: &dyn RoutingFunction,
        input: &RouteInput<'_>,
        ids: View<'_>,
        context: &StepContext,
        ex: &Exec,
    ) -> Result<()> {
        let rows = self.step_rows(input, context);
        let ids = ex.to_host(ids)?;
        for (t, ids) in ids.view().cpu::<u32>()?.chunks_exact(self.config.top_k).enumerate() {
            if rows.forced(t)?.is_none() {
                rows.check_chosen(t, function.name(), ids)?;
            }
        }
        Ok(())
    }
}
