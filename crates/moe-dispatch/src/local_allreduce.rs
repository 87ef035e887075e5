//! `local_allreduce`: every rank has the same tokens and computes the slots of its own experts.
//!
//! Nothing is dispatched. On the way back each rank hands the slot rows that it computed to the
//! token's owner (one of the ranks, an even share each), and the owners' sums are gathered: the
//! reduce-scatter and all-gather of an all-reduce, in the order of one rank.

use candle_core::{Result, bail};
use moe_kernels::{ActivationFormat, Dispatched, Exec, View};

use crate::combine::Returns;
use crate::exchange::Exchange;
use crate::ranks::EpRanks;
use crate::rows::Layout;
use crate::tokens::Tokens;
use crate::transport::{Collective, Transport};

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

impl Exchange for LocalAllreduce {
    const NAME: &'static str = NAME;
    const FORMAT: ActivationFormat = ActivationFormat::Standard;
    const COUNTS_DIFFER: bool = false;
    type Dispatching<'a> = Dispatched<'a>;

    fn ranks(&self) -> &EpRanks {
        &self.ranks
    }

    fn transport(&self) -> &dyn Transport {
        &self.transport
    }

    fn max_rows(&self, tokens: usize) -> usize {
        tokens
    }

    fn dispatch_a<'a>(
        &'a self,
        hidden: View<'a>,
        topk_ids: View<'a>,
        topk_weights: View<'a>,
        _: Option<&[usize]>,
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

    fn dispatch_b<'a>(&'a self, begun: Dispatched<'a>, _: &mut Exec) -> Result<Dispatched<'a>> {
        Ok(begun)
    }
}
