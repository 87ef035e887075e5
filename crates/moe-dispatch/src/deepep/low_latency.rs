//! The form with fixed sizes: what decoding in a captured graph wants.
//!
//! Every rank sends every rank a block of rows with the ids of all their slots, of the most tokens that a
//! rank brings to the step: known before it, from no routing. A row that is not needed there is not copied
//! into the block, and unused rows of it carry no expert. What arrives is sorted into the batched rows of
//! each local expert, and slot rows go back in blocks of a fixed size too.

use candle_core::{DType, Result, bail};
use moe_kernels::{
    ActivationFormat, Dispatched, Exec, NO_EXPERT, RowBatches, Scratch, View, batch_rows_into,
    group_slots_into,
};

use crate::allgather::arrivals;
use crate::combine::Returns;
use crate::exchange::Exchange;
use crate::ranks::EpRanks;
use crate::rows::{Layout, RowLists, pack_ids, pack_rows};
use crate::tokens::Tokens;
use crate::transport::{Collective, Sent, Transport};

/// The backend `deepep` in its mode `low_latency`.
#[derive(Debug)]
pub struct LowLatency {
    ranks: EpRanks,
    transport: Box<dyn Transport>,
    max_num_tokens: usize,
}

const NAME: &str = "deepep low_latency";

/// A dispatch whose rows are on their way.
#[derive(Debug)]
pub struct Dispatching<'a> {
    topk_ids: View<'a>,
    topk_weights: View<'a>,
    hidden_size: usize,
    dtype: DType,
    rows: Sent,
    ids: Scratch,
    /// Rows from and to each rank.
    block: usize,
}

impl LowLatency {
    /// For at most `max_num_tokens` tokens per rank and call, with the collectives of the ranks'
    /// communicator.
    pub fn new(ranks: EpRanks, max_num_tokens: usize) -> Self {
        let transport = Collective(ranks.ep.clone());
        Self::with_transport(ranks, max_num_tokens, transport)
    }

    /// Over another transport between the same ranks.
    pub fn with_transport(
        ranks: EpRanks,
        max_num_tokens: usize,
        transport: impl Transport + 'static,
    ) -> Self {
        Self { ranks, transport: Box::new(transport), max_num_tokens }
    }

    /// The most tokens that a rank owns in this step: rows of a block.
    fn block(&self, tokens: usize, agreed: Option<&[usize]>, ex: &mut Exec) -> Result<usize> {
        let owned = self.ranks.owned_counts(&self.ranks.rank_tokens(NAME, tokens, agreed, ex)?);
        Ok(owned.into_iter().max().unwrap_or(0))
    }

    /// How rows get back, from the ids that arrived in blocks and where their slots were sorted to.
    fn returns(
        &self,
        topk_ids: View,
        (ids, block): (&[u32], usize),
        offsets: &[u32],
        slots: &[u32],
    ) -> Result<Returns> {
        let ranks = self.ranks.world_size();
        let (total, top_k) = (block * ranks, topk_ids.dims().get(1).copied().unwrap_or(0));
        let mut row_of_slot = vec![0u32; ids.len()];
        for (expert, bounds) in offsets.windows(2).enumerate() {
            let group = slots.get(bounds[0] as usize..bounds[1] as usize).unwrap_or(&[]);
            for (row, &slot) in group.iter().enumerate() {
                if let Some(place) = row_of_slot.get_mut(slot as usize) {
                    *place = (expert * total + row) as u32;
                }
            }
        }
        let blocks: Vec<_> = (0..ranks).map(|rank| rank * block..(rank + 1) * block).collect();
        let mut send: RowLists = self.ranks.computed_slots(NAME, ids, top_k, &blocks)?;
        for row in &mut send.rows {
            *row = row_of_slot.get(first_slot(ids, top_k, *row as usize)).copied().unwrap_or(0);
        }
        let owned = self.ranks.owned(topk_ids.rows());
        let receive = self.ranks.slots_by_rank(NAME, topk_ids.narrow(owned.start, owned.len())?.cpu()?)?;
        let layout = Layout::Fixed(block * top_k);
        Ok(Returns { backend: NAME, send, receive, owned, layout })
    }
}

/// The ids of each row [K] without repetition: a row has one place in an expert's block, also where
/// a recording or a random router names the expert twice.
fn name_once(ids: &[u32], top_k: usize, once: &mut [u32]) {
    for (slot, (&id, once)) in ids.iter().zip(once).enumerate() {
        *once = if first_slot(ids, top_k, slot) == slot { id } else { NO_EXPERT };
    }
}

/// The first slot of the same row with the same expert.
fn first_slot(ids: &[u32], top_k: usize, slot: usize) -> usize {
    let row = slot - slot % top_k.max(1);
    (row..slot).find(|&earlier| ids.get(earlier) == ids.get(slot)).unwrap_or(slot)
}

impl Exchange for LowLatency {
    const NAME: &'static str = NAME;
    const FORMAT: ActivationFormat = ActivationFormat::BatchedExperts;
    type Dispatching<'a> = Dispatching<'a>;

    fn ranks(&self) -> &EpRanks {
        &self.ranks
    }

    fn transport(&self) -> &dyn Transport {
        self.transport.as_ref()
    }

    fn max_num_tokens(&self) -> Option<usize> {
        Some(self.max_num_tokens)
    }

    fn max_rows(&self, tokens: usize) -> usize {
        arrivals(&self.ranks, tokens.min(self.max_num_tokens))
    }

    fn dispatch_a<'a>(
        &'a self,
        hidden: View<'a>,
        topk_ids: View<'a>,
        topk_weights: View<'a>,
        agreed: Option<&[usize]>,
        ex: &mut Exec,
    ) -> Result<Dispatching<'a>> {
        let tokens = Tokens::check(NAME, hidden, topk_ids, topk_weights)?;
        if hidden.rows() > self.max_num_tokens {
            bail!(
                "{NAME}: expected at most {} tokens per rank, got {}; cut them into chunks or use the mode \
                 high_throughput",
                self.max_num_tokens,
                hidden.rows()
            )
        }
        let owned = self.ranks.owned(hidden.rows());
        let ids = topk_ids.narrow(owned.start, owned.len())?;
        let lists = self.ranks.tokens_by_rank(NAME, ids.cpu()?, tokens.top_k)?;
        let block = self.block(hidden.rows(), agreed, ex)?;
        let layout = Layout::Fixed(block);
        let input = tokens.input_rows(self.ranks.router_weight_on_input, ex)?;
        let packed = pack_rows(NAME, input.view().narrow(owned.start, owned.len())?, &lists, layout, ex)?;
        let ids = pack_ids(NAME, ids, &lists, layout, ex)?;
        let rows = self.transport.start(packed, layout.counts(&lists.counts), ex)?;
        let (hidden_size, dtype) = (tokens.hidden_size(), hidden.dtype());
        Ok(Dispatching { topk_ids, topk_weights, hidden_size, dtype, rows, ids, block })
    }

    fn dispatch_b<'a>(&'a self, begun: Dispatching<'a>, ex: &mut Exec) -> Result<Dispatched<'a>> {
        let Dispatching { topk_ids, topk_weights, hidden_size, dtype, rows: sent, ids: sent_ids, block } =
            begun;
        let ranks = self.ranks.world_size();
        let (total, top_k) = (block * ranks, topk_ids.dims().get(1).copied().unwrap_or(0));
        let mut arrived = ex.scratch(dtype, &[total, hidden_size])?;
        self.transport.finish(sent, arrived.view_mut(), &vec![block; ranks], ex)?;
        let mut ids = ex.scratch(DType::U32, &[total, top_k])?;
        self.ranks.ep.all_to_all(sent_ids.view(), ids.view_mut(), ex)?;

        let (experts, local) = (self.ranks.local_experts(), self.ranks.local_experts().num_local());
        let mut offsets = ex.scratch(DType::U32, &[local + 1])?;
        let mut slots = ex.scratch(DType::U32, &[total * top_k])?;
        let mut once = ex.scratch(DType::U32, &[total, top_k])?;
        name_once(ids.view().cpu()?, top_k, once.view_mut().cpu_mut()?);
        group_slots_into(once.view(), experts.expert_map(), offsets.view_mut(), slots.view_mut(), ex)?;
        let batches = RowBatches { offsets: offsets.view(), slots: slots.view(), top_k };
        let mut rows = ex.scratch(dtype, &[local, total, hidden_size])?;
        let mut counts = ex.scratch(DType::U32, &[local])?;
        batch_rows_into(arrived.view(), &batches, rows.view_mut(), counts.view_mut(), ex)?;

        let returns =
            self.returns(topk_ids, (ids.view().cpu()?, block), offsets.view().cpu()?, slots.view().cpu()?)?;
        let mut dispatched = Dispatched::batched(rows, counts, topk_ids, topk_weights);
        dispatched.expert_map = experts.expert_map();
        dispatched.weights_applied = self.ranks.router_weight_on_input;
        Ok(dispatched.with_handle(returns))
    }
}
