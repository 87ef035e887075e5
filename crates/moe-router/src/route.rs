//! Routing of a step's rows: choice, force-balance, capture and heat, zero and shared experts.

use candle_core::Result;
use moe_kernels::{Exec, NO_EXPERT, StepContext, ViewMut};

use crate::io::{RouteInput, RouteOutput};
use crate::philox::{RowRng, Stream};
use crate::router::Router;
use crate::row::StepRows;

impl Router {
    /// Routes T rows: `topk_ids` [T, K] u32 and `topk_weights` [T, K] f32 of logical experts, in
    /// descending order of the selection key, ties to the lower id; fused shared slots last.
    ///
    /// The step's `context` takes part:
    /// - `token_ids`: needed by hash routing;
    /// - `replay`: forces the ids of a row (kept in the given order) unless they are all
    ///   [`NO_EXPERT`]; weights are computed from these logits at the forced ids;
    /// - `force_balance`: replaces the routed ids of each row by the start of a random permutation
    ///   of the experts, weights kept; not together with `replay`;
    /// - `capture` and `heat`: record the routed slots. Zero experts are captured with the
    ///   router's ids (E and above), so that a capture replays exactly; fused shared slots are
    ///   never recorded, because they are the same for every token. On an error nothing is.
    ///
    /// # Errors
    ///
    /// Wrong dims or dtypes; logits that are NaN, +inf, or -inf throughout, forced ids that are
    /// out of range or repeated, and token ids outside of the table (each names the row); a step
    /// context whose sizes do not fit. The outputs are then unspecified.
    ///
    /// With `isolate_faults` in the step context, logits without meaning are no error: their row gets its forced
    /// experts or the first ones, with weights NaN, and is captured and counted with them. Other rows are not affected.
    ///
    /// On CUDA the choice is the same bit for bit, but logits and token ids are not checked: a NaN is never chosen, and
    /// a slot without a choice gets [`NO_EXPERT`] and weight 0. Replay, token ids, simulation, capture and heat of the
    /// step context are in host memory, so using one waits for the device. `StepContext::routing` has the same for a
    /// whole step in arrays on the device, and waits for nothing.
    pub fn route_into(
        &self,
        input: &RouteInput<'_>,
        out: RouteOutput<'_>,
        context: &mut StepContext,
        ex: &mut Exec,
    ) -> Result<()> {
        let tokens = self.check_views(input, &out)?;
        let end = self.check_step(input, tokens, context)?;
        if tokens == 0 {
            return Ok(());
        }
        #[cfg(feature = "cuda")]
        if ex.is_cuda() {
            return self.route_on_device(input, out, context, ex);
        }
        let RouteOutput { mut topk_ids, mut topk_weights, zero_expert_weights } = out;
        let rows = self.step_rows(input, context);
        match &self.function {
            Some(function) => {
                self.choose_by_function(function.as_ref(), input, rows, &mut topk_ids, &mut topk_weights, ex)?
            }
            None => self.choose(input, rows, &mut topk_ids, &mut topk_weights, ex)?,
        }
        if let Some(seed) = context.force_balance {
            self.balance(rows, seed, topk_ids.cpu_mut()?);
        }
        let slots = self.config.num_slots();
        self.record(input, end, topk_ids.cpu_mut::<u32>()?.chunks_exact(slots), context)?;
        self.finish(topk_ids, topk_weights, zero_expert_weights)
    }

    /// Returns the step's rows, for rules that run on the host.
    pub(crate) fn step_rows<'a>(&self, input: &RouteInput<'_>, context: &'a StepContext) -> StepRows<'a> {
        StepRows {
            token_ids: context.token_ids.as_deref(),
            replay: context.replay.as_deref(),
            layer: input.layer,
            first_row: input.first_row,
            step: context.step,
            limit: self.config.num_logits(),
            isolate_faults: context.isolate_faults,
        }
    }

    /// Implements force-balance: each row's routed ids become the start of a random permutation.
    fn balance(&self, rows: StepRows<'_>, seed: u64, topk_ids: &mut [u32]) {
        for (t, ids) in topk_ids.chunks_exact_mut(self.config.num_slots()).enumerate() {
            let row = rows.first_row + t;
            let mut rng = RowRng::new(seed, Stream::ForceBalance, rows.step, rows.layer, row);
            rng.replace_distinct(self.config.num_experts as u32, &mut ids[..self.config.top_k]);
        }
    }

    /// Records the routed slots for capture and heat.
    pub(crate) fn record<'a>(
        &self,
        input: &RouteInput<'_>,
        end: usize,
        rows: impl Iterator<Item = &'a [u32]>,
        step: &mut StepContext,
    ) -> Result<()> {
        let top_k = self.config.top_k;
        for (row, ids) in (input.first_row..end).zip(rows) {
            if let Some(capture) = &mut step.capture {
                capture.set(row, input.layer, &ids[..top_k])?;
            }
            if let Some(heat) = &mut step.heat {
                // Ids of zero experts are above the counted range, so they are not counted.
                heat.record(input.layer, &ids[..top_k]);
            }
        }
        Ok(())
    }

    /// Removes zero experts from the slots, and appends the fused shared slots.
    fn finish(
        &self,
        mut topk_ids: ViewMut<'_>,
        mut topk_weights: ViewMut<'_>,
        zero_expert_weights: Option<ViewMut<'_>>,
    ) -> Result<()> {
        let config = &self.config;
        let top_k = config.top_k;
        let slots = config.num_slots();
        let rows = topk_ids.cpu_mut::<u32>()?.chunks_exact_mut(slots);
        let rows = rows.zip(topk_weights.cpu_mut::<f32>()?.chunks_exact_mut(slots));
        let mut zero_expert_weights = zero_expert_weights;
        let mut identity = match &mut zero_expert_weights {
            Some(weights) => weights.cpu_mut::<f32>()?,
            None => &mut [],
        };
        for (ids, weights) in rows {
            let (routed_ids, shared_ids) = ids.split_at_mut(top_k);
            let (routed_weights, shared_weights) = weights.split_at_mut(top_k);
            if let Some((sum, rest)) = std::mem::take(&mut identity).split_first_mut() {
                *sum = take_zero_experts(config.num_experts, routed_ids, routed_weights);
                identity = rest;
            }
            shared_ids.iter_mut().zip(config.num_experts as u32..).for_each(|(slot, id)| *slot = id);
            shared_weights.fill(config.fused_shared_weight);
        }
        Ok(())
    }
}

/// Clears the slots of zero experts and returns the sum of their weights, in the order of the slots.
fn take_zero_experts(num_experts: usize, ids: &mut [u32], weights: &mut [f32]) -> f32 {
    let mut sum = 0.0;
    for (id, w) in ids.iter_mut().zip(weights) {
        if *id != NO_EXPERT && *id as usize >= num_experts {
            sum += *w;
            (*id, *w) = (NO_EXPERT, 0.0);
        }
    }
    sum
}
