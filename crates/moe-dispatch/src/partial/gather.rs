//! `allgather_reducescatter` and `deepep low_latency`: tokens, ids and weights of all ranks are gathered,
//! each rank sums the slots of its experts, and a reduce-scatter adds the sums at the tokens' owners.
//!
//! How many tokens each rank brings is agreed on the host before the step, so no size depends on data;
//! steps that are padded alike on all ranks can be captured into a graph. A transport whose messages have
//! sizes known to the host moves a fixed block whole however few of its rows are needed: there, the low
//! latency form of `deepep` is this gathering, with batched rows for the experts.

use std::sync::Arc;

use candle_core::{DType, Result};
use moe_comm::ReduceOp;
use moe_kernels::{
    ActivationFormat, Dispatched, Exec, RowBatches, Scratch, View, ViewMut, WeightAndReduce, batch_rows_into,
    group_slots_into,
};

use super::partial_sums;
use crate::allgather::arrivals;
use crate::local_experts::LocalExperts;
use crate::prepare_finalize::PrepareFinalize;
use crate::ranks::EpRanks;
use crate::tokens::Tokens;

/// Sums of gathered tokens, added by a reduce-scatter.
#[derive(Debug)]
pub struct SumGather {
    name: &'static str,
    ranks: EpRanks,
    /// Rows are handed over in the BatchedExperts format, of at most so many tokens per rank and call.
    max_num_tokens: Option<usize>,
}

/// What finalize needs again.
#[derive(Debug)]
struct Gathered {
    /// Tokens that each rank owns.
    counts: Vec<usize>,
    /// Ids and weights [sum(counts), K], where the dispatched rows do not carry them.
    slots: Option<(Scratch, Scratch)>,
}

impl SumGather {
    /// `allgather_reducescatter`, in the Standard format.
    pub fn standard(ranks: EpRanks) -> Self {
        Self { name: "allgather_reducescatter", ranks, max_num_tokens: None }
    }

    /// `deepep low_latency`, in the BatchedExperts format, for at most `max_num_tokens` tokens per rank and
    /// call. A row that names an expert twice takes two of its rows; rows beyond the expert's block are
    /// refused on the CPU and left out on a device.
    pub fn batched(ranks: EpRanks, max_num_tokens: usize) -> Self {
        Self { name: "deepep low_latency", ranks, max_num_tokens: Some(max_num_tokens) }
    }

    /// The owned rows of all ranks, [sum(counts), ..].
    fn gather(&self, rows: View, counts: &[usize], ex: &mut Exec) -> Result<Scratch> {
        let owned = self.ranks.owned(rows.rows());
        let total: usize = counts.iter().sum();
        let mut all = ex.scratch(rows.dtype(), &[total, rows.dims().get(1).copied().unwrap_or(0)])?;
        self.ranks.ep.all_gather_v(rows.narrow(owned.start, owned.len())?, counts, all.view_mut(), ex)?;
        Ok(all)
    }

    /// The gathered rows sorted by local expert, [E_local, total, H], with the rows of each.
    fn batch(&self, rows: View, ids: View, ex: &mut Exec) -> Result<(Scratch, Scratch)> {
        let (experts, local) = (self.ranks.local_experts(), self.ranks.local_experts().num_local());
        let mut offsets = ex.scratch(DType::U32, &[local + 1])?;
        let mut slots = ex.scratch(DType::U32, &[ids.elem_count()])?;
        group_slots_into(ids, experts.expert_map(), offsets.view_mut(), slots.view_mut(), ex)?;
        let top_k = ids.dims().get(1).copied().unwrap_or(0);
        let batches = RowBatches { offsets: offsets.view(), slots: slots.view(), top_k };
        let width = rows.dims().get(1).copied().unwrap_or(0);
        let mut batched = ex.scratch(rows.dtype(), &[local, rows.rows(), width])?;
        let mut counts = ex.scratch(DType::U32, &[local])?;
        batch_rows_into(rows, &batches, batched.view_mut(), counts.view_mut(), ex)?;
        Ok((batched, counts))
    }
}

impl PrepareFinalize for SumGather {
    fn name(&self) -> &'static str {
        self.name
    }

    fn activation_format(&self) -> ActivationFormat {
        match self.max_num_tokens {
            None => ActivationFormat::Standard,
            Some(_) => ActivationFormat::BatchedExperts,
        }
    }

    fn output_is_reduced(&self) -> bool {
        true
    }

    fn max_num_tokens_per_rank(&self) -> Option<usize> {
        self.max_num_tokens
    }

    fn num_dispatchers(&self) -> usize {
        self.ranks.world_size()
    }

    fn max_rows(&self, tokens: usize) -> usize {
        arrivals(&self.ranks, self.max_num_tokens.map_or(tokens, |max| max.min(tokens)))
    }

    fn rank_tokens(&self, tokens: usize, ex: &mut Exec) -> Result<Option<Arc<[usize]>>> {
        self.ranks.rank_tokens(self.name, tokens, ex).map(Some)
    }

    fn local_experts(&self) -> Option<&LocalExperts> {
        Some(self.ranks.local_experts())
    }

    fn applies_router_weight_on_input(&self) -> bool {
        self.ranks.router_weight_on_input
    }

    fn adds_partial_sums(&self) -> bool {
        true
    }

    fn prepare<'a>(
        &'a self,
        hidden: View<'a>,
        topk_ids: View<'a>,
        topk_weights: View<'a>,
        ex: &mut Exec,
    ) -> Result<Dispatched<'a>> {
        let tokens = Tokens::check(self.name, hidden, topk_ids, topk_weights)?;
        let counts = self.ranks.owned_counts(&self.ranks.rank_tokens(self.name, hidden.rows(), ex)?);
        let input = tokens.input_rows(self.ranks.router_weight_on_input, ex)?;
        let rows = self.gather(input.view(), &counts, ex)?;
        let (ids, weights) = (self.gather(topk_ids, &counts, ex)?, self.gather(topk_weights, &counts, ex)?);
        let (mut dispatched, slots) = match self.max_num_tokens {
            None => {
                let mut standard = Dispatched::standard(rows, topk_ids, topk_weights);
                (standard.topk_ids, standard.topk_weights) = (Some(ids.into()), Some(weights.into()));
                (standard, None)
            }
            Some(_) => {
                let (rows, counts) = self.batch(rows.view(), ids.view(), ex)?;
                (Dispatched::batched(rows, counts, topk_ids, topk_weights), Some((ids, weights)))
            }
        };
        dispatched.expert_map = self.ranks.local_experts().expert_map();
        dispatched.weights_applied = self.ranks.router_weight_on_input;
        Ok(dispatched.with_handle(Gathered { counts, slots }))
    }

    fn finalize(
        &self,
        expert_out: View,
        dispatched: &Dispatched,
        strategy: WeightAndReduce,
        mut out: ViewMut,
        ex: &mut Exec,
    ) -> Result<()> {
        let Gathered { counts, slots } = dispatched.handle(self.name)?;
        let slots = match slots {
            Some((ids, weights)) => (ids.view(), weights.view()),
            None => (dispatched.topk_ids()?, dispatched.topk_weights()?),
        };
        let strategy = match (strategy, self.max_num_tokens) {
            (WeightAndReduce::Delegate, None) => WeightAndReduce::Contiguous,
            (WeightAndReduce::Delegate, Some(_)) => {
                WeightAndReduce::NaiveBatched { rank: self.ranks.ep.rank() }
            }
            (chosen, _) => chosen,
        };
        let sums = partial_sums(self.name, expert_out, slots, dispatched, strategy, ex)?;
        let owned = self.ranks.owned(out.rows());
        let width = out.dims().get(1).copied().unwrap_or(0);
        let alone = self.ranks.tp.world_size() == 1;
        if alone && out.dtype() == DType::F32 {
            return self.ranks.ep.reduce_scatter_v(sums.view(), counts, out, ReduceOp::Sum, ex);
        }
        let mut rows = ex.scratch(DType::F32, &[owned.len(), width])?;
        self.ranks.ep.reduce_scatter_v(sums.view(), counts, rows.view_mut(), ReduceOp::Sum, ex)?;
        self.ranks.share_owned(rows.view(), out.reborrow(), ex)
    }
}
