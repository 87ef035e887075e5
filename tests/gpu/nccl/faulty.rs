//! Windows with faults: bytes for a rank are corrupted, or the rank's process ends in a phase of a move.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{DType, Result};
use moe_comm::{Transfer, TransferSource, Window};
use moe_kernels::{Buffer, Exec, View};

/// The kind of fault of a window.
#[derive(Clone, Debug, PartialEq)]
pub enum Fault {
    /// A bit in the first bytes of every move to this rank is flipped.
    Corrupt(usize),
    /// The process ends at once in this phase: when the move begins, carries bytes, checks the received bytes, or
    /// installs them.
    End(&'static str),
}

/// A window with a fault.
#[derive(Debug)]
pub struct Faulty {
    inner: Box<dyn Window>,
    fault: Fault,
    /// Whether the next bytes for the victim are the first bytes of a move.
    first: AtomicBool,
    /// A stream of the window reads these buffers, so they stay allocated.
    flipped: Mutex<Vec<Buffer>>,
}

impl Faulty {
    pub fn new(inner: Box<dyn Window>, fault: Fault) -> Self {
        Self { inner, fault, first: AtomicBool::new(false), flipped: Mutex::default() }
    }

    fn reaches(&self, phase: &str) {
        if matches!(self.fault, Fault::End(end) if end == phase) {
            std::process::abort()
        }
    }

    /// Whether the bytes of a transfer must be corrupted now.
    fn corrupts(&self, transfer: &Transfer) -> bool {
        self.fault == Fault::Corrupt(transfer.to) && self.first.swap(false, Ordering::SeqCst)
    }

    fn flip(&self, from: View<'_>) -> Result<Buffer> {
        let ex = self.context();
        let mut bytes = ex.to_host(from)?.view().cpu::<u8>()?.to_vec();
        bytes[0] ^= 0x10;
        let mut copy = ex.zeros(DType::U8, &[bytes.len()])?;
        ex.copy_from_host(View::new(&bytes, &[bytes.len()])?, copy.view_mut())?;
        ex.synchronize()?;
        Ok(copy)
    }
}

impl Window for Faulty {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn bytes(&self) -> usize {
        self.inner.bytes()
    }

    fn context(&self) -> &Exec {
        self.inner.context()
    }

    fn put(&self, from: View<'_>, rank: usize, at: usize) -> Result<()> {
        self.inner.put(from, rank, at)
    }

    fn carry(&self, transfers: &[Transfer], source: &TransferSource<'_>) -> Result<()> {
        self.reaches("carries");
        self.inner.carry(transfers, &|number, range, show| {
            if !self.corrupts(&transfers[number]) {
                return source(number, range, show);
            }
            source(number, range, &mut |at, from| {
                let copy = self.flip(from)?;
                show(at, copy.view())?;
                self.flipped.lock().unwrap().push(copy);
                Ok(())
            })
        })
    }

    fn own(&self, at: usize, len: usize) -> Result<View<'_>> {
        // This is called for the first time when checksums are computed.
        self.reaches("checks");
        self.inner.own(at, len)
    }

    fn used_by(&self, ex: &Exec) -> Result<()> {
        self.reaches("installs");
        self.inner.used_by(ex)
    }

    fn wait_unused(&self) -> Result<()> {
        self.reaches("begins");
        self.first.store(true, Ordering::SeqCst);
        self.inner.wait_unused()
    }
}
