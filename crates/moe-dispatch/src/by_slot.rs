//! Combine by slot: computed slot rows return to the owner of their token. Only the owner weights and adds them.
//!
//! Sender and owner list the same slots in the same order (the owner's slots, ascending). Each makes the list from its
//! own data, so rows are sent without a description. An output has the same bits as on one rank: unweighted f32 rows
//! are added in the order k = 0..K-1 and rounded once.

use candle_core::{DType, Result, bail};
use moe_comm::{reduce_segments_into, shares};
use moe_kernels::arguments::{expect_dims, expect_dtype};
use moe_kernels::{Dispatched, Exec, NO_EXPERT, Scratch, View, ViewMut, WeightAndReduce};

use crate::ranks::EpRanks;
use crate::reduce::{CombineArgs, weight_and_reduce_into};
use crate::rows::{Batches, Layout, Packing, RowLists, batch, gather, width};
use crate::slot_bias::add_slot_bias;

/// How the slot rows of one call return to the owners.
#[derive(Debug)]
pub(crate) struct Returns {
    /// For each rank: the rows to send to it, as indices into the experts' output, flattened to [R, H].
    send: RowLists,
    /// For each rank: the slots of the owned tokens that it computes.
    receive: RowLists,
    /// How the blocks are laid out when they are sent.
    layout: Layout,
}

impl Returns {
    /// The return of slot rows [T', K, H], from the caller's ids and the ids that arrived in one block of rows for each
    /// rank.
    pub fn of_rows(
        op: &str,
        ranks: &EpRanks,
        (arrived, counts): (View, &[usize]),
        topk_ids: View,
        ex: &mut Exec,
    ) -> Result<Self> {
        let arrived = ex.to_host(arrived)?;
        let blocks = Layout::Exact.blocks(counts);
        let send = ranks.computed_slots(op, arrived.view().cpu()?, width(topk_ids), &blocks)?;
        Ok(Self { send, receive: owned_slots(op, ranks, topk_ids, ex)?, layout: Layout::Exact })
    }

    /// Sorts rows that arrived in blocks of `block` rows, with `ids`, into blocks by expert. Their results return in
    /// blocks of a fixed size, too.
    pub fn of_batches(
        op: &str,
        ranks: &EpRanks,
        (rows, ids, block): (View, View, usize),
        topk_ids: View,
        ex: &mut Exec,
    ) -> Result<(Batches, Self)> {
        let top_k = width(ids);
        let room = rows.rows();
        let ids = ex.to_host(ids)?;
        let ids = ids.view().cpu::<u32>()?;
        let once = ex.scratch_from_host(View::new(&name_once(ids, top_k), &[room, top_k])?)?;
        let batches = batch(rows, once.view(), ranks.local_experts(), room, ex)?;

        let offsets = ex.to_host(batches.offsets.view())?;
        let slots = ex.to_host(batches.slots.view())?;
        let mut row_of_slot = vec![0u32; ids.len()];
        for (expert, bounds) in offsets.view().cpu::<u32>()?.windows(2).enumerate() {
            let group = slots.view().cpu::<u32>()?.get(bounds[0] as usize..bounds[1] as usize).unwrap_or(&[]);
            for (row, &slot) in group.iter().enumerate() {
                row_of_slot[slot as usize] = (expert * room + row) as u32;
            }
        }
        let blocks: Vec<_> = (0..ranks.world_size()).map(|rank| rank * block..(rank + 1) * block).collect();
        let mut send = ranks.computed_slots(op, ids, top_k, &blocks)?;
        for row in &mut send.rows {
            *row = row_of_slot.get(first_slot(ids, top_k, *row as usize)).copied().unwrap_or(0);
        }
        let receive = owned_slots(op, ranks, topk_ids, ex)?;
        Ok((batches, Self { send, receive, layout: Layout::Fixed(block * top_k) }))
    }

    /// Sends the experts' slot rows to the tokens' owners; returns the rows of the owned tokens, [T_owned, K, H] f32.
    pub fn travel(
        &self,
        op: &str,
        ranks: &EpRanks,
        expert_out: View,
        dispatched: &Dispatched,
        ex: &mut Exec,
    ) -> Result<Scratch> {
        expect_dtype(op, "expert_out", &expert_out, DType::F32)?;
        let dims = dispatched.expert_out_dims()?;
        expect_dims(op, "expert_out", &expert_out, &dims)?;
        let width = width(expert_out);
        let rows = dims.iter().rev().skip(1).product();
        let packing = Packing::new(&self.send, self.layout, ex)?;
        let packed = packing.pack(expert_out.reshape(&[rows, width])?, ex)?;
        let receive = self.layout.counts(&self.receive.counts);
        let arrived = ranks.exchange(packed.view(), &packing.counts(), &receive, ex)?;

        // For every owned slot: the index of its row among the rows that arrived. A slot without an expert has none.
        let (owned, top_k) = owned_dims(ranks, dispatched);
        let mut row_of_slot = vec![0u32; owned * top_k];
        for (slots, block) in self.receive.by_rank().zip(self.layout.blocks(&self.receive.counts)) {
            for (row, &slot) in (block.start as u32..).zip(slots) {
                row_of_slot[slot as usize] = row;
            }
        }
        let mut slots = ex.scratch(DType::F32, &[owned, top_k, width])?;
        if arrived.view().rows() > 0 {
            let list = ex.scratch_from_host(View::new(&row_of_slot, &[owned * top_k])?)?;
            gather(arrived.view(), list.view(), slots.view_mut().reshape(&[owned * top_k, width])?, ex)?;
        }
        Ok(slots)
    }
}

/// The slots of the caller's owned tokens, by the rank that computes them.
fn owned_slots(op: &str, ranks: &EpRanks, topk_ids: View, ex: &mut Exec) -> Result<RowLists> {
    let own = ex.to_host(ranks.own(topk_ids)?)?;
    ranks.slots_by_rank(op, own.view().cpu()?)
}

/// The number of owned tokens, and of their slots.
fn owned_dims(ranks: &EpRanks, dispatched: &Dispatched) -> (usize, usize) {
    (ranks.owned(dispatched.owner_topk_ids.rows()).len(), width(dispatched.owner_topk_ids))
}

/// The ids of each row [K] without repetitions. A row has one place in an expert's block, even if a recording or a
/// random router names the expert twice.
fn name_once(ids: &[u32], top_k: usize) -> Vec<u32> {
    let once = |(slot, &id)| if first_slot(ids, top_k, slot) == slot { id } else { NO_EXPERT };
    ids.iter().enumerate().map(once).collect()
}

/// The first slot of the same row with the same expert.
fn first_slot(ids: &[u32], top_k: usize, slot: usize) -> usize {
    let row = slot - slot % top_k.max(1);
    (row..slot).find(|&earlier| ids.get(earlier) == ids.get(slot)).unwrap_or(slot)
}

/// The slot rows of cut experts for the owned tokens, [T_owned, K, H] f32. The segments of all ranks, [S_local, T, K,
/// H] (or [T, K, H] for one segment), are added in ascending order.
pub(crate) fn add_segments(
    op: &str,
    ranks: &EpRanks,
    expert_out: View,
    dispatched: &Dispatched,
    ex: &mut Exec,
) -> Result<Scratch> {
    let tokens = dispatched.owner_topk_ids.rows();
    let top_k = width(dispatched.owner_topk_ids);
    let width = width(dispatched.rows.view());
    let segments = match *expert_out.dims() {
        [segments, t, k, h] if [t, k, h] == [tokens, top_k, width] => segments,
        [t, k, h] if [t, k, h] == [tokens, top_k, width] => 1,
        _ => bail!(
            "{op}: expected expert_out [S_local, {tokens}, {top_k}, {width}], got dims {:?}",
            expert_out.dims()
        ),
    };
    expect_dtype(op, "expert_out", &expert_out, DType::F32)?;
    let (owned, _) = owned_dims(ranks, dispatched);
    let mut slots = ex.scratch(DType::F32, &[owned, top_k, width])?;
    let flat = slots.view_mut().reshape(&[owned, top_k * width])?;
    let partials = expert_out.reshape(&[segments, tokens, top_k * width])?;
    reduce_segments_into(ranks.tp.as_ref(), partials, &shares(tokens, ranks.tp.world_size()), flat, ex)?;
    if let Some(bias) = dispatched.slot_bias {
        add_slot_bias(op, bias, ranks.own(dispatched.owner_topk_ids)?, slots.view_mut())?;
    }
    Ok(slots)
}

/// `out` [T, H] = the owned tokens' slot rows [T_owned, K, H], weighted and added, then gathered by the ranks that have
/// the same tokens.
pub(crate) fn add_slots(
    ranks: &EpRanks,
    slots: View,
    dispatched: &Dispatched,
    out: ViewMut,
    ex: &mut Exec,
) -> Result<()> {
    let args = CombineArgs {
        topk_ids: ranks.own(dispatched.owner_topk_ids)?,
        topk_weights: ranks.own(dispatched.owner_topk_weights)?,
        expert_map: None,
        weights_applied: dispatched.weights_applied,
    };
    ranks.for_owned(out.dtype(), out, ex, |rows, ex| {
        weight_and_reduce_into(WeightAndReduce::Contiguous, slots, &args, rows, ex)
    })
}
