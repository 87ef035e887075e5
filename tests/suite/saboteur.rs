//! A communicator that breaks the moves of experts on its rank. Only moves send bytes by an all-to-all, and votes as
//! bytes by a gather.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use candle_core::{DType, Result};
use model_runtime::Exec;
use moe_comm::{Collective, Communicator};

/// What the rank does in moves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fault {
    /// It flips a bit of the bytes that it receives.
    Corrupt,
    /// It panics before it sends.
    DieSending,
    /// It panics before it votes whether everything has arrived.
    DieVoting,
    /// It panics before it writes the experts on which all ranks have agreed.
    DieWriting,
    /// It is late by this time, once.
    Late(Duration),
    /// It calls only after the others have given up.
    Hang,
}

#[derive(Clone, Debug)]
pub struct Saboteur {
    inner: Arc<dyn Communicator>,
    fault: Fault,
    /// Whether experts have moved: earlier votes belong to loading.
    moving: Arc<AtomicBool>,
}

impl Saboteur {
    pub fn new(inner: Arc<dyn Communicator>, fault: Fault) -> Self {
        Self { inner, fault, moving: Arc::default() }
    }

    fn die_of(&self, fault: Fault) {
        assert!(self.fault != fault, "rank {} dies: {fault:?}", self.rank());
    }

    fn sends(&self, mut collective: Collective<'_>, ex: &mut Exec) -> Result<()> {
        let first = !self.moving.swap(true, Ordering::SeqCst);
        self.die_of(Fault::DieSending);
        match self.fault {
            Fault::Late(time) if first => std::thread::sleep(time),
            Fault::Hang => {
                while self.inner.check().is_ok() {
                    std::thread::sleep(Duration::from_millis(5));
                }
            }
            _ => {}
        }
        let Collective::AllToAll { input, send, out, recv } = &mut collective else { return Ok(()) };
        let again = Collective::AllToAll { input: *input, send, out: out.reborrow(), recv };
        self.inner.run(again, ex)?;
        if let (Fault::Corrupt, Some(byte)) = (self.fault, out.cpu_mut::<u8>()?.first_mut()) {
            *byte ^= 0x10;
        }
        Ok(())
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
        match &collective {
            Collective::AllToAll { input, .. } if input.dtype() == DType::U8 => self.sends(collective, ex),
            Collective::AllGather { input, .. }
                if input.dtype() == DType::U8 && self.moving.load(Ordering::SeqCst) =>
            {
                self.die_of(Fault::DieVoting);
                self.inner.run(collective, ex)?;
                self.die_of(Fault::DieWriting);
                Ok(())
            }
            _ => self.inner.run(collective, ex),
        }
    }

    fn split(&self, color: usize, key: usize, ex: &mut Exec) -> Result<Arc<dyn Communicator>> {
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
