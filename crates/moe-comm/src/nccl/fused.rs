//! The collectives that peer memory runs in one launch with the ops around them, and gathers of several arrays.

use candle_core::{DType, Result, bail};
use moe_kernels::{Exec, View, ViewMut};

use super::comm::NcclComm;
use crate::call::Op;
use crate::collective::{Collective, FusedCollective, RowNeeds};
use crate::communicator::{Communicator, FusedCollectives};
use crate::parts::Request;
use crate::peer::PeerAllReduce;

impl FusedCollectives for NcclComm {
    fn shares_residual(
        &self,
        rows: usize,
        hidden: usize,
        dtype: DType,
    ) -> std::result::Result<(), &'static str> {
        match PeerAllReduce::is_small(rows, hidden) {
            true => Err("every rank adds up so few rows in one launch"),
            false if self.world_size() == 1 => Err("there is one rank"),
            false if dtype != DType::BF16 => {
                Err("only norms in bf16 are sent round, so that sums may travel in bf16")
            }
            false => Ok(()),
        }
    }

    fn rounds_sums(&self, rows: usize, hidden: usize, dtype: DType) -> bool {
        // NCCL's own sums would round between the additions, too.
        self.usable_peers().is_some() && self.shares_residual(rows, hidden, dtype).is_ok()
    }

    fn dispatches(&self, counts: &[usize], top_k: usize, hidden: usize, dtype: DType) -> bool {
        self.usable_peers().is_some_and(|peers| peers.fits_dispatch(counts, top_k, hidden, dtype))
    }

    fn combines(&self, counts: &[usize], top_k: usize, hidden: usize, dtype: DType) -> bool {
        let fits = |peers: &&PeerAllReduce| peers.fits_combine(counts, top_k, hidden);
        dtype == DType::BF16 && self.usable_peers().filter(fits).is_some()
    }

    fn takes(&self, call: &FusedCollective<'_>) -> bool {
        match call {
            // This is one group of calls in NCCL, too.
            FusedCollective::Gather { arrays, .. } => arrays.iter().all(|(_, out)| out.is_cuda()),
            call => self.peers_for(call).is_some(),
        }
    }

    fn run_fused(&self, call: FusedCollective<'_>, ex: &mut Exec) -> Result<()> {
        use FusedCollective as Call;
        let peers = self.peers_for(&call);
        match (call, peers) {
            (Call::Gather { arrays, counts, needs }, _) => self.gather(arrays, counts, needs.as_ref(), ex),
            (Call::AllReduceAddNorm { partial, end }, Some(peers)) => {
                self.on_stream(Op::AllReduce, ex, |ex| {
                    let norm = Some((&end.norm, end.out));
                    peers.all_reduce_add_norm_into(partial.as_view(), end.residual, norm, ex)
                })
            }
            (Call::ShareAddNorm { partial, end }, Some(peers)) => self.on_stream(Op::AllReduce, ex, |ex| {
                peers.share_add_norm_into(partial.as_view(), end.residual, &end.norm, end.out, ex)
            }),
            (Call::ScatterSums { sums, counts, needs, out }, Some(peers)) => {
                self.on_stream(Op::ReduceScatter, ex, |ex| {
                    peers.reduce_scatter_into(sums, counts, needs.as_ref(), out, ex)
                })
            }
            (Call::CombineAddNorm { slots, counts, needs, end }, Some(peers)) => {
                self.on_stream(Op::ReduceScatter, ex, |ex| {
                    peers.combine_add_norm_into(&slots, counts, needs.as_ref(), end, ex)
                })
            }
            (Call::Dispatch { rows, ids, weights, counts, owners }, Some(peers)) => {
                self.on_stream(Op::AllGather, ex, |ex| {
                    peers.dispatch_into(rows, ids, weights, counts, owners, ex)
                })
            }
            (call, None) => bail!("{self:?}: expected a call that it takes, got {call:?}"),
        }
    }
}

impl NcclComm {
    /// The peers that run a call in one launch. The decision depends only on what is the same on all ranks.
    fn peers_for(&self, call: &FusedCollective<'_>) -> Option<&PeerAllReduce> {
        let sums_and_norm = |partial: &ViewMut<'_>, weight: &View<'_>| {
            partial.is_cuda() && (partial.dtype(), weight.dtype()) == (DType::F32, DType::BF16)
        };
        self.usable_peers().filter(|peers| match call {
            FusedCollective::AllReduceAddNorm { partial, end } => {
                let weight = &end.norm.weight;
                sums_and_norm(partial, weight) && peers.fits_norm(partial.rows(), weight.elem_count())
            }
            FusedCollective::ShareAddNorm { partial, end } => {
                let weight = &end.norm.weight;
                sums_and_norm(partial, weight) && peers.fits_share(partial.rows(), weight.elem_count())
            }
            FusedCollective::ScatterSums { sums, counts, .. } => {
                let width: usize = sums.dims().iter().skip(1).product();
                let parts: Vec<_> = counts.iter().map(|rows| rows * width).collect();
                sums.is_cuda() && peers.fits_scatter(sums.dtype(), &parts)
            }
            FusedCollective::Dispatch { rows: (rows, _), ids: (ids, _), counts, .. } => {
                let width = |view: &View<'_>| view.dims().iter().skip(1).product::<usize>();
                rows.is_cuda() && self.dispatches(counts, width(ids), width(rows), rows.dtype())
            }
            FusedCollective::CombineAddNorm { slots, counts, end, .. } => {
                let combines =
                    |(_, top_k, hidden)| self.combines(counts, top_k, hidden, end.norm.weight.dtype());
                end.residual.is_cuda() && slots.check("combine_add_norm").is_ok_and(combines)
            }
            FusedCollective::Gather { .. } => false,
        })
    }

    /// Gathers arrays in device memory by one call.
    fn gather(
        &self,
        arrays: Vec<(View<'_>, ViewMut<'_>)>,
        counts: &[usize],
        needs: Option<&RowNeeds<'_>>,
        ex: &mut Exec,
    ) -> Result<()> {
        self.guarded(Op::AllGather, || {
            let mut checked = Vec::with_capacity(arrays.len());
            for (input, mut out) in arrays {
                self.place().check(&Collective::AllGather { input, counts, out: out.reborrow() })?;
                checked.push((input, out));
            }
            self.launch(Op::AllGather, Request::Gather { arrays: checked, counts, needs }, ex)
        })
    }
}
