//! Combine over ranks: computed slot rows go back to the owner of their token, who alone weights
//! and adds them.
//!
//! Sender and owner list the same slots in the same order (the owner's slots, ascending), each
//! from what it knows, so rows travel without any description. An output has the bits of one
//! rank: unweighted f32 rows, added k = 0..K-1, rounded once.

use std::ops::Range;

use candle_core::{DType, Result, bail};
use moe_kernels::door::{expect_dims, expect_dtype};
use moe_kernels::{Dispatched, Exec, View, ViewMut, WeightAndReduce, fill_into, weighted_sum_into};

use crate::ranks::EpRanks;
use crate::rows::{Layout, RowLists, gather, pack_rows};
use crate::transport::{Sent, Transport};

/// How the rows of one call get back.
#[derive(Debug)]
pub(crate) struct Returns {
    /// The call's backend, to tell its handle from another's.
    pub backend: &'static str,
    /// Rows of the experts' output, flattened to [R, H], for each rank.
    pub send: RowLists,
    /// Slots of the owned tokens that each rank computes.
    pub receive: RowLists,
    /// Which of the caller's tokens this rank owns.
    pub owned: Range<usize>,
    /// Blocks on the way.
    pub layout: Layout,
}

/// The caller's checks, then the first half: rows begin their way back.
pub(crate) fn combine_a(
    name: &'static str,
    transport: &dyn Transport,
    expert_out: View,
    dispatched: &Dispatched,
    strategy: WeightAndReduce,
    ex: &mut Exec,
) -> Result<Sent> {
    let returns = returns(name, dispatched)?;
    if !matches!(strategy, WeightAndReduce::Delegate) {
        bail!(
            "{name}: expected experts that return unweighted rows (Delegate), got {strategy:?}: only a token's owner \
             can weight them"
        )
    }
    expect_dtype(name, "expert_out", &expert_out, DType::F32)?;
    let dims = dispatched.expert_out_dims()?;
    expect_dims(name, "expert_out", &expert_out, &dims)?;
    let width = dims.last().copied().unwrap_or(0);
    let rows = dims.iter().rev().skip(1).product();
    let packed = pack_rows(name, expert_out.reshape(&[rows, width])?, &returns.send, returns.layout, ex)?;
    transport.start(packed, returns.layout.counts(&returns.send.counts), ex)
}

/// The second half: the owners' rows, weighted, added and shared with the ranks of the same tokens.
pub(crate) fn combine_b(
    name: &'static str,
    ranks: &EpRanks,
    transport: &dyn Transport,
    sent: Sent,
    dispatched: &Dispatched,
    mut out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    let Returns { receive, owned, layout, .. } = returns(name, dispatched)?;
    let (ids, top_k) =
        (dispatched.owner_topk_ids, dispatched.owner_topk_ids.dims().get(1).copied().unwrap_or(0));
    let width = dispatched.rows.view().dims().last().copied().unwrap_or(0);
    expect_dims(name, "out", &out, &[ids.rows(), width])?;
    let mut arrived = ex.scratch(DType::F32, &[layout.total(&receive.counts), width])?;
    transport.finish(sent, arrived.view_mut(), &layout.counts(&receive.counts), ex)?;

    // The row of every owned slot among those that arrived; slots without an expert have none.
    let mut row_of_slot = vec![0u32; owned.len() * top_k];
    for (slots, start) in receive.by_rank().zip(layout.starts(&receive.counts)) {
        for (row, &slot) in (start as u32..).zip(slots) {
            if let Some(place) = row_of_slot.get_mut(slot as usize) {
                *place = row;
            }
        }
    }
    let mut slots = ex.scratch(DType::F32, &[owned.len(), top_k, width])?;
    if arrived.dims().first() != Some(&0) {
        let to = slots.view_mut().reshape(&[owned.len() * top_k, width])?;
        gather(arrived.view(), &row_of_slot, to, ex)?;
    }
    drop(arrived);
    let own_ids = ids.narrow(owned.start, owned.len())?;
    if ranks.tp.world_size() == 1 {
        return weigh(slots.view(), own_ids, dispatched, owned, out.reborrow(), ex);
    }
    let mut rows = ex.scratch(out.dtype(), &[owned.len(), width])?;
    weigh(slots.view(), own_ids, dispatched, owned, rows.view_mut(), ex)?;
    ranks.gather_owned(rows.view(), out, ex)
}

/// Weights and adds the slots of the owned tokens.
pub(crate) fn weigh(
    slots: View,
    ids: View,
    dispatched: &Dispatched,
    owned: &Range<usize>,
    out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    if !dispatched.weights_applied {
        let weights = dispatched.owner_topk_weights.narrow(owned.start, owned.len())?;
        return weighted_sum_into(slots, ids, weights, out, ex);
    }
    let mut ones = ex.scratch(DType::F32, ids.dims())?;
    fill_into(1., ones.view_mut(), ex)?;
    weighted_sum_into(slots, ids, ones.view(), out, ex)
}

fn returns<'a>(name: &'static str, dispatched: &'a Dispatched) -> Result<&'a Returns> {
    let returns: &Returns = dispatched.handle(name)?;
    if returns.backend != name {
        bail!("{name}: these rows were prepared by {}; finalize with the same backend", returns.backend)
    }
    Ok(returns)
}
