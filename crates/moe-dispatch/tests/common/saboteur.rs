//! A communicator that misbehaves in one of its collectives.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use moe_comm::Collective;
use moe_dispatch::candle::{Result, bail};
use moe_dispatch::{Collectives, Communicator, Exec, ViewMut};

/// The kind of fault.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fault {
    Panic,
    Error,
    /// It calls another collective than the other ranks.
    Other,
    /// It calls the collective only after the others have given up.
    Stall,
}

/// Fails in its collective number `at`; all groups that are split from it count together.
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

    fn run(&self, collective: Collective<'_>, ex: &mut Exec) -> Result<()> {
        self.enter(ex)?;
        self.inner.run(collective, ex)
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
