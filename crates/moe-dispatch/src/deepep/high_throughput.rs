//! The form with exact counts: what prefill wants.

use candle_core::{DType, Result};
use moe_kernels::{ActivationFormat, Dispatched, Exec, Lent, Scratch, View};

use crate::allgather::arrivals;
use crate::combine::Returns;
use crate::exchange::Exchange;
use crate::ranks::EpRanks;
use crate::rows::{Layout, pack_ids, pack_rows};
use crate::tokens::Tokens;
use crate::transport::{Collective, Sent, Transport};

/// The backend `deepep` in its mode `high_throughput`.
#[derive(Debug)]
pub struct HighThroughput {
    ranks: EpRanks,
    transport: Box<dyn Transport>,
}

const NAME: &str = "deepep high_throughput";

/// A dispatch whose rows are on their way.
#[derive(Debug)]
pub struct Dispatching<'a> {
    topk_ids: View<'a>,
    topk_weights: View<'a>,
    hidden_size: usize,
    dtype: DType,
    rows: Sent,
    ids: Scratch,
    /// Rows to and from each rank.
    send: Vec<usize>,
    receive: Vec<usize>,
}

impl HighThroughput {
    /// Over these ranks, with the collectives of their communicator.
    pub fn new(ranks: EpRanks) -> Self {
        let transport = Collective(ranks.ep.clone());
        Self::with_transport(ranks, transport)
    }

    /// Over another transport between the same ranks.
    pub fn with_transport(ranks: EpRanks, transport: impl Transport + 'static) -> Self {
        Self { ranks, transport: Box::new(transport) }
    }
}

impl Exchange for HighThroughput {
    const NAME: &'static str = NAME;
    const FORMAT: ActivationFormat = ActivationFormat::Standard;
    type Dispatching<'a> = Dispatching<'a>;

    fn ranks(&self) -> &EpRanks {
        &self.ranks
    }

    fn transport(&self) -> &dyn Transport {
        self.transport.as_ref()
    }

    fn max_rows(&self, tokens: usize) -> usize {
        arrivals(&self.ranks, tokens)
    }

    /// The ranks learn how many rows come, and rows leave.
    fn dispatch_a<'a>(
        &'a self,
        hidden: View<'a>,
        topk_ids: View<'a>,
        topk_weights: View<'a>,
        _: Option<&[usize]>,
        ex: &mut Exec,
    ) -> Result<Dispatching<'a>> {
        let tokens = Tokens::check(NAME, hidden, topk_ids, topk_weights)?;
        let owned = self.ranks.owned(hidden.rows());
        let ids = topk_ids.narrow(owned.start, owned.len())?;
        let lists = self.ranks.tokens_by_rank(NAME, ids.cpu()?, tokens.top_k)?;
        let counts: Vec<u32> = lists.counts.iter().map(|&n| n as u32).collect();
        let mut arriving = ex.scratch(DType::U32, &[counts.len()])?;
        self.ranks.ep.all_to_all(View::new(&counts, &[counts.len()])?, arriving.view_mut(), ex)?;
        let receive = arriving.view().cpu::<u32>()?.iter().map(|&n| n as usize).collect();

        let input = tokens.input_rows(self.ranks.router_weight_on_input, ex)?;
        let own = input.view().narrow(owned.start, owned.len())?;
        let packed = pack_rows(NAME, own, &lists, Layout::Exact, ex)?;
        let ids = pack_ids(NAME, ids, &lists, Layout::Exact, ex)?;
        let rows = self.transport.start(packed, lists.counts.clone(), ex)?;
        let (hidden_size, dtype) = (tokens.hidden_size(), hidden.dtype());
        Ok(Dispatching { topk_ids, topk_weights, hidden_size, dtype, rows, ids, send: lists.counts, receive })
    }

    fn dispatch_b<'a>(&'a self, begun: Dispatching<'a>, ex: &mut Exec) -> Result<Dispatched<'a>> {
        let Dispatching {
            topk_ids,
            topk_weights,
            hidden_size,
            dtype,
            rows: sent,
            ids: sent_ids,
            send,
            receive,
        } = begun;
        let (total, top_k) = (receive.iter().sum(), topk_ids.dims().get(1).copied().unwrap_or(0));
        let mut rows = ex.scratch(dtype, &[total, hidden_size])?;
        self.transport.finish(sent, rows.view_mut(), &receive, ex)?;
        let mut ids = ex.scratch(DType::U32, &[total, top_k])?;
        self.ranks.ep.all_to_all_v(sent_ids.view(), &send, ids.view_mut(), &receive, ex)?;

        let blocks = Layout::Exact.blocks(&receive);
        let owned = self.ranks.owned(topk_ids.rows());
        let own = topk_ids.narrow(owned.start, owned.len())?;
        let returns = Returns {
            backend: NAME,
            send: self.ranks.computed_slots(NAME, ids.view().cpu()?, top_k, &blocks)?,
            receive: self.ranks.slots_by_rank(NAME, own.cpu()?)?,
            owned,
            layout: Layout::Exact,
        };
        let mut dispatched = Dispatched::standard(rows, topk_ids, topk_weights);
        dispatched.topk_ids = Some(Lent::Owned(ids));
        dispatched.topk_weights = None;
        dispatched.expert_map = self.ranks.local_experts().expert_map();
        dispatched.weights_applied = self.ranks.router_weight_on_input;
        Ok(dispatched.with_handle(returns))
    }
}
