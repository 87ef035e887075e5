//! The communicator of a world of one rank.

use std::sync::{Arc, OnceLock};

use candle_core::{Result, bail};
use moe_kernels::{Exec, View, ViewMut};

use crate::call::{Call, Op};
use crate::check::Place;
use crate::communicator::{Communicator, ReduceOp};

/// A world of one rank: collectives check their arguments like any other communicator's and
/// copy. Code written for many ranks runs on it unchanged.
///
/// ```
/// use moe_comm::{Communicator, Exec, SelfComm, View, ViewMut};
/// let (comm, mut ex) = (SelfComm::new(), Exec::cpu());
/// let mut out = [0f32; 2];
/// comm.all_gather(View::new(&[1f32, 2.], &[2, 1])?, ViewMut::new(&mut out, &[2, 1])?, &mut ex)?;
/// assert_eq!(out, [1., 2.]);
/// # Ok::<(), moe_comm::candle::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct SelfComm {
    /// Shared with the groups split from this one: they fail together.
    aborted: Arc<OnceLock<String>>,
}

const ALONE: Place = Place { rank: 0, size: 1 };

impl SelfComm {
    /// A world of one rank.
    pub fn new() -> Self {
        Self::default()
    }

    /// A rank of one fails alone: nobody waits for it, so a wrong argument leaves it usable.
    fn enter(&self, op: Op, call: Result<Call>) -> Result<()> {
        match self.aborted.get() {
            Some(reason) => bail!("{op} on rank 0 of 1: rank 0 aborted: {reason}"),
            None => call.map(|_| ()),
        }
    }
}

impl Communicator for SelfComm {
    fn rank(&self) -> usize {
        0
    }

    fn world_size(&self) -> usize {
        1
    }

    fn all_reduce(&self, data: ViewMut<'_>, op: ReduceOp, _: &mut Exec) -> Result<()> {
        self.enter(Op::AllReduce, ALONE.all_reduce(&data, op))
    }

    fn all_gather(&self, input: View<'_>, out: ViewMut<'_>, ex: &mut Exec) -> Result<()> {
        self.enter(Op::AllGather, ALONE.all_gather(&input, &out))?;
        ex.copy(input, out)
    }

    fn all_gather_v(&self, input: View<'_>, counts: &[usize], out: ViewMut<'_>, ex: &mut Exec) -> Result<()> {
        self.enter(Op::AllGatherV, ALONE.all_gather_v(&input, counts, &out))?;
        ex.copy(input, out)
    }

    fn reduce_scatter(&self, input: View<'_>, out: ViewMut<'_>, op: ReduceOp, ex: &mut Exec) -> Result<()> {
        self.enter(Op::ReduceScatter, ALONE.reduce_scatter(&input, &out, op))?;
        ex.copy(input, out)
    }

    fn reduce_scatter_v(
        &self,
        input: View<'_>,
        counts: &[usize],
        out: ViewMut<'_>,
        op: ReduceOp,
        ex: &mut Exec,
    ) -> Result<()> {
        self.enter(Op::ReduceScatterV, ALONE.reduce_scatter_v(&input, counts, &out, op))?;
        ex.copy(input, out)
    }

    fn all_to_all(&self, input: View<'_>, out: ViewMut<'_>, ex: &mut Exec) -> Result<()> {
        self.enter(Op::AllToAll, ALONE.all_to_all(&input, &out))?;
        ex.copy(input, out)
    }

    fn all_to_all_v(
        &self,
        input: View<'_>,
        send_counts: &[usize],
        out: ViewMut<'_>,
        recv_counts: &[usize],
        ex: &mut Exec,
    ) -> Result<()> {
        self.enter(Op::AllToAllV, ALONE.all_to_all_v(&input, send_counts, &out, recv_counts))?;
        ex.copy(input, out)
    }

    fn broadcast(&self, data: ViewMut<'_>, root: usize, _: &mut Exec) -> Result<()> {
        self.enter(Op::Broadcast, ALONE.broadcast(&data, root))
    }

    fn barrier(&self, _: &mut Exec) -> Result<()> {
        self.enter(Op::Barrier, Ok(Call::bare(Op::Barrier)))
    }

    fn split(&self, _color: usize, _key: usize, _: &mut Exec) -> Result<Arc<dyn Communicator>> {
        self.enter(Op::Split, Ok(Call::bare(Op::Split)))?;
        Ok(Arc::new(self.clone()))
    }

    fn abort(&self, reason: &str) {
        let _ = self.aborted.set(reason.to_string());
    }

    fn check(&self) -> Result<()> {
        match self.aborted.get() {
            Some(reason) => bail!("rank 0 of 1: rank 0 aborted: {reason}"),
            None => Ok(()),
        }
    }
}
