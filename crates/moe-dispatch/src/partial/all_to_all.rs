//! `deepep high_throughput`: each rank receives only the rows that its experts need, once however many
//! of them a token chose, and sends one sum per row back.
//!
//! Who needs what is decided on the host, which therefore reads the ids of each call: for steps that run
//! eagerly, such as prefill.

use std::ops::Range;

use candle_core::{DType, Result};
use moe_kernels::{
    ActivationFormat, Dispatched, Element, Exec, NO_EXPERT, Scratch, View, ViewMut, WeightAndReduce,
    embedding_into, fill_into, weighted_sum_into,
};

use super::partial_sums;
use crate::allgather::arrivals;
use crate::prepare_finalize::PrepareFinalize;
use crate::ranks::EpRanks;
use crate::rows::{Layout, RowLists};
use crate::tokens::Tokens;
use crate::transport::{Collective, Transport};

/// Sums of the rows that a rank's experts need, returned to their owners.
#[derive(Debug)]
pub struct SumAllToAll {
    ranks: EpRanks,
    transport: Box<dyn Transport>,
}

const NAME: &str = "deepep high_throughput";

/// What finalize needs again.
#[derive(Debug)]
struct Exchanged {
    /// Owned tokens by the rank that they went to.
    send: RowLists,
    /// Rows from each rank.
    receive: Vec<usize>,
    owned: Range<usize>,
}

impl SumAllToAll {
    /// Over these ranks, with the collectives of their communicator.
    pub fn new(ranks: EpRanks) -> Self {
        let transport = Collective(ranks.ep.clone());
        Self { ranks, transport: Box::new(transport) }
    }

    /// Sends rows, packed by rank, and receives those of the others.
    fn exchange(&self, rows: Scratch, send: &[usize], receive: &[usize], ex: &mut Exec) -> Result<Scratch> {
        let (dtype, width) = (rows.dtype(), rows.dims().get(1).copied().unwrap_or(0));
        let mut arrived = ex.scratch(dtype, &[receive.iter().sum(), width])?;
        let sent = self.transport.start(rows, send.to_vec(), ex)?;
        self.transport.finish(sent, arrived.view_mut(), receive, ex)?;
        Ok(arrived)
    }

    /// Rows that each rank sends here, where this one sends `send`.
    fn counts(&self, send: &[usize], ex: &mut Exec) -> Result<Vec<usize>> {
        let own: Vec<u32> = send.iter().map(|&n| n as u32).collect();
        let mut all = vec![0u32; own.len()];
        let dims = [own.len()];
        self.ranks.ep.all_to_all(View::new(&own, &dims)?, ViewMut::new(&mut all, &dims)?, ex)?;
        Ok(all.into_iter().map(|n| n as usize).collect())
    }

    /// `out` [T_owned, H] f32 = the sums that came back, in `back` [R, H], added by ascending rank.
    fn add(&self, exchanged: &Exchanged, back: View, out: ViewMut, ex: &mut Exec) -> Result<()> {
        let (ranks, width) = (self.ranks.world_size(), out.dims().get(1).copied().unwrap_or(0));
        let dims = [exchanged.owned.len(), ranks];
        // The row of each rank's sum of each token; a rank without a part in a token has none.
        let (mut rows, mut parts) = (vec![0u32; dims[0] * ranks], vec![NO_EXPERT; dims[0] * ranks]);
        let starts = Layout::Exact.starts(&exchanged.send.counts);
        for (rank, (tokens, start)) in exchanged.send.by_rank().zip(starts).enumerate() {
            for (row, &token) in (start as u32..).zip(tokens) {
                let at = token as usize * ranks + rank;
                (rows[at], parts[at]) = (row, 0);
            }
        }
        let mut sums = ex.scratch(DType::F32, &[dims[0], ranks, width])?;
        if back.rows() > 0 {
            let rows = placed(&rows, &[rows.len()], ex)?;
            embedding_into(back, rows.view(), sums.view_mut().reshape(&[dims[0] * ranks, width])?, ex)?;
        }
        let (parts, mut ones) = (placed(&parts, &dims, ex)?, ex.scratch(DType::F32, &dims)?);
        fill_into(1., ones.view_mut(), ex)?;
        weighted_sum_into(sums.view(), parts.view(), ones.view(), out, ex)
    }
}

impl PrepareFinalize for SumAllToAll {
    fn name(&self) -> &'static str {
        NAME
    }

    fn activation_format(&self) -> ActivationFormat {
        ActivationFormat::Standard
    }

    fn output_is_reduced(&self) -> bool {
        true
    }

    fn ep_ranks(&self) -> Option<&EpRanks> {
        Some(&self.ranks)
    }

    fn max_rows(&self, tokens: usize) -> usize {
        arrivals(&self.ranks, tokens)
    }

    fn adds_partial_sums(&self) -> bool {
        true
    }

    fn prepare<'a>(
        &'a self,
        hidden: View<'a>,
        topk_ids: View<'a>,
        topk_weights: View<'a>,
        _: Option<&[usize]>,
        ex: &mut Exec,
    ) -> Result<Dispatched<'a>> {
        let tokens = Tokens::check(NAME, hidden, topk_ids, topk_weights)?;
        let (top_k, owned) = (tokens.top_k, self.ranks.owned(hidden.rows()));
        let own = |view: View<'a>| view.narrow(owned.start, owned.len());
        let host_ids = ex.to_host(own(topk_ids)?)?;
        let ids = host_ids.view().cpu::<u32>()?;
        let send = self.ranks.tokens_by_rank(NAME, ids, top_k)?;
        let receive = self.counts(&send.counts, ex)?;

        let input = tokens.input_rows(self.ranks.router_weight_on_input, ex)?;
        let input = input.view().narrow(owned.start, owned.len())?;
        let list = placed(&send.rows, &[send.rows.len()], ex)?;
        let (rows, weights) = (packed(input, list.view(), ex)?, packed(own(topk_weights)?, list.view(), ex)?);
        let row_ids = |&row: &u32| ids.iter().skip(row as usize * top_k).take(top_k).copied();
        let ids: Vec<u32> = send.rows.iter().flat_map(row_ids).collect();
        let ids = placed(&ids, &[send.rows.len(), top_k], ex)?;

        let rows = self.exchange(rows, &send.counts, &receive, ex)?;
        let ids = self.exchange(ids, &send.counts, &receive, ex)?;
        let weights = self.exchange(weights, &send.counts, &receive, ex)?;
        let mut dispatched = Dispatched::standard(rows, topk_ids, topk_weights);
        (dispatched.topk_ids, dispatched.topk_weights) = (Some(ids.into()), Some(weights.into()));
        dispatched.expert_map = self.ranks.local_experts().expert_map();
        dispatched.weights_applied = self.ranks.router_weight_on_input;
        Ok(dispatched.with_handle(Exchanged { send, receive, owned }))
    }

    fn finalize(
        &self,
        expert_out: View,
        dispatched: &Dispatched,
        strategy: WeightAndReduce,
        out: ViewMut,
        ex: &mut Exec,
    ) -> Result<()> {
        let exchanged: &Exchanged = dispatched.handle(NAME)?;
        let strategy = match strategy {
            WeightAndReduce::Delegate => WeightAndReduce::Contiguous,
            chosen => chosen,
        };
        let slots = (dispatched.topk_ids()?, dispatched.topk_weights()?);
        let sums = partial_sums(NAME, expert_out, slots, dispatched, strategy, ex)?;
        let width = out.dims().get(1).copied().unwrap_or(0);
        // The transport keeps what it sends, and the experts' rows are only lent.
        let mut sent = ex.scratch(DType::F32, sums.view().dims())?;
        ex.copy(sums.view(), sent.view_mut())?;
        let back = self.exchange(sent, &exchanged.receive, &exchanged.send.counts, ex)?;
        let mut rows = ex.scratch(DType::F32, &[exchanged.owned.len(), width])?;
        self.add(exchanged, back.view(), rows.view_mut(), ex)?;
        self.ranks.share_owned(rows.view(), out, ex)
    }
}

/// The rows `list` of `table` [T, W], packed.
fn packed(table: View, list: View, ex: &mut Exec) -> Result<Scratch> {
    let width = table.dims().get(1).copied().unwrap_or(0);
    let mut packed = ex.scratch(table.dtype(), &[list.elem_count(), width])?;
    if list.elem_count() > 0 {
        embedding_into(table, list, packed.view_mut(), ex)?;
    }
    Ok(packed)
}

/// A copy of host data where the context runs.
fn placed<T: Element>(data: &[T], dims: &[usize], ex: &Exec) -> Result<Scratch> {
    let mut copy = ex.scratch(T::DTYPE, dims)?;
    ex.copy_from_host(View::new(data, dims)?, copy.view_mut())?;
    Ok(copy)
}
