//! The backends over several ranks: a transport, which brings rows to their experts, and who adds what they compute.
//!
//! | backend | rows to experts | by slot: slot rows back | by rank: sums back |
//! |---|---|---|---|
//! | `disabled` | every rank has them and a part of each expert | segments to the owners | all-reduce |
//! | `local_allreduce` | every rank has them | to the owners | all-reduce |
//! | `allgather_reducescatter` | all-gather | to the owners | reduce-scatter |
//! | `deepep high_throughput` | by slot: all-to-all of the needed rows, exact counts; by rank: gather of the needed rows | to the owners | reduce-scatter of the needed rows |
//! | `deepep low_latency` | by slot: all-to-all in blocks of the step's most tokens, batched; by rank: all-gather, listed | in blocks to the owners | reduce-scatter |
//!
//! A transport whose messages have sizes known to the host moves a fixed block whole however few of its rows are needed:
//! so by rank the low-latency form gathers each token once, and what it lists by expert are not rows but the numbers of
//! their slots: nothing is copied, padded or zeroed. The high-throughput form by rank keeps the places of a gather, and leaves
//! empty the places of rows that a rank does not need: so nothing is counted. By rank no backend reads anything on the host, so
//! that calls can be captured into a graph; by slot every backend but `disabled` reads the ids there.

use std::sync::Arc;

use candle_core::{DType, Result, bail};
use moe_comm::{AddNorm, Collectives, Communicator, FusedCollective, FusedCollectives, ReduceOp, shares};
use moe_kernels::door::expect_dims;
use moe_kernels::{ActivationFormat, Dispatched, Exec, Lent, View, ViewMut, WeightAndReduce};

use crate::arrive::{Call, all_to_all, gather};
use crate::by_rank::{partial_sums, slot_rows, whole_rows};
use crate::by_slot::{Returns, add_segments, add_slots};
use crate::local_experts::LocalExperts;
use crate::prepare_finalize::{Combine, PrepareFinalize, WhoAdds};
use crate::ranks::EpRanks;
use crate::reduce::reduce_into;
use crate::rows::width;
use crate::tokens::Tokens;
use crate::transport::Transport;

/// A backend over the ranks of a communicator; the constructors are named as users name them.
#[derive(Debug)]
pub struct OverRanks {
    name: &'static str,
    transport: Transport,
    who_adds: WhoAdds,
    ranks: EpRanks,
    router_weight_on_input: bool,
    /// The caller adds the ranks' sums.
    deferred: bool,
}

/// What finalize needs again.
#[derive(Debug)]
struct Handle {
    /// The call's backend, to tell its handle from another's.
    backend: &'static str,
    back: Back,
}

/// The way back of what the experts compute.
#[derive(Debug)]
enum Back {
    /// By slot: segments of cut experts to the owners.
    Segments,
    /// By slot: slot rows to the owners.
    Slots(Returns),
    /// By rank: sums of the same tokens in place.
    InPlace,
    /// By rank: a reduce-scatter to the owners of so many tokens each.
    Scatter(Vec<usize>),
}

impl OverRanks {
    /// `disabled`: the ranks of `comm` hold all experts, each cut along its intermediate size.
    pub fn disabled(comm: Arc<dyn Communicator>, who_adds: WhoAdds) -> Self {
        Self::new("disabled", Transport::Cut, EpRanks::of_cut_experts(comm), who_adds)
    }

    /// `local_allreduce`: every rank has the same tokens and computes the slots of its own experts.
    ///
    /// # Errors
    /// Ranks that do not all see the same tokens.
    pub fn local_allreduce(ranks: EpRanks, who_adds: WhoAdds) -> Result<Self> {
        let (all, same) = (ranks.world_size(), ranks.tp.world_size());
        if all != same {
            bail!(
                "local_allreduce: expected one tensor-parallel group of all {all} ranks, got groups of {same}; use \
                 allgather_reducescatter or deepep"
            )
        }
        Ok(Self::new("local_allreduce", Transport::Replicated, ranks, who_adds))
    }

    /// `allgather_reducescatter`: every rank gets the rows of all; counts may differ and be zero.
    pub fn allgather_reducescatter(ranks: EpRanks, who_adds: WhoAdds) -> Self {
        Self::new("allgather_reducescatter", Transport::AllGather, ranks, who_adds)
    }

    /// `deepep` in its mode high_throughput: each rank receives only the rows that its experts need, each once however
    /// many of them the token chose. By slot counts are exact and exchanged first. By rank rows have the places of a gather, and
    /// whether one travels follows on the device from the ids that all ranks have.
    pub fn high_throughput(ranks: EpRanks, who_adds: WhoAdds) -> Self {
        let transport = match who_adds {
            WhoAdds::BySlot => Transport::AllToAll,
            WhoAdds::ByRank => Transport::GatherNeeded,
        };
        Self::new("deepep high_throughput", transport, ranks, who_adds)
    }

    /// `deepep` in its mode low_latency, for at most `max_num_tokens` tokens per rank and call: no size depends on
    /// routing, as decoding in a captured graph wants. By slot rows arrive in the BatchedExperts format, by rank in the
    /// Listed one.
    pub fn low_latency(ranks: EpRanks, max_num_tokens: usize, who_adds: WhoAdds) -> Self {
        let transport = match who_adds {
            WhoAdds::BySlot => Transport::AllToAllBatched(max_num_tokens),
            WhoAdds::ByRank => Transport::AllGatherListed(max_num_tokens),
        };
        Self::new("deepep low_latency", transport, ranks, who_adds)
    }

    fn new(name: &'static str, transport: Transport, ranks: EpRanks, who_adds: WhoAdds) -> Self {
        Self { name, transport, who_adds, ranks, router_weight_on_input: false, deferred: false }
    }

    /// Whether the router weight multiplies a copy of the input rows instead of the experts' rows
    /// (`apply_router_weight_on_input`, Llama-4). Needs K = 1.
    pub fn with_router_weight_on_input(self, on_input: bool) -> Self {
        Self { router_weight_on_input: on_input, ..self }
    }

    /// Whether every rank has the same tokens.
    fn is_replicated(&self) -> bool {
        matches!(self.transport, Transport::Cut | Transport::Replicated)
    }

    /// What the ranks answer about their launches that also compute; no where they have none.
    fn fuses(&self, asked: impl FnOnce(&dyn FusedCollectives) -> bool) -> bool {
        self.ranks.ep.fused().is_some_and(asked)
    }

    /// The tokens that each rank owns in a call to which this one brings `tokens`.
    fn owned_counts(&self, tokens: usize, agreed: Option<&[usize]>, ex: &mut Exec) -> Result<Vec<usize>> {
        Ok(self.ranks.owned_counts(&self.ranks.rank_tokens(self.name, tokens, agreed, ex)?))
    }

    /// The caller's own rows, which every rank has, and the way back of what becomes of them.
    fn stay<'a>(
        &self,
        input: Lent<'a>,
        (topk_ids, topk_weights): (View<'a>, View<'a>),
        ex: &mut Exec,
    ) -> Result<(Dispatched<'a>, Back)> {
        let back = match (self.transport, self.who_adds) {
            (_, WhoAdds::ByRank) => Back::InPlace,
            (Transport::Cut, WhoAdds::BySlot) => Back::Segments,
            (_, WhoAdds::BySlot) => {
                let blocks = shares(topk_ids.rows(), self.ranks.world_size());
                Back::Slots(Returns::of_rows(self.name, &self.ranks, (topk_ids, &blocks), topk_ids, ex)?)
            }
        };
        Ok((Dispatched::standard(input, topk_ids, topk_weights), back))
    }

    /// Rows that arrive from all ranks, and the way back of what becomes of them.
    fn travel<'a>(
        &'a self,
        call: &Call<'_, 'a>,
        agreed: Option<&[usize]>,
        ex: &mut Exec,
    ) -> Result<(Dispatched<'a>, Back)> {
        let (name, ranks) = (self.name, &self.ranks);
        let (arrived, counts) = match self.transport {
            Transport::AllToAll => all_to_all(ranks, call, None, ex)?,
            Transport::AllToAllBatched(_) => {
                let block = self.owned_counts(call.ids.rows(), agreed, ex)?.into_iter().max().unwrap_or(0);
                let (arrived, _) = all_to_all(ranks, call, Some(block), ex)?;
                let rows = (arrived.rows.view(), arrived.ids.view(), block);
                let (batches, returns) = Returns::of_batches(name, ranks, rows, call.ids, ex)?;
                let dispatched = Dispatched::batched(batches.rows, batches.counts, call.ids, call.weights);
                return Ok((dispatched, Back::Slots(returns)));
            }
            _ => {
                let counts = self.owned_counts(call.ids.rows(), agreed, ex)?;
                let needed = self.transport == Transport::GatherNeeded;
                (gather(ranks, call, &counts, needed, ex)?, counts)
            }
        };
        let back = match self.who_adds {
            WhoAdds::BySlot => {
                let ids = (arrived.ids.view(), &counts[..]);
                Back::Slots(Returns::of_rows(name, ranks, ids, call.ids, ex)?)
            }
            WhoAdds::ByRank => Back::Scatter(counts),
        };
        let dispatched = match self.transport {
            Transport::AllGatherListed(_) => arrived.listed(ranks.local_experts(), call, ex)?,
            _ => arrived.standard(call),
        };
        Ok((dispatched, back))
    }
}

impl PrepareFinalize for OverRanks {
    fn name(&self) -> &'static str {
        self.name
    }

    fn activation_format(&self) -> ActivationFormat {
        match self.transport {
            Transport::AllToAllBatched(_) => ActivationFormat::BatchedExperts,
            Transport::AllGatherListed(_) => ActivationFormat::Listed,
            _ => ActivationFormat::Standard,
        }
    }

    fn combine(&self) -> Combine {
        match self.who_adds {
            WhoAdds::BySlot => Combine::BySlot,
            WhoAdds::ByRank if self.deferred => Combine::DeferredToCaller,
            WhoAdds::ByRank if self.is_replicated() => Combine::AllReduce,
            WhoAdds::ByRank => Combine::ByRank,
        }
    }

    fn max_num_tokens_per_rank(&self) -> Option<usize> {
        match self.transport {
            Transport::AllToAllBatched(max) | Transport::AllGatherListed(max) => Some(max),
            _ => None,
        }
    }

    fn num_dispatchers(&self) -> usize {
        self.ranks.world_size()
    }

    fn max_rows(&self, tokens: usize) -> usize {
        if self.is_replicated() {
            return tokens;
        }
        let tokens = self.max_num_tokens_per_rank().map_or(tokens, |max| max.min(tokens));
        tokens.div_ceil(self.ranks.tp.world_size()).saturating_mul(self.ranks.world_size())
    }

    fn rank_tokens(
        &self,
        tokens: usize,
        agreed: Option<&[usize]>,
        ex: &mut Exec,
    ) -> Result<Option<Arc<[usize]>>> {
        if self.is_replicated() {
            return Ok(None);
        }
        self.ranks.rank_tokens(self.name, tokens, agreed, ex).map(Some)
    }

    fn local_experts(&self) -> Option<&LocalExperts> {
        Some(self.ranks.local_experts()).filter(|_| self.transport != Transport::Cut)
    }

    fn applies_router_weight_on_input(&self) -> bool {
        self.router_weight_on_input
    }

    fn complete_reduced(&self, out: ViewMut, ex: &mut Exec) -> Result<()> {
        match self.combine() {
            Combine::AllReduce => self.ranks.ep.all_reduce(out, ReduceOp::Sum, ex),
            _ => Ok(()),
        }
    }

    fn reduced_dtype(&self, dispatched: &Dispatched) -> DType {
        let rows = dispatched.rows.view();
        let rounds = self.combine() == Combine::ByRank
            && self.fuses(|fused| fused.rounds_sums(rows.rows(), width(rows), rows.dtype()));
        if rounds { rows.dtype() } else { DType::F32 }
    }

    fn defer_sum(&mut self) -> bool {
        self.deferred = self.combine() == Combine::AllReduce;
        self.deferred
    }

    fn prepare<'a>(
        &'a self,
        tokens: Tokens<'a>,
        agreed: Option<&[usize]>,
        ex: &mut Exec,
    ) -> Result<Dispatched<'a>> {
        tokens.check(self.name)?;
        let Tokens { hidden, topk_ids: ids, topk_weights: weights } = tokens;
        if let Some(max) = self.max_num_tokens_per_rank().filter(|max| hidden.rows() > *max) {
            bail!(
                "{}: expected at most {max} tokens per rank, got {}; cut them into chunks or use the mode high_throughput",
                self.name,
                hidden.rows()
            )
        }
        let input = tokens.input_rows(self.name, self.router_weight_on_input, ex)?;
        let (mut dispatched, back) = match self.is_replicated() {
            true => self.stay(input, (ids, weights), ex)?,
            false => {
                let weights_travel = self.who_adds == WhoAdds::ByRank;
                let call = Call { op: self.name, input: input.view(), ids, weights, weights_travel };
                self.travel(&call, agreed, ex)?
            }
        };
        dispatched.expert_map = self.local_experts().and_then(LocalExperts::expert_map);
        dispatched.weights_applied = self.router_weight_on_input;
        Ok(dispatched.with_handle(Handle { backend: self.name, back }))
    }

    fn finalize(
        &self,
        expert_out: View,
        dispatched: &Dispatched,
        strategy: WeightAndReduce,
        mut out: ViewMut,
        ex: &mut Exec,
    ) -> Result<()> {
        let (name, ranks) = (self.name, &self.ranks);
        let Handle { backend, back } = dispatched.handle(name)?;
        if *backend != name {
            bail!("{name}: these rows were prepared by {backend}; finalize with the same backend")
        }
        if matches!(back, Back::Segments | Back::Slots(_)) && strategy != WeightAndReduce::Delegate {
            bail!(
                "{name}: expected experts that return unweighted rows (Delegate), got {strategy:?}: only a token's \
                 owner can weight them; add by rank, or choose such experts"
            )
        }
        let (owner, width) = (dispatched.owner_topk_ids, width(dispatched.rows.view()));
        expect_dims(name, "out", &out, &[owner.rows(), width])?;
        match back {
            Back::Segments => {
                let slots = add_segments(name, ranks, expert_out, dispatched, ex)?;
                add_slots(ranks, slots.view(), dispatched, out, ex)
            }
            Back::Slots(returns) => {
                let slots = returns.travel(name, ranks, expert_out, dispatched, ex)?;
                add_slots(ranks, slots.view(), dispatched, out, ex)
            }
            Back::InPlace => {
                let rows = whole_rows(expert_out, ex)?;
                let routing = (owner, dispatched.owner_topk_weights);
                reduce_into(name, rows.view(), dispatched, routing, strategy, out.reborrow(), ex)?;
                self.complete_reduced(out, ex)
            }
            Back::Scatter(counts) => {
                let sums = partial_sums(name, expert_out, dispatched, strategy, ex)?;
                ranks.for_owned(DType::F32, out, ex, |rows, ex| {
                    let needs = match self.transport {
                        Transport::GatherNeeded => Some(ranks.needs(name, dispatched.topk_ids()?)?),
                        _ => None,
                    };
                    let call = FusedCollective::ScatterSums { sums: sums.view(), counts, needs, out: rows };
                    call.run(&*ranks.ep, ex)
                })
            }
        }
    }

    fn combines(&self, dispatched: &Dispatched) -> bool {
        let Ok(Handle { back: Back::Scatter(counts), .. }) = dispatched.handle(self.name) else {
            return false;
        };
        let rows = dispatched.rows.view();
        self.combines_counts(counts, width(dispatched.owner_topk_ids), width(rows), rows.dtype())
    }

    fn combines_counts(&self, counts: &[usize], top_k: usize, hidden: usize, dtype: DType) -> bool {
        let gathers = matches!(self.transport, Transport::AllGather | Transport::AllGatherListed(_));
        gathers
            && self.who_adds == WhoAdds::ByRank
            && self.ranks.tp.world_size() == 1
            && !self.router_weight_on_input
            && !self.fuses(|fused| fused.rounds_sums(counts.iter().sum(), hidden, dtype))
            && self.fuses(|fused| fused.combines(counts, top_k, hidden, dtype))
    }

    fn finalize_add_norm(
        &self,
        expert_out: View,
        dispatched: &Dispatched,
        strategy: WeightAndReduce,
        end: AddNorm<'_>,
        ex: &mut Exec,
    ) -> Result<()> {
        let Handle { backend, back: Back::Scatter(counts) } = dispatched.handle(self.name)? else {
            bail!("{}: no sums return to the owners of tokens", self.name)
        };
        if *backend != self.name || dispatched.weights_applied || self.ranks.tp.world_size() > 1 {
            bail!(
                "{}: expected unweighted rows that it prepared for ranks with tokens of their own, got those of {backend}",
                self.name
            )
        }
        let slots = slot_rows(expert_out, dispatched, strategy)?;
        FusedCollective::CombineAddNorm { slots, counts, end }.run(&*self.ranks.ep, ex)
    }
}
