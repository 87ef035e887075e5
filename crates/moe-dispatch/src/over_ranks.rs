//! The backends over several ranks. Each consists of a transport, which brings rows to their experts, and of the rule
//! who adds the results.
//!
//! By rank no backend reads anything on the host, so calls can be recorded in a graph. By slot every backend except
//! `disabled` reads the ids on the host.

use std::sync::Arc;

use candle_core::{DType, Result};
use moe_comm::{AddNorm, Collectives, FusedCollective, FusedCollectives, ReduceOp};
use moe_kernels::arguments::expect_dims;
use moe_kernels::{ActivationFormat, Dispatched, Exec, View, ViewMut, WeightAndReduce};

use crate::back::Back;
use crate::by_rank::slot_rows;
use crate::call::Call;
use crate::error::refuse;
use crate::local_experts::LocalExperts;
use crate::prepare_finalize::{Combine, PrepareFinalize, WhoAdds};
use crate::ranks::EpRanks;
use crate::rows::width;
use crate::tokens::Tokens;
use crate::transport::Transport;

/// A backend over the ranks of a communicator. The constructors have the names that users know.
#[derive(Debug)]
pub struct OverRanks {
    transport: Box<dyn Transport>,
    who_adds: WhoAdds,
    ranks: EpRanks,
    router_weight_on_input: bool,
    /// Whether the caller adds the ranks' sums.
    deferred: bool,
}

/// Data of prepare that finalize needs again.
#[derive(Debug)]
struct Handle {
    /// The backend of the call, which distinguishes its handle from another backend's.
    backend: &'static str,
    back: Back,
}

impl OverRanks {
    pub(crate) fn new(transport: impl Transport + 'static, ranks: EpRanks, who_adds: WhoAdds) -> Self {
        let transport = Box::new(transport);
        Self { transport, who_adds, ranks, router_weight_on_input: false, deferred: false }
    }

    /// Whether the router weight multiplies a copy of the input rows instead of the experts' rows
    /// (`apply_router_weight_on_input`, Llama-4). Needs K = 1.
    #[must_use]
    pub fn with_router_weight_on_input(self, on_input: bool) -> Self {
        Self { router_weight_on_input: on_input, ..self }
    }

    /// The answer of the communicator about its fused launches; false if it has none.
    fn fuses(&self, asked: impl FnOnce(&dyn FusedCollectives) -> bool) -> bool {
        self.ranks.ep.fused().is_some_and(asked)
    }
}

impl PrepareFinalize for OverRanks {
    fn name(&self) -> &'static str {
        self.transport.name()
    }

    fn dispatch_kernel(&self, counts: &[usize], top_k: usize, hidden: usize, dtype: DType) -> &'static str {
        let sends_needed = self.transport.sends_needed_rows().filter(|_| {
            let counts = self.ranks.owned_counts(counts);
            self.who_adds == WhoAdds::ByRank && self.ranks.dispatches(&counts, top_k, hidden, dtype)
        });
        sends_needed.unwrap_or(self.name())
    }

    fn activation_format(&self) -> ActivationFormat {
        self.transport.activation_format(self.who_adds)
    }

    fn combine(&self) -> Combine {
        match self.who_adds {
            WhoAdds::BySlot => Combine::BySlot,
            WhoAdds::ByRank if self.deferred => Combine::DeferredToCaller,
            WhoAdds::ByRank if self.transport.is_replicated() => Combine::AllReduce,
            WhoAdds::ByRank => Combine::ByRank,
        }
    }

    fn max_num_tokens_per_rank(&self) -> Option<usize> {
        self.transport.max_num_tokens_per_rank()
    }

    fn num_dispatchers(&self) -> usize {
        self.ranks.world_size()
    }

    fn max_rows(&self, tokens: usize) -> usize {
        if self.transport.is_replicated() {
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
        if self.transport.is_replicated() {
            return Ok(None);
        }
        self.ranks.rank_tokens(self.name(), tokens, agreed, ex).map(Some)
    }

    fn local_experts(&self) -> Option<&LocalExperts> {
        self.ranks.whole_experts()
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
        let op = self.name();
        tokens.check(op)?;
        let Tokens { hidden, topk_ids: ids, topk_weights: weights } = tokens;
        if let Some(max) = self.max_num_tokens_per_rank().filter(|max| hidden.rows() > *max) {
            refuse!(
                Ranks,
                "{op}: expected at most {max} tokens per rank, got {}; cut them into chunks or use the mode high_throughput",
                hidden.rows()
            )
        }
        if self.transport.reads_on_the_host(self.who_adds) && ex.is_cuda() && ex.workspace().is_frozen() {
            refuse!(
                Ranks,
                "{op}: by slot it reads ids on the host, so its steps run without CUDA graphs; add by rank"
            )
        }
        let input = tokens.input_rows(op, self.router_weight_on_input, ex)?;
        let call = Call { op, ranks: &self.ranks, who_adds: self.who_adds, input, ids, weights, agreed };
        let (mut dispatched, back) = self.transport.prepare(call, ex)?;
        dispatched.expert_map = self.local_experts().and_then(LocalExperts::expert_map);
        dispatched.weights_applied = self.router_weight_on_input;
        Ok(dispatched.with_handle(Handle { backend: op, back }))
    }

    fn finalize(
        &self,
        expert_out: View,
        dispatched: &Dispatched,
        strategy: WeightAndReduce,
        mut out: ViewMut,
        ex: &mut Exec,
    ) -> Result<()> {
        let name = self.name();
        let Handle { backend, back } = dispatched.handle(name)?;
        if *backend != name {
            refuse!(Ranks, "{name}: these rows were prepared by {backend}; finalize with the same backend")
        }
        back.expect(name, strategy)?;
        let dims = [dispatched.owner_topk_ids.rows(), width(dispatched.rows.view())];
        expect_dims(name, "out", &out, &dims)?;
        let ranks = (name, &self.ranks);
        back.finalize(ranks, expert_out, dispatched, strategy, out.reborrow(), ex)?;
        self.complete_reduced(out, ex)
    }

    fn combines(&self, dispatched: &Dispatched) -> bool {
        let Ok(Handle { back: Back::Scatter { counts, .. }, .. }) = dispatched.handle(self.name()) else {
            return false;
        };
        let rows = dispatched.rows.view();
        self.combines_counts(counts, width(dispatched.owner_topk_ids), width(rows), rows.dtype())
    }

    fn combines_counts(&self, counts: &[usize], top_k: usize, hidden: usize, dtype: DType) -> bool {
        self.transport.combines()
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
        let name = self.name();
        let Handle { backend, back: Back::Scatter { counts, needed } } = dispatched.handle(name)? else {
            refuse!(Ranks, "{name}: no sums return to the owners of tokens")
        };
        if *backend != name || dispatched.weights_applied || self.ranks.tp.world_size() > 1 {
            refuse!(
                Ranks,
                "{name}: expected unweighted rows that it prepared for ranks with tokens of their own, got rows that {backend} prepared"
            )
        }
        let slots = slot_rows(expert_out, dispatched, strategy)?;
        let needs = needed.then(|| self.ranks.needs(name, dispatched.topk_ids()?)).transpose()?;
        FusedCollective::CombineAddNorm { slots, counts, needs, end }.run(&*self.ranks.ep, ex)
    }
}
