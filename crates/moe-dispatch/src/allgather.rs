//! `allgather_reducescatter`: the rows of all ranks are gathered, each rank computes the slots of
//! its own experts, and slot rows go back to their owners.
//!
//! Ranks may bring different numbers of tokens, also none. Tokens that several ranks see (tensor
//! parallelism) are gathered from their owner alone.

use candle_core::{DType, Result};
use moe_kernels::{ActivationFormat, Dispatched, Exec, View};

use crate::combine::Returns;
use crate::exchange::Exchange;
use crate::ranks::EpRanks;
use crate::rows::Layout;
use crate::tokens::Tokens;
use crate::transport::{Collective, Transport};

/// The backend `allgather_reducescatter`.
#[derive(Debug)]
pub struct AllgatherReducescatter {
    ranks: EpRanks,
    transport: Collective,
}

const NAME: &str = "allgather_reducescatter";

impl AllgatherReducescatter {
    /// Over these ranks.
    pub fn new(ranks: EpRanks) -> Self {
        let transport = Collective(ranks.ep.clone());
        Self { ranks, transport }
    }
}

impl Exchange for AllgatherReducescatter {
    const NAME: &'static str = NAME;
    const FORMAT: ActivationFormat = ActivationFormat::Standard;
    type Dispatching<'a> = Dispatched<'a>;

    fn ranks(&self) -> &EpRanks {
        &self.ranks
    }

    fn transport(&self) -> &dyn Transport {
        &self.transport
    }

    fn max_rows(&self, tokens: usize) -> usize {
        arrivals(&self.ranks, tokens)
    }

    fn dispatch_a<'a>(
        &'a self,
        hidden: View<'a>,
        topk_ids: View<'a>,
        topk_weights: View<'a>,
        agreed: Option<&[usize]>,
        ex: &mut Exec,
    ) -> Result<Dispatched<'a>> {
        let tokens = Tokens::check(NAME, hidden, topk_ids, topk_weights)?;
        let (ranks, top_k) = (&self.ranks, tokens.top_k);
        let counts = ranks.owned_counts(&ranks.rank_tokens(NAME, hidden.rows(), agreed, ex)?);
        let total = counts.iter().sum();
        let owned = ranks.owned(hidden.rows());

        let input = tokens.input_rows(ranks.router_weight_on_input, ex)?;
        let mut rows = ex.scratch(hidden.dtype(), &[total, tokens.hidden_size()])?;
        ranks.ep.all_gather_v(
            input.view().narrow(owned.start, owned.len())?,
            &counts,
            rows.view_mut(),
            ex,
        )?;
        let mut ids = ex.scratch(DType::U32, &[total, top_k])?;
        ranks.ep.all_gather_v(topk_ids.narrow(owned.start, owned.len())?, &counts, ids.view_mut(), ex)?;

        let blocks = Layout::Exact.blocks(&counts);
        let own = topk_ids.narrow(owned.start, owned.len())?;
        let returns = Returns {
            backend: NAME,
            send: ranks.computed_slots(NAME, ids.view().cpu()?, top_k, &blocks)?,
            receive: ranks.slots_by_rank(NAME, own.cpu()?)?,
            owned,
            layout: Layout::Exact,
        };
        let mut dispatched = Dispatched::standard(rows, topk_ids, topk_weights);
        dispatched.topk_ids = Some(ids.into());
        dispatched.topk_weights = None;
        dispatched.expert_map = ranks.local_experts().expert_map();
        dispatched.weights_applied = ranks.router_weight_on_input;
        Ok(dispatched.with_handle(returns))
    }

    fn dispatch_b<'a>(&'a self, begun: Dispatched<'a>, _: &mut Exec) -> Result<Dispatched<'a>> {
        Ok(begun)
    }
}

/// The most rows that can arrive where each rank brings at most `tokens` tokens.
pub(crate) fn arrivals(ranks: &EpRanks, tokens: usize) -> usize {
    tokens.div_ceil(ranks.tp.world_size()).saturating_mul(ranks.world_size())
}
