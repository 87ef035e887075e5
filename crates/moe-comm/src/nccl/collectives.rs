//! Runs each collective on the stream of its context.

use std::sync::Arc;

use candle_core::{Result, bail};
use moe_kernels::{Exec, View, ViewMut};

use super::comm::{NcclComm, is_recorded};
use crate::call::Op;
use crate::collective::{Collective, ReduceOp};
use crate::communicator::{Communicator, FusedCollectives};
use crate::parts::{Request, Verb, exchange_parts, one};
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
        let name = collective.op();
        let call = self.place().check(&collective);
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
                // A reduction over host memory ends only when every rank has sent its element and this rank has waited
                // for the device. That makes a barrier.
                let mut met = [0u8];
                let data = ViewMut::new(&mut met, &[1])?;
                self.collective(name, call, None, data, ex, |_, data| {
                    Ok(Request::Reduce { data, op: ReduceOp::Max })
                })
            }
        }
    }

    fn fused(&self) -> Option<&dyn FusedCollectives> {
        Some(self)
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
