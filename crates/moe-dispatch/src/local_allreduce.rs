//! `local_allreduce`: every rank has the same tokens and computes the slots of its own experts.
//!
//! Nothing is dispatched. On the way back each rank hands the slot rows that it computed to the
//! token's owner (one of the ranks, an even share each), and the owners' sums are gathered: the
//! reduce-scatter and all-gather of an all-reduce, in the order of one rank.

use candle_core::{Result, bail};
use moe_kernels::{ActivationFormat, Dispatched, Exec, View, ViewMut, WeightAndReduce};

use crate::combine::{Returns, combine_a, combine_b};
use crate::local_experts::LocalExperts;
use crate::prepare_finalize::PrepareFinalize;
use crate::ranks::EpRanks;
use crate::rows::Layout;
use crate::tokens::Tokens;
use crate::transport::Collective;

/// The backend `local_allreduce`, for data-parallel size 1.
#[derive(Debug)]
pub struct LocalAllreduce {
    ranks: EpRanks,
    transport: Collective,
}

const NAME: &str = "local_allreduce";

impl LocalAllreduce {
    /// # Errors
    /// Ranks that do not all see the same tokens.
    pub fn new(ranks: EpRanks) -> Result<Self> {
        if ranks.tp.world_size() != ranks.world_size() {
            bail!(
                "{NAME}: expected one tensor-parallel group of all {} ranks, got groups of {}; use \
                 allgather_reducescatter or deepep",
                ranks.world_size(),
                ranks.tp.world_size()
            )
        }
        let transport = Collective(ranks.ep.clone());
        Ok(Self { ranks, transport })
    }
}

impl PrepareFinalize for LocalAllreduce {
    fn name(&self) -> &'static str {
        NAME
    }

    fn activation_format(&self) -> ActivationFormat {
        ActivationFormat::Standard
    }

    fn output_is_reduced(&self) -> bool {
        true
    }

    fn num_dispatchers(&self) -> usize {
        self.ranks.world_size()
    }

    fn local_experts(&self) -> Option<&LocalExperts> {
        Some(self.ranks.local_experts())
    }

    fn applies_router_weight_on_input(&self) -> bool {
        self.ranks.router_weight_on_input
    }

    fn prepare<'a>(
        &'a self,
        hidden: View<'a>,
        topk_ids: View<'a>,
        topk_weights: View<'a>,
        ex: &mut Exec,
    ) -> Result<Dispatched<'a>> {
        let tokens = Tokens::check(NAME, hidden, topk_ids, topk_weights)?;
        let rows = tokens.input_rows(self.ranks.router_weight_on_input, ex)?;
        let ids = topk_ids.cpu::<u32>()?;
        let shares = moe_comm::shares(hidden.rows(), self.ranks.world_size());
        let blocks = Layout::Exact.blocks(&shares);
        let owned = self.ranks.owned(hidden.rows());
        let returns = Returns {
            backend: NAME,
            send: self.ranks.computed_slots(NAME, ids, tokens.top_k, &blocks)?,
            receive: self
                .ranks
                .slots_by_rank(NAME, &ids[owned.start * tokens.top_k..owned.end * tokens.top_k])?,
            owned,
            layout: Layout::Exact,
        };
        let mut dispatched = Dispatched::standard(rows, topk_ids, topk_weights);
        dispatched.expert_map = self.ranks.local_experts().expert_map();
        dispatched.weights_applied = self.ranks.router_weight_on_input;
        Ok(dispatched.with_handle(returns))
    }

    fn finalize(
        &self,
        expert_out: View,
        dispatched: &Dispatched,
        strategy: WeightAndReduce,
        out: ViewMut,
        ex: &mut Exec,
    ) -> Result<()> {
        let sent = combine_a(NAME, &self.transport, expert_out, dispatched, strategy, ex)?;
        combine_b(NAME, &self.ranks, &self.transport, sent, dispatched, out, ex)
    }
}
