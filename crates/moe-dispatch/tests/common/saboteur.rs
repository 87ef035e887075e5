//! A communicator that does something wrong in one of its collectives.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use moe_comm::ReduceOp;
use moe_dispatch::candle::{Result, bail};
use moe_dispatch::{Communicator, Exec, View, ViewMut};

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fault {
    Panic,
    Error,
    /// Another collective than the others'.
    Other,
    /// It comes when the others have given up.
    Stall,
}

/// Fails in its collective number `at`, counted over all groups split from it.
#[derive(Clone, Debug)]
pub struct Saboteur {
    inner: Arc<dyn Communicator>,
    fault: Fault,
    at: usize,
    calls: Arc<AtomicUsize>,
}

impl Saboteur {
    pub fn new(inner: Arc<dyn Communicator>, fault: Fault, at: usize) -> Self {
        Self { inner, fault, at, calls: Arc::default() }
    }

    fn enter(&self, ex: &mut Exec) -> Result<()> {
        if self.calls.fetch_add(1, Ordering::SeqCst) != self.at {
            return Ok(());
        }
        match self.fault {
            Fault::Panic => panic!("sabotaged"),
            Fault::Error => bail!("sabotaged"),
            // No backend calls a broadcast.
            Fault::Other => self.inner.broadcast(ViewMut::new(&mut [0f32], &[1])?, 0, ex),
            Fault::Stall => {
                while self.inner.check().is_ok() {
                    std::thread::sleep(Duration::from_millis(5));
                }
                Ok(())
            }
        }
    }
}

impl Communicator for Saboteur {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world_size(&self) -> usize {
        self.inner.world_size()
    }

    fn all_reduce(&self, data: ViewMut<'_>, op: ReduceOp, ex: &mut Exec) -> Result<()> {
        self.enter(ex)?;
        self.inner.all_reduce(data, op, ex)
    }

    fn all_gather(&self, input: View<'_>, out: ViewMut<'_>, ex: &mut Exec) -> Result<()> {
        self.enter(ex)?;
        self.inner.all_gather(input, out, ex)
    }

    fn all_gather_v(&self, input: View<'_>, counts: &[usize], out: ViewMut<'_>, ex: &mut Exec) -> Result<()> {
        self.enter(ex)?;
        self.inner.all_gather_v(input, counts, out, ex)
    }

    fn reduce_scatter(&self, input: View<'_>, out: ViewMut<'_>, op: ReduceOp, ex: &mut Exec) -> Result<()> {
        self.enter(ex)?;
        self.inner.reduce_scatter(input, out, op, ex)
    }

    fn reduce_scatter_v(
        &self,
        input: View<'_>,
        counts: &[usize],
        out: ViewMut<'_>,
        op: ReduceOp,
        ex: &mut Exec,
    ) -> Result<()> {
        self.enter(ex)?;
        self.inner.reduce_scatter_v(input, counts, out, op, ex)
    }

    fn all_to_all(&self, input: View<'_>, out: ViewMut<'_>, ex: &mut Exec) -> Result<()> {
        self.enter(ex)?;
        self.inner.all_to_all(input, out, ex)
    }

    fn all_to_all_v(
        &self,
        input: View<'_>,
        send_counts: &[usize],
        out: ViewMut<'_>,
        recv_counts: &[usize],
        ex: &mut Exec,
    ) -> Result<()> {
        self.enter(ex)?;
        self.inner.all_to_all_v(input, send_counts, out, recv_counts, ex)
    }

    fn broadcast(&self, data: ViewMut<'_>, root: usize, ex: &mut Exec) -> Result<()> {
        self.enter(ex)?;
        self.inner.broadcast(data, root, ex)
    }

    fn barrier(&self, ex: &mut Exec) -> Result<()> {
        self.enter(ex)?;
        self.inner.barrier(ex)
    }

    fn split(&self, color: usize, key: usize, ex: &mut Exec) -> Result<Arc<dyn Communicator>> {
        self.enter(ex)?;
        let inner = self.inner.split(color, key, ex)?;
        Ok(Arc::new(Self { inner, ..self.clone() }))
    }

    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }

    fn check(&self) -> Result<()> {
        self.inner.check()
    }
}
