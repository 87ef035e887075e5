//! The data that every backend over several ranks needs: the groups, the owner of each expert, and the owner of each
//! token.
//!
//! Ranks of one tensor-parallel group see the same tokens. Each token belongs to one of these ranks (equal shares, in
//! order), so that nothing is sent or weighted twice. At the end the group gathers the sums of the owners.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Device, Result};
use moe_comm::{Collectives, Communicator, ExpertLayout, RowNeeds, partition, shares};
use moe_kernels::{Buffer, Exec, NO_EXPERT, Scratch, View, ViewMut, copy_rows_into};

use crate::error::refuse;
use crate::local_experts::LocalExperts;
use crate::rows::{RowLists, width};

/// The part of all rows that must be expected to stay away for rows to be sent only to the ranks that need them. It is
/// (1 - 1/n)^K if the K experts of a token are spread evenly over n ranks. Below it, a launch that decides for each row
/// would take longer than it saves.
const WORTH_LEAVING_OUT: f64 = 0.1;

/// The ranks of an expert-parallel group, as one rank sees them.
#[derive(Debug)]
pub struct EpRanks {
    pub(crate) ep: Arc<dyn Communicator>,
    pub(crate) tp: Arc<dyn Communicator>,
    owners: Vec<u32>,
    /// `owners` in the memory of the device where the rows are; `None` for cut experts, which have no owners.
    placed_owners: Option<Buffer>,
    experts: LocalExperts,
}

impl EpRanks {
    /// `layout` is this rank's layout over `ep`. `tp` contains the ranks that see the same tokens, which are neighbours
    /// in `ep`.
    ///
    /// # Errors
    /// A layout of another rank or of more ranks; a `tp` that is not part of `ep`.
    pub fn new(layout: &ExpertLayout, ep: Arc<dyn Communicator>, tp: Arc<dyn Communicator>) -> Result<Self> {
        let rank = ep.rank();
        let ranks = ep.world_size();
        let tp_size = tp.world_size();
        if !ranks.is_multiple_of(tp_size) || rank % tp_size != tp.rank() {
            refuse!(
                Ranks,
                "expert parallelism: tensor-parallel rank {} of {tp_size} is no part of rank {rank} of {ranks}",
                tp.rank()
            )
        }
        let owned = layout.owners.iter().enumerate().filter(|(_, owner)| **owner as usize == rank);
        let fits = owned.map(|(expert, _)| expert as u32).eq(layout.local_experts.iter().copied());
        if !fits || layout.owners.iter().any(|&owner| owner as usize >= ranks) {
            refuse!(
                Ranks,
                "expert parallelism: the layout with the local experts {:?} is not that of rank {rank} of {ranks}",
                layout.local_experts
            )
        }
        let experts = match &layout.expert_map {
            Some(map) => LocalExperts::from_map(map, layout.num_local_experts())?,
            None => LocalExperts::all(layout.num_experts()),
        };
        let owners = layout.owners.clone();
        let placed_owners = Buffer::from_vec(owners.clone(), &[owners.len()])?;
        Ok(Self { ep, tp, owners, placed_owners: Some(placed_owners), experts })
    }

    /// Ranks that see the same tokens, each of which holds a part of every expert.
    pub(crate) fn of_cut_experts(comm: Arc<dyn Communicator>) -> Self {
        let owners = Vec::new();
        let experts = LocalExperts::all(0);
        Self { ep: comm.clone(), tp: comm, owners, placed_owners: None, experts }
    }

    /// The same ranks, with their expert map and owners on the device of the rows.
    pub fn on(self, device: &Device) -> Result<Self> {
        let Some(owners) = self.placed_owners.as_ref().filter(|_| !device.is_cpu()) else { return Ok(self) };
        let placed_owners = Some(Exec::on(device)?.buffer_from_host(owners.view())?);
        Ok(Self { experts: self.experts.on(device)?, placed_owners, ..self })
    }

    /// Which ranks need which rows of all ranks' tokens. `ids` are the tokens' experts.
    pub(crate) fn needs<'v>(&'v self, op: &str, ids: View<'v>) -> Result<RowNeeds<'v>> {
        Ok(RowNeeds { ids, owners: self.owners_on_device(op)? })
    }

    /// The rank of each expert, in the memory of the rows.
    pub(crate) fn owners_on_device(&self, op: &str) -> Result<View<'_>> {
        match &self.placed_owners {
            Some(owners) => Ok(owners.view()),
            None => refuse!(Ranks, "{op}: cut experts have no owners"),
        }
    }

    /// Whether the low-latency form sends rows only to the ranks that need them, for these numbers of rows of each
    /// rank: the communicator must do it in one launch, and enough rows must be expected to stay away.
    pub(crate) fn dispatches(&self, counts: &[usize], top_k: usize, hidden: usize, dtype: DType) -> bool {
        let away = (1.0 - 1.0 / self.world_size() as f64).powi(top_k.min(64) as i32);
        let fused = self.ep.fused();
        away >= WORTH_LEAVING_OUT && fused.is_some_and(|f| f.dispatches(counts, top_k, hidden, dtype))
    }

    /// The local slots of the experts.
    pub fn local_experts(&self) -> &LocalExperts {
        &self.experts
    }

    /// The local slots of the experts, if each has one owner; `None` for cut experts.
    pub(crate) fn whole_experts(&self) -> Option<&LocalExperts> {
        self.placed_owners.as_ref().map(|_| &self.experts)
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.ep.world_size()
    }

    /// The range of the tokens that this rank owns.
    pub(crate) fn owned(&self, tokens: usize) -> Range<usize> {
        partition(tokens, self.tp.world_size(), self.tp.rank())
    }

    /// The rows of an array of the caller's tokens [T, ..] that this rank owns.
    pub(crate) fn own<'v>(&self, array: View<'v>) -> Result<View<'v>> {
        let owned = self.owned(array.rows());
        array.narrow(owned.start, owned.len())
    }

    /// How many tokens each rank owns, if rank r brings `tokens[r]`.
    pub(crate) fn owned_counts(&self, tokens: &[usize]) -> Vec<usize> {
        let tp = self.tp.world_size();
        tokens.iter().enumerate().map(|(rank, &n)| partition(n, tp, rank % tp).len()).collect()
    }

    /// The rank that computes an expert; `None` for [`NO_EXPERT`].
    fn owner(&self, op: &str, id: u32) -> Result<Option<usize>> {
        match self.owners.get(id as usize) {
            Some(&owner) => Ok(Some(owner as usize)),
            None if id == NO_EXPERT => Ok(None),
            None => refuse!(Ranks, "{op}: expert id {id} is out of range; expected 0..{}", self.owners.len()),
        }
    }

    /// The slots of `ids`, ascending, by the rank that computes them.
    pub(crate) fn slots_by_rank(&self, op: &str, ids: &[u32]) -> Result<RowLists> {
        RowLists::collect(self.world_size(), |push| {
            for (slot, &id) in ids.iter().enumerate() {
                if let Some(rank) = self.owner(op, id)? {
                    push(rank, slot);
                }
            }
            Ok(())
        })
    }

    /// The tokens of `ids` [T, K] by rank. A token is listed once for each rank that computes any of its slots.
    pub(crate) fn tokens_by_rank(&self, op: &str, ids: &[u32], top_k: usize) -> Result<RowLists> {
        RowLists::collect(self.world_size(), |push| {
            for (token, ids) in ids.chunks(top_k.max(1)).enumerate() {
                let mut ranks = ids.iter().map(|&id| self.owner(op, id)).collect::<Result<Vec<_>>>()?;
                ranks.sort_unstable();
                ranks.dedup();
                ranks.into_iter().flatten().for_each(|rank| push(rank, token));
            }
            Ok(())
        })
    }

    /// Which slots of the rows that arrived from rank r this rank computes, ascending. The rows from rank r are
    /// `blocks[r]`, rows of `ids` [R, K].
    pub(crate) fn computed_slots(
        &self,
        op: &str,
        ids: &[u32],
        top_k: usize,
        blocks: &[Range<usize>],
    ) -> Result<RowLists> {
        let here = self.ep.rank();
        RowLists::collect(self.world_size(), |push| {
            for (rank, rows) in blocks.iter().enumerate() {
                for slot in rows.start * top_k..rows.end * top_k {
                    let id = ids.get(slot).copied().unwrap_or(NO_EXPERT);
                    if self.owner(op, id)? == Some(here) {
                        push(rank, slot);
                    }
                }
            }
            Ok(())
        })
    }

    /// The number of tokens that each rank brings to this call: `agreed`, or the answers of the ranks.
    pub(crate) fn rank_tokens(
        &self,
        op: &str,
        tokens: usize,
        agreed: Option<&[usize]>,
        ex: &mut Exec,
    ) -> Result<Arc<[usize]>> {
        let Some(agreed) = agreed else {
            return gather_counts(self.ep.as_ref(), tokens, ex);
        };
        if agreed.len() != self.world_size() || agreed.get(self.ep.rank()) != Some(&tokens) {
            refuse!(
                Ranks,
                "{op}: rank {} of {} brings {tokens} tokens, but the step agreed on {agreed:?}",
                self.ep.rank(),
                self.world_size()
            )
        }
        Ok(agreed.into())
    }

    /// Calls `write` for the rows [T_owned, H] of the owned tokens, in `dtype` (f32 or the dtype of `out`), rounds them
    /// once, and gathers them in `out` [T, H] with the rows of the other ranks that see the same tokens.
    pub(crate) fn for_owned(
        &self,
        dtype: DType,
        out: ViewMut,
        ex: &mut Exec,
        write: impl FnOnce(ViewMut, &mut Exec) -> Result<()>,
    ) -> Result<()> {
        let alone = self.tp.world_size() == 1;
        if alone && dtype == out.dtype() {
            return write(out, ex);
        }
        let dims = [self.owned(out.rows()).len(), out.dims().last().copied().unwrap_or(0)];
        let mut rows = ex.scratch(dtype, &dims)?;
        write(rows.view_mut(), ex)?;
        if alone {
            return copy_rows_into(rows.view(), out, ex);
        }
        if dtype != out.dtype() {
            let mut rounded = ex.scratch(out.dtype(), &dims)?;
            copy_rows_into(rows.view(), rounded.view_mut(), ex)?;
            rows = rounded;
        }
        let counts = shares(out.rows(), self.tp.world_size());
        self.tp.all_gather_v(rows.view(), &counts, out, ex)
    }

    /// Sends rows, packed by rank, and receives rows from all ranks.
    pub(crate) fn exchange(
        &self,
        rows: View,
        send: &[usize],
        receive: &[usize],
        ex: &mut Exec,
    ) -> Result<Scratch> {
        let mut arrived = ex.scratch(rows.dtype(), &[receive.iter().sum(), width(rows)])?;
        self.ep.all_to_all_v(rows, send, arrived.view_mut(), receive, ex)?;
        Ok(arrived)
    }

    /// The number of rows that each rank sends to this one, if this rank sends `send`. The numbers are exchanged
    /// through the host.
    pub(crate) fn exchange_counts(&self, send: &[usize], ex: &mut Exec) -> Result<Vec<usize>> {
        let own: Vec<u32> = send.iter().map(|&n| n as u32).collect();
        let mut all = vec![0u32; own.len()];
        let dims = [own.len()];
        self.ep.all_to_all(View::new(&own, &dims)?, ViewMut::new(&mut all, &dims)?, ex)?;
        Ok(all.into_iter().map(|n| n as usize).collect())
    }
}

/// Gathers one number of every rank, through the host.
pub(crate) fn gather_counts(comm: &dyn Communicator, own: usize, ex: &mut Exec) -> Result<Arc<[usize]>> {
    let Ok(own) = u32::try_from(own) else { refuse!(Ranks, "{own} tokens do not fit in u32; split them") };
    let mut all = vec![0u32; comm.world_size()];
    let dims = [all.len()];
    comm.all_gather(View::new(&[own], &[1])?, ViewMut::new(&mut all, &dims)?, ex)?;
    Ok(all.into_iter().map(|n| n as usize).collect())
}
