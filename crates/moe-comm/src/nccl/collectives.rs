//! Each collective, on the stream of its context.

use std::sync::Arc;

use candle_core::{DType, Result, bail};
use moe_kernels::{Exec, PreNorm, SlotRows, View, ViewMut, add_rms_norm_into};

use super::comm::{NcclComm, is_recorded};
use crate::by_parts::{combine_add_rms_norm, reduce_scatter_rounded, share_add_rms_norm};
use crate::call::Op;
use crate::communicator::{Collective, Communicator, ReduceOp, RowNeeds};
use crate::parts::{Request, Verb, exchange_parts, one};
use crate::peer::PeerAllReduce;
use crate::round::wait::{Outcome, Stop};

impl Communicator for NcclComm {
    fn rank(&self) -> usize {
        self.place().rank
    }

    fn world_size(&self) -> usize {
        self.place().size
    }

    fn medium(&self) -> String {
        match self.peers() {
            Ok(_) => "peer memory, NCCL for large sums".to_string(),
            Err(why) => format!("NCCL alone: the ranks cannot share memory: {why}"),
        }
    }

    fn run(&self, collective: Collective<'_>, ex: &mut Exec) -> Result<()> {
        let (name, call) = (collective.op(), self.place().check(&collective));
        match collective {
            Collective::AllReduce { data, op } => {
                self.collective(name, call, None, data, ex, |_, data| Ok(Request::Reduce { data, op }))
            }
            Collective::AllGather { input, counts, out } => {
                self.collective(name, call, Some(input), out, ex, |input, out| {
                    Ok(Request::Gather { arrays: vec![(needed(input)?, out)], counts, needs: None })
                })
            }
            Collective::ReduceScatter { input, counts, out, op } => {
                self.collective(name, call, Some(input), out, ex, |input, out| {
                    Ok(Request::Scatter { input: needed(input)?, counts, out, op, needs: None })
                })
            }
            Collective::AllToAll { input, send, out, recv } => {
                self.collective(name, call, Some(input), out, ex, |input, out| {
                    exchange_parts(needed(input)?, send, out, recv).map(Request::Parts)
                })
            }
            Collective::Broadcast { data, root } => self.collective(name, call, None, data, ex, |_, data| {
                Ok(Request::Parts(vec![one(Verb::Broadcast { root }, None, data)]))
            }),
            Collective::Barrier => {
                // A view of host memory is waited for, and one element of it comes from every rank.
                let mut met = [0u8];
                let data = ViewMut::new(&mut met, &[1])?;
                self.collective(name, call, None, data, ex, |_, data| {
                    Ok(Request::Reduce { data, op: ReduceOp::Max })
                })
            }
        }
    }

    fn all_reduce_add_rms_norm(
        &self,
        mut partial: ViewMut<'_>,
        weight: View<'_>,
        eps: f32,
        residual: ViewMut<'_>,
        out: ViewMut<'_>,
        ex: &mut Exec,
    ) -> Result<()> {
        match self.peers_for_norm(&partial, &weight) {
            Some(peers) => self.on_stream(Op::AllReduce, ex, |ex| {
                let norm = PreNorm { weight, eps };
                peers.all_reduce_add_norm_into(partial.as_view(), residual, Some((&norm, out)), ex)
            }),
            None => {
                self.all_reduce(partial.reborrow(), ReduceOp::Sum, ex)?;
                add_rms_norm_into(partial.as_view(), weight, eps, residual, out, ex)
            }
        }
    }

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

    fn share_add_rms_norm(
        &self,
        partial: ViewMut<'_>,
        weight: View<'_>,
        eps: f32,
        residual: ViewMut<'_>,
        out: ViewMut<'_>,
        ex: &mut Exec,
    ) -> Result<()> {
        match self.peers_for_share(&partial, &weight) {
            Some(peers) => self.on_stream(Op::AllReduce, ex, |ex| {
                let norm = PreNorm { weight, eps };
                peers.share_add_norm_into(partial.as_view(), residual, &norm, out, ex)
            }),
            None => share_add_rms_norm(self, partial, weight, eps, residual, out, ex),
        }
    }

    fn all_gather_v_each(
        &self,
        arrays: Vec<(View<'_>, ViewMut<'_>)>,
        counts: &[usize],
        ex: &mut Exec,
    ) -> Result<()> {
        if !arrays.iter().all(|(_, out)| out.is_cuda()) {
            return arrays.into_iter().try_for_each(|(input, out)| self.all_gather_v(input, counts, out, ex));
        }
        self.guarded(Op::AllGather, || {
            let mut checked = Vec::with_capacity(arrays.len());
            for (input, out) in arrays {
                let gather = Collective::AllGather { input, counts, out };
                self.place().check(&gather)?;
                if let Collective::AllGather { input, out, .. } = gather {
                    checked.push((input, out));
                }
            }
            self.launch(Op::AllGather, Request::Gather { arrays: checked, counts, needs: None }, ex)
        })
    }

    fn all_gather_needed(
        &self,
        input: View<'_>,
        counts: &[usize],
        needs: &RowNeeds<'_>,
        mut out: ViewMut<'_>,
        ex: &mut Exec,
    ) -> Result<()> {
        let call = self.place().check(&Collective::AllGather { input, counts, out: out.reborrow() });
        self.collective(Op::AllGather, call, Some(input), out, ex, |input, out| {
            Ok(Request::Gather { arrays: vec![(needed(input)?, out)], counts, needs: Some(needs) })
        })
    }

    fn reduce_scatter_needed(
        &self,
        input: View<'_>,
        counts: &[usize],
        needs: &RowNeeds<'_>,
        mut out: ViewMut<'_>,
        ex: &mut Exec,
    ) -> Result<()> {
        let op = ReduceOp::Sum;
        let call = self.place().check(&Collective::ReduceScatter { input, counts, out: out.reborrow(), op });
        self.collective(Op::ReduceScatter, call, Some(input), out, ex, |input, out| {
            Ok(Request::Scatter { input: needed(input)?, counts, out, op, needs: Some(needs) })
        })
    }

    fn rounds_sums(&self, rows: usize, hidden: usize, dtype: DType) -> bool {
        // NCCL would round between the additions, too.
        self.usable_peers().is_some() && self.shares_residual(rows, hidden, dtype).is_ok()
    }

    fn reduce_scatter_rounded(
        &self,
        input: View<'_>,
        counts: &[usize],
        needs: Option<&RowNeeds<'_>>,
        out: ViewMut<'_>,
        ex: &mut Exec,
    ) -> Result<()> {
        match self.peers_for_sums(&input, counts) {
            Some(peers) => self.on_stream(Op::ReduceScatter, ex, |ex| {
                peers.reduce_scatter_into(input, counts, needs, out, ex)
            }),
            None => reduce_scatter_rounded(self, input, counts, out, ex),
        }
    }

    fn combines(&self, counts: &[usize], top_k: usize, hidden: usize, dtype: DType) -> bool {
        let fits = |peers: &&PeerAllReduce| peers.fits_combine(counts, top_k, hidden);
        dtype == DType::BF16 && self.usable_peers().filter(fits).is_some()
    }

    fn combine_add_rms_norm(
        &self,
        slots: &SlotRows<'_>,
        counts: &[usize],
        norm: &PreNorm<'_>,
        residual: ViewMut<'_>,
        out: ViewMut<'_>,
        ex: &mut Exec,
    ) -> Result<()> {
        let (_, top_k, hidden) = slots.check("combine_add_rms_norm")?;
        let peers = self.usable_peers().filter(|_| residual.is_cuda());
        match peers.filter(|_| self.combines(counts, top_k, hidden, norm.weight.dtype())) {
            Some(peers) => self.on_stream(Op::ReduceScatter, ex, |ex| {
                peers.combine_add_norm_into(slots, counts, residual, norm, out, ex)
            }),
            None => combine_add_rms_norm(self, slots, counts, norm, residual, out, ex),
        }
    }

    fn split(&self, color: usize, key: usize, ex: &mut Exec) -> Result<Arc<dyn Communicator>> {
        Ok(Arc::new(self.guarded(Op::Split, || self.part(color, key, ex))?))
    }

    fn abort(&self, reason: &str) {
        self.fail(&format!("aborted: {reason}"));
    }

    fn check(&self) -> Result<()> {
        self.checked()
    }

    fn watch(&self, ex: &mut Exec) -> Result<()> {
        self.guarded(Op::Replay, || -> Outcome<()> {
            if is_recorded(ex)? {
                return Err(Stop::Cause("a replay cannot be watched while a graph is recorded".to_string()));
            }
            self.mark(Op::Replay, ex)
        })
    }
}

/// The input of a collective that has one.
fn needed(input: Option<View<'_>>) -> Result<View<'_>> {
    match input {
        Some(input) => Ok(input),
        None => bail!("a collective without input"),
    }
}
