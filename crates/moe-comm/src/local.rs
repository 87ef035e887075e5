//! The communicator of a world of one rank.

use std::sync::{Arc, OnceLock};

use candle_core::{Result, bail};
use moe_kernels::Exec;

use crate::call::{Call, Op};
use crate::check::Place;
use crate::collective::Collective;
use crate::communicator::Communicator;

/// A world of one rank. Collectives check their arguments as every communicator does, then copy. Code written for many
/// ranks runs on it unchanged.
///
/// ```
/// use moe_comm::{Collectives, Exec, SelfComm, View, ViewMut};
/// let (comm, mut ex) = (SelfComm::new(), Exec::cpu());
/// let mut out = [0f32; 2];
/// comm.all_gather(View::new(&[1f32, 2.], &[2, 1])?, ViewMut::new(&mut out, &[2, 1])?, &mut ex)?;
/// assert_eq!(out, [1., 2.]);
/// # Ok::<(), moe_comm::candle::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct SelfComm {
    /// Shared with the groups split from this one, which fail together with it.
    aborted: Arc<OnceLock<String>>,
}

const ALONE: Place = Place { rank: 0, size: 1 };

impl SelfComm {
    /// A world of one rank.
    pub fn new() -> Self {
        Self::default()
    }

    /// A single rank fails alone: no other rank waits for it, so it stays usable after a wrong argument.
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

    fn run(&self, collective: Collective<'_>, ex: &mut Exec) -> Result<()> {
        self.enter(collective.op(), ALONE.check(&collective))?;
        match collective {
            Collective::AllGather { input, out, .. }
            | Collective::ReduceScatter { input, out, .. }
            | Collective::AllToAll { input, out, .. } => ex.copy(input, out),
            Collective::AllReduce { .. } | Collective::Broadcast { .. } | Collective::Barrier => Ok(()),
        }
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
