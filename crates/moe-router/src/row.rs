//! Routes one token row: chooses its experts or takes forced ones, and then computes the weights.

use candle_core::{Result, bail};
use moe_kernels::{NO_EXPERT, RoutedExperts};

use crate::config::{RouterConfig, Selection};
use crate::philox::{RowRng, Stream};
use crate::score::{ids_fault, logits_fault, score_row, weigh_row};
use crate::select::{GroupScore, GroupScratch, grouped_top_k, top_k_row};
use crate::simulate::RoutingStrategy;

/// The place of rows in their step, and the data of the step that forces their routing.
#[derive(Clone, Copy)]
pub(crate) struct StepRows<'a> {
    /// Token ids of the step's rows.
    pub token_ids: Option<&'a [u32]>,
    /// Forced routing of the step's rows.
    pub replay: Option<&'a RoutedExperts>,
    /// MoE layer.
    pub layer: usize,
    /// The row of the step that is row 0 of the call.
    pub first_row: usize,
    /// Number of the step.
    pub step: u64,
    /// Ids must be below this number.
    pub limit: usize,
    /// The same as [`StepContext::isolate_faults`](moe_kernels::StepContext::isolate_faults).
    pub isolate_faults: bool,
}

impl<'a> StepRows<'a> {
    /// Names a row in messages.
    pub fn place(&self, t: usize) -> String {
        format!("row {} of MoE layer {}", self.first_row + t, self.layer)
    }

    /// Returns the forced ids of row `t`, or `None` if its routing is not forced.
    pub fn forced(&self, t: usize) -> Result<Option<&'a [u32]>> {
        let Some(replay) = self.replay else { return Ok(None) };
        let ids = replay.get(self.first_row + t, self.layer)?;
        if ids.iter().all(|&id| id == NO_EXPERT) {
            return Ok(None);
        }
        match ids_fault(ids, self.limit) {
            Some(fault) => bail!("replayed routing, {}: {fault}", self.place(t)),
            None => Ok(Some(ids)),
        }
    }

    /// Checks that a routing function has chosen existing, distinct experts for row `t`.
    pub fn check_chosen(&self, t: usize, function: &str, ids: &[u32]) -> Result<()> {
        match ids_fault(ids, self.limit) {
            Some(fault) => bail!("routing function `{function}`, {}: {fault}", self.place(t)),
            None => Ok(()),
        }
    }

    /// Computes ids and weights of row `t` by a simulation strategy. Forced ids replace the strategy's.
    pub fn simulate(
        &self,
        t: usize,
        strategy: &dyn RoutingStrategy,
        seed: u64,
        forced: Option<&[u32]>,
        topk_ids: &mut [u32],
        topk_weights: &mut [f32],
    ) -> Result<()> {
        let StepRows { layer, first_row, step, limit, .. } = *self;
        let rng = |stream| RowRng::new(seed, stream, step, layer, first_row + t);
        match forced {
            Some(ids) => topk_ids.copy_from_slice(ids),
            None => strategy.select(&mut rng(Stream::SimulatedIds), limit as u32, topk_ids),
        }
        if let Some(fault) = ids_fault(topk_ids, limit) {
            bail!("routing simulation, {}: {fault}", self.place(t))
        }
        strategy.weigh(&mut rng(Stream::SimulatedWeights), topk_weights);
        for (w, &id) in topk_weights.iter_mut().zip(topk_ids.iter()) {
            if id == NO_EXPERT {
                *w = 0.0;
            }
        }
        Ok(())
    }

    /// Whether a row of logits can be routed. If it cannot, that is an error unless the step isolates faults.
    pub fn is_sound(&self, t: usize, logits: &[f32]) -> Result<bool> {
        match logits_fault(logits) {
            None => Ok(true),
            Some(_) if self.isolate_faults => Ok(false),
            Some(fault) => bail!("router_logits, {}: {fault}", self.place(t)),
        }
    }

    /// Gives a row that cannot be routed existing experts, the forced ones or the first ones, and the weight NaN, so
    /// that its results are NaN.
    pub fn spoil(forced: Option<&[u32]>, topk_ids: &mut [u32], topk_weights: &mut [f32]) {
        match forced {
            Some(ids) => topk_ids.copy_from_slice(ids),
            None => topk_ids.iter_mut().zip(0..).for_each(|(id, expert)| *id = expert),
        }
        for (w, &id) in topk_weights.iter_mut().zip(topk_ids.iter()) {
            *w = if id == NO_EXPERT { 0.0 } else { f32::NAN };
        }
    }
}

/// Everything on which a row's routing depends in addition to its logits.
pub(crate) struct RowRouter<'a> {
    pub config: &'a RouterConfig,
    pub bias: Option<&'a [f32]>,
    pub table: Option<&'a [u32]>,
    pub strategy: Option<&'a dyn RoutingStrategy>,
    pub rows: StepRows<'a>,
}

/// The scratch of one thread, as parts of two slices.
pub(crate) struct RowScratch<'a> {
    scores: &'a mut [f32],
    keys: &'a mut [f32],
    best: &'a mut [f32],
    groups: &'a mut [u32],
}

impl<'a> RowScratch<'a> {
    /// The numbers of f32 and u32 values that a row of this configuration needs.
    pub fn sizes(config: &RouterConfig) -> (usize, usize) {
        let groups = topk_group(config).max(1);
        (2 * config.num_logits() + config.top_k.max(groups), groups)
    }

    pub fn new(config: &RouterConfig, floats: &'a mut [f32], ids: &'a mut [u32]) -> Self {
        let (scores, rest) = floats.split_at_mut(config.num_logits());
        let (keys, best) = rest.split_at_mut(config.num_logits());
        Self { scores, keys, best, groups: &mut ids[..topk_group(config)] }
    }
}

fn topk_group(config: &RouterConfig) -> usize {
    match config.selection {
        Selection::Grouped { topk_group, .. } => topk_group,
        _ => 0,
    }
}

impl RowRouter<'_> {
    /// Calls [`route`](Self::route) for consecutive rows, from row `first` of the call on.
    pub fn route_rows(
        &self,
        first: usize,
        logits: &[f32],
        scratch: &mut RowScratch<'_>,
        topk_ids: &mut [u32],
        topk_weights: &mut [f32],
    ) -> Result<()> {
        let slots = self.config.num_slots();
        let top_k = self.config.top_k;
        let rows = topk_ids.chunks_exact_mut(slots).zip(topk_weights.chunks_exact_mut(slots));
        let rows = rows.zip(logits.chunks_exact(self.config.num_logits()));
        for (t, ((ids, weights), logits)) in (first..).zip(rows) {
            self.route(t, logits, scratch, &mut ids[..top_k], &mut weights[..top_k])?;
        }
        Ok(())
    }

    /// Routes row `t` of the call: fills the routed slots' ids and weights. Zero experts
    /// still have the router's ids, E and above.
    fn route(
        &self,
        t: usize,
        logits: &[f32],
        scratch: &mut RowScratch<'_>,
        topk_ids: &mut [u32],
        topk_weights: &mut [f32],
    ) -> Result<()> {
        let forced = self.rows.forced(t)?;
        if let (Some(strategy), Selection::Simulated { seed, .. }) = (self.strategy, &self.config.selection) {
            return self.rows.simulate(t, strategy, *seed, forced, topk_ids, topk_weights);
        }
        if !self.rows.is_sound(t, logits)? {
            StepRows::spoil(forced, topk_ids, topk_weights);
            return Ok(());
        }
        score_row(self.config, logits, scratch.scores);
        match forced {
            Some(ids) => topk_ids.copy_from_slice(ids),
            None => self.select(t, scratch, topk_ids)?,
        }
        weigh_row(self.config, scratch.scores, topk_ids, topk_weights);
        Ok(())
    }

    fn select(&self, t: usize, scratch: &mut RowScratch<'_>, topk_ids: &mut [u32]) -> Result<()> {
        if let (Selection::Hash { vocab_size }, Some(table)) = (&self.config.selection, self.table) {
            return self.look_up(t, *vocab_size, table, topk_ids);
        }
        let RowScratch { scores, keys, best, groups } = scratch;
        let keys: &[f32] = match self.bias {
            Some(bias) => {
                for ((key, score), bias) in keys.iter_mut().zip(scores.iter()).zip(bias) {
                    *key = score + bias;
                }
                keys
            }
            None => scores,
        };
        match self.config.selection {
            Selection::Grouped { num_expert_group, .. } => {
                let score = if self.bias.is_some() { GroupScore::TopTwoSum } else { GroupScore::Max };
                let scratch = GroupScratch { ids: groups, best };
                grouped_top_k(keys, num_expert_group, score, topk_ids, scratch);
            }
            _ => top_k_row(keys, topk_ids, best),
        }
        Ok(())
    }

    /// Fills the ids that the table has for the row's token, in the table's order.
    fn look_up(&self, t: usize, vocab_size: usize, table: &[u32], topk_ids: &mut [u32]) -> Result<()> {
        let row = self.rows.first_row + t;
        let Some(&token) = self.rows.token_ids.and_then(|ids| ids.get(row)) else {
            bail!("hash routing, {}: the step carries no token id for this row", self.rows.place(t))
        };
        let at = token as usize * topk_ids.len();
        match table.get(at..at + topk_ids.len()) {
            Some(ids) => topk_ids.copy_from_slice(ids),
            None => bail!(
                "hash routing, {}: token id {token} is outside of the vocabulary of {vocab_size}",
                self.rows.place(t)
            ),
        }
        Ok(())
    }
}
