//! `allgather_reducescatter` and `deepep low_latency`: tokens, ids and weights of all ranks are gathered,
//! each rank sums the slots of its experts, and a reduce-scatter adds the sums at the tokens' owners.
//!
//! How many tokens each rank brings is agreed on the host before the step, so no size depends on data;
//! steps that are padded alike on all ranks can be captured into a graph. A transport whose messages have
//! sizes known to the host moves a fixed block whole however few of its rows are needed: there, the low
//! latency form of `deepep` is this gathering. A token travels once to each rank, in blocks of the step's most
//! tokens; what is batched by expert are not rows but the numbers of their slots, so that nothing is copied,
//! padded or zeroed.

use candle_core::{DType, Result};
use moe_comm::ReduceOp;
use moe_kernels::{
    ActivationFormat, Dispatched, Exec, Scratch, View, ViewMut, WeightAndReduce, list_slots_into,
};

use super::partial_sums;
use crate::allgather::arrivals;
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
}

impl SumGather {
    /// `allgather_reducescatter`, in the Standard format.
    pub fn standard(ranks: EpRanks) -> Self {
        Self { name: "allgather_reducescatter", ranks, max_num_tokens: None }
    }

    /// `deepep low_latency`, in the BatchedExperts format, for at most `max_num_tokens` tokens per rank and
    /// call: [listed](Dispatched::listed) rows.
    pub fn batched(ranks: EpRanks, max_num_tokens: usize) -> Self {
        Self { name: "deepep low_latency", ranks, max_num_tokens: Some(max_num_tokens) }
    }

    /// The owned rows of all ranks, [sum(counts), ..]: of three arrays [T, ..] in one call.
    fn gather(&self, arrays: [View; 3], counts: &[usize], ex: &mut Exec) -> Result<[Scratch; 3]> {
        let (owned, total) = (self.ranks.owned(arrays[0].rows()), counts.iter().sum());
        let room =
            |array: View| ex.scratch(array.dtype(), &[total, array.dims().get(1).copied().unwrap_or(0)]);
        let mut all = [room(arrays[0])?, room(arrays[1])?, room(arrays[2])?];
        let own = arrays.iter().zip(&mut all);
        let own = own.map(|(array, all)| Ok((array.narrow(owned.start, owned.len())?, all.view_mut())));
        self.ranks.ep.all_gather_v_each(own.collect::<Result<_>>()?, counts, ex)?;
        Ok(all)
    }

    /// The arrived rows in the BatchedExperts format: they stay where they are, their slots are listed by expert.
    fn list<'a>(
        &'a self,
        [rows, ids, weights]: [Scratch; 3],
        (topk_ids, topk_weights): (View<'a>, View<'a>),
        ex: &mut Exec,
    ) -> Result<Dispatched<'a>> {
        let (experts, slots) = (self.ranks.local_experts(), ids.view().elem_count());
        let mut counts = ex.scratch(DType::U32, &[experts.num_local()])?;
        let mut lists = ex.scratch(DType::U32, &[experts.num_local(), slots])?;
        list_slots_into(ids.view(), experts.expert_map(), counts.view_mut(), lists.view_mut(), ex)?;
        Ok(Dispatched::listed(rows, (lists, counts), (ids, weights), topk_ids, topk_weights))
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

    fn ep_ranks(&self) -> Option<&EpRanks> {
        Some(&self.ranks)
    }

    fn max_rows(&self, tokens: usize) -> usize {
        arrivals(&self.ranks, self.max_num_tokens.map_or(tokens, |max| max.min(tokens)))
    }

    fn adds_partial_sums(&self) -> bool {
        true
    }

    fn prepare<'a>(
        &'a self,
        hidden: View<'a>,
        topk_ids: View<'a>,
        topk_weights: View<'a>,
        agreed: Option<&[usize]>,
        ex: &mut Exec,
    ) -> Result<Dispatched<'a>> {
        let tokens = Tokens::check(self.name, hidden, topk_ids, topk_weights)?;
        let counts =
            self.ranks.owned_counts(&self.ranks.rank_tokens(self.name, hidden.rows(), agreed, ex)?);
        let input = tokens.input_rows(self.ranks.router_weight_on_input, ex)?;
        let arrived = self.gather([input.view(), topk_ids, topk_weights], &counts, ex)?;
        let mut dispatched = match self.max_num_tokens {
            None => {
                let [rows, ids, weights] = arrived;
                let mut standard = Dispatched::standard(rows, topk_ids, topk_weights);
                (standard.topk_ids, standard.topk_weights) = (Some(ids.into()), Some(weights.into()));
                standard
            }
            Some(_) => self.list(arrived, (topk_ids, topk_weights), ex)?,
        };
        dispatched.expert_map = self.ranks.local_experts().expert_map();
        dispatched.weights_applied = self.ranks.router_weight_on_input;
        Ok(dispatched.with_handle(Gathered { counts }))
    }

    fn finalize(
        &self,
        expert_out: View,
        dispatched: &Dispatched,
        strategy: WeightAndReduce,
        mut out: ViewMut,
        ex: &mut Exec,
    ) -> Result<()> {
        let Gathered { counts } = dispatched.handle(self.name)?;
        let slots = (dispatched.topk_ids()?, dispatched.topk_weights()?);
        let strategy = match strategy {
            // Listed rows come back by slot, too.
            WeightAndReduce::Delegate => WeightAndReduce::Contiguous,
            chosen => chosen,
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
