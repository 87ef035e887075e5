//! Each collective, on the stream of its context.

use std::sync::Arc;

use candle_core::Result;
use moe_kernels::{Exec, PreNorm, View, ViewMut, add_rms_norm_into};

use super::comm::{NcclComm, is_recorded};
use crate::call::Op;
use crate::communicator::{Collective, Communicator, ReduceOp};
use crate::parts::{Verb, exchange_parts, gather_parts, one, scatter_parts};
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
            Ok(_) => "peer memory for small arrays, NCCL for others".to_string(),
            Err(why) => format!("NCCL alone: the ranks cannot share memory: {why}"),
        }
    }

    fn run(&self, collective: Collective<'_>, ex: &mut Exec) -> Result<()> {
        let (place, name, call) = (self.place(), collective.op(), self.place().check(&collective));
        match collective {
            Collective::AllReduce { data, op } => {
                self.collective(name, call, None, data, ex, |_, data| one(Verb::AllReduce(op), None, data))
            }
            Collective::AllGather { input, counts, out } => {
                self.collective(name, call, Some(input), out, ex, |input, out| {
                    gather_parts(place, input, out, counts)
                })
            }
            Collective::ReduceScatter { input, counts, out, op } => {
                self.collective(name, call, Some(input), out, ex, |input, out| {
                    scatter_parts(place, input, out, counts, op)
                })
            }
            Collective::AllToAll { input, send, out, recv } => {
                self.collective(name, call, Some(input), out, ex, |input, out| {
                    exchange_parts(input, send, out, recv)
                })
            }
            Collective::Broadcast { data, root } => self
                .collective(name, call, None, data, ex, |_, data| one(Verb::Broadcast { root }, None, data)),
            Collective::Barrier => {
                // A view of host memory is waited for, and one element of it comes from every rank.
                let mut met = [0u8];
                let data = ViewMut::new(&mut met, &[1])?;
                self.collective(name, call, None, data, ex, |_, data| {
                    one(Verb::AllReduce(ReduceOp::Max), None, data)
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
            let mut parts = Vec::new();
            for (input, out) in arrays {
                let gather = Collective::AllGather { input, counts, out };
                self.place().check(&gather)?;
                if let Collective::AllGather { input, out, .. } = gather {
                    parts.extend(gather_parts(self.place(), Some(input), out, counts)?);
                }
            }
            self.launch(Op::AllGather, &mut parts, ex)
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
