//! Each collective, on the stream of its context.

use std::sync::Arc;

use candle_core::Result;
use moe_kernels::cuda::PreNorm;
use moe_kernels::{Exec, View, ViewMut};

use super::comm::{NcclComm, Outcome, Stop, is_recorded};
use crate::call::{Call, Op};
use crate::communicator::{Communicator, ReduceOp, one_by_one};
use crate::parts::{Verb, exchange_parts, gather_parts, one, scatter_parts};

impl Communicator for NcclComm {
    fn rank(&self) -> usize {
        self.place().rank
    }

    fn world_size(&self) -> usize {
        self.place().size
    }

    fn all_reduce(&self, data: ViewMut<'_>, op: ReduceOp, ex: &mut Exec) -> Result<()> {
        let call = self.place().all_reduce(&data, op);
        self.collective(Op::AllReduce, call, None, data, ex, |_, data| one(Verb::AllReduce(op), None, data))
    }

    fn all_reduce_add_rms_norm(
        &self,
        partial: ViewMut<'_>,
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
            None => one_by_one(self, partial, weight, eps, residual, out, ex),
        }
    }

    fn all_gather(&self, input: View<'_>, out: ViewMut<'_>, ex: &mut Exec) -> Result<()> {
        let call = self.place().all_gather(&input, &out);
        self.collective(Op::AllGather, call, Some(input), out, ex, |input, out| {
            one(Verb::AllGather, input, out)
        })
    }

    fn all_gather_v(&self, input: View<'_>, counts: &[usize], out: ViewMut<'_>, ex: &mut Exec) -> Result<()> {
        let place = self.place();
        let call = place.all_gather_v(&input, counts, &out);
        self.collective(Op::AllGatherV, call, Some(input), out, ex, |input, out| {
            gather_parts(place, input, out, counts)
        })
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
        self.guarded(Op::AllGatherV, || {
            let mut parts = Vec::new();
            for (input, out) in arrays {
                self.place().all_gather_v(&input, counts, &out)?;
                parts.extend(gather_parts(self.place(), Some(input), out, counts)?);
            }
            self.launch(Op::AllGatherV, &mut parts, ex)
        })
    }

    fn reduce_scatter(&self, input: View<'_>, out: ViewMut<'_>, op: ReduceOp, ex: &mut Exec) -> Result<()> {
        let call = self.place().reduce_scatter(&input, &out, op);
        self.collective(Op::ReduceScatter, call, Some(input), out, ex, |input, out| {
            one(Verb::ReduceScatter(op), input, out)
        })
    }

    fn reduce_scatter_v(
        &self,
        input: View<'_>,
        counts: &[usize],
        out: ViewMut<'_>,
        op: ReduceOp,
        ex: &mut Exec,
    ) -> Result<()> {
        let place = self.place();
        let call = place.reduce_scatter_v(&input, counts, &out, op);
        self.collective(Op::ReduceScatterV, call, Some(input), out, ex, |input, out| {
            scatter_parts(place, input, out, counts, op)
        })
    }

    fn all_to_all(&self, input: View<'_>, out: ViewMut<'_>, ex: &mut Exec) -> Result<()> {
        let place = self.place();
        let call = place.all_to_all(&input, &out);
        let counts = vec![input.rows() / place.size; place.size];
        self.collective(Op::AllToAll, call, Some(input), out, ex, |input, out| {
            exchange_parts(input, &counts, out, &counts)
        })
    }

    fn all_to_all_v(
        &self,
        input: View<'_>,
        send_counts: &[usize],
        out: ViewMut<'_>,
        recv_counts: &[usize],
        ex: &mut Exec,
    ) -> Result<()> {
        let call = self.place().all_to_all_v(&input, send_counts, &out, recv_counts);
        self.collective(Op::AllToAllV, call, Some(input), out, ex, |input, out| {
            exchange_parts(input, send_counts, out, recv_counts)
        })
    }

    fn broadcast(&self, data: ViewMut<'_>, root: usize, ex: &mut Exec) -> Result<()> {
        let call = self.place().broadcast(&data, root);
        self.collective(Op::Broadcast, call, None, data, ex, |_, data| {
            one(Verb::Broadcast { root }, None, data)
        })
    }

    fn barrier(&self, ex: &mut Exec) -> Result<()> {
        // A view of host memory is waited for, and one element of it comes from every rank.
        let mut met = [0u8];
        let data = ViewMut::new(&mut met, &[1])?;
        self.collective(Op::Barrier, Ok(Call::bare(Op::Barrier)), None, data, ex, |_, data| {
            one(Verb::AllReduce(ReduceOp::Max), None, data)
        })
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
