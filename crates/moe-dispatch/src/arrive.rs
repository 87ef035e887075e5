//! The ways in which rows reach the experts of other ranks: all ranks gather all rows, ranks gather only the rows that
//! they need, or rows are sent to the ranks that need them, to the places of a gather or packed.

use candle_core::{DType, Result};
use moe_comm::FusedCollective;
use moe_kernels::{ActivationFormat, Dispatched, Exec, Lent, Scratch, View, list_slots_into};

use crate::call::Call;
use crate::rows::{Layout, Packing, width};

/// The rows that have arrived, [T', H], with ids [T', K] and, where ranks weight rows, weights [T', K].
pub(crate) struct Arrived {
    pub rows: Scratch,
    pub ids: Scratch,
    weights: Option<Scratch>,
}

impl Arrived {
    pub fn standard<'a>(self, call: &Call<'_, 'a>) -> Dispatched<'a> {
        let mut dispatched = Dispatched::standard(self.rows, call.ids, call.weights);
        dispatched.topk_ids = Some(self.ids.into());
        dispatched.topk_weights = self.weights.map(Lent::from);
        dispatched
    }

    /// Leaves the rows where they are, and lists their slots by expert.
    pub fn listed<'a>(self, call: &Call<'_, 'a>, ex: &mut Exec) -> Result<Dispatched<'a>> {
        let experts = call.ranks.local_experts();
        let local = experts.num_local();
        let slots = self.ids.view().elem_count();
        let mut counts = ex.scratch(DType::U32, &[local])?;
        let mut lists = ex.scratch(DType::U32, &[local, slots])?;
        list_slots_into(self.ids.view(), experts.expert_map(), counts.view_mut(), lists.view_mut(), ex)?;
        let mut dispatched = self.standard(call);
        dispatched.format = ActivationFormat::Listed;
        (dispatched.expert_slots, dispatched.expert_num_tokens) = (Some(lists.into()), Some(counts.into()));
        Ok(dispatched)
    }
}

/// Sends the owned rows of all ranks to every rank. With `needed` a rank gets only the rows that its experts need, at
/// the same places, and the other rows are unspecified.
pub(crate) fn gather(call: &Call, counts: &[usize], needed: bool, ex: &mut Exec) -> Result<Arrived> {
    let ranks = call.ranks;
    let input = call.input.view();
    let total = counts.iter().sum();
    let mut room = |array: View| ex.scratch(array.dtype(), &[total, width(array)]);
    let mut rows = room(input)?;
    let mut ids = room(call.ids)?;
    let mut weights = call.weights_that_travel().map(&mut room).transpose()?;
    let mut arrays = vec![(ranks.own(call.ids)?, ids.view_mut())];
    if !needed {
        arrays.push((ranks.own(input)?, rows.view_mut()));
    }
    if let Some(weights) = &mut weights {
        arrays.push((ranks.own(call.weights)?, weights.view_mut()));
    }
    FusedCollective::Gather { arrays, counts, needs: None }.run(&*ranks.ep, ex)?;
    if needed {
        let needs = Some(ranks.needs(call.op, ids.view())?);
        let arrays = vec![(ranks.own(input)?, rows.view_mut())];
        FusedCollective::Gather { arrays, counts, needs }.run(&*ranks.ep, ex)?;
    }
    Ok(Arrived { rows, ids, weights })
}

/// Sends the owned rows to the ranks that need them, and their ids and weights to all, at the places of [`gather`].
/// Rows that this rank does not need are unspecified.
pub(crate) fn dispatch(call: &Call, counts: &[usize], ex: &mut Exec) -> Result<Arrived> {
    let ranks = call.ranks;
    let input = call.input.view();
    let total = counts.iter().sum();
    let room = |array: View| ex.scratch(array.dtype(), &[total, width(array)]);
    let mut rows = room(input)?;
    let mut ids = room(call.ids)?;
    let mut weights = room(call.weights)?;
    let dispatch = FusedCollective::Dispatch {
        rows: (ranks.own(input)?, rows.view_mut()),
        ids: (ranks.own(call.ids)?, ids.view_mut()),
        weights: (ranks.own(call.weights)?, weights.view_mut()),
        counts,
        owners: ranks.owners_on_device(call.op)?,
    };
    dispatch.run(&*ranks.ep, ex)?;
    Ok(Arrived { rows, ids, weights: Some(weights) })
}

/// Sends to every rank the owned rows that its experts need: in blocks of `block` rows, or with exact counts. Also
/// returns how many rows arrived from each rank.
pub(crate) fn all_to_all(call: &Call, block: Option<usize>, ex: &mut Exec) -> Result<(Arrived, Vec<usize>)> {
    let ranks = call.ranks;
    let top_k = width(call.ids);
    let ids = ex.to_host(ranks.own(call.ids)?)?;
    let ids = ids.view().cpu::<u32>()?;
    let send = ranks.tokens_by_rank(call.op, ids, top_k)?;
    let (layout, receive) = match block {
        Some(rows) => (Layout::Fixed(rows), vec![rows; ranks.world_size()]),
        None => (Layout::Exact, ranks.exchange_counts(&send.counts, ex)?),
    };
    let packing = Packing::new(&send, layout, ex)?;
    let counts = packing.counts();
    let packed = packing.pack(ranks.own(call.input.view())?, ex)?;
    let rows = ranks.exchange(packed.view(), &counts, &receive, ex)?;
    let packed = packing.pack_ids(ids, top_k, ex)?;
    let ids = ranks.exchange(packed.view(), &counts, &receive, ex)?;
    Ok((Arrived { rows, ids, weights: None }, receive))
}
