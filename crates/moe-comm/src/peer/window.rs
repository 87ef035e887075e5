//! A window over peer memory: the copy engines of GPUs of one host copy the bytes that ranks put into each other's
//! memory.

use std::fmt;
use std::sync::Mutex;

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::CudaEvent;
use candle_core::{DType, Result, bail};
use moe_kernels::cuda::{mapped_bytes, mapped_bytes_mut};
use moe_kernels::{Exec, View};

use super::join::{Shared, exchange, share};
use super::memory::Owned;
use crate::communicator::Communicator;
use crate::window::Window;

/// The smallest unit that the driver maps. Other processes see whole units, so a unit must contain nothing else.
const PAGE: usize = 2 << 20;

/// The [`Window`] of one rank whose GPUs are on one host and may access each other's memory.
///
/// Copies have their own stream, so that they run in parallel with steps. If ranks of other processes have mapped the
/// memory, it stays allocated until the process ends.
pub struct PeerWindow {
    rank: usize,
    bytes: usize,
    /// The second stream of the rank's device.
    side: Exec,
    ordinal: usize,
    /// An event at the end of the last work that used the window.
    used: Mutex<CudaEvent>,
    shared: Shared,
}

impl PeerWindow {
    /// Makes a window for the ranks of `comm` on the device of `ex`. The inner error says why these ranks cannot share
    /// memory; it is the same on all of them. Each rank gets the largest `bytes` that any rank asks for, rounded up.
    /// All ranks of `comm` must call it; `comm` exchanges host memory in the context `wire`.
    ///
    /// # Errors
    /// A context on the CPU; any error of a collective of `comm`.
    pub fn new(
        comm: &dyn Communicator,
        wire: &mut Exec,
        bytes: usize,
        ex: &Exec,
    ) -> Result<std::result::Result<Self, String>> {
        let context = ex.stream()?.context().clone();
        let most = exchange(comm, &(bytes as u64), wire)?.into_iter().max().unwrap_or(0) as usize;
        let bytes = most.max(1).next_multiple_of(PAGE);
        let ordinal = context.ordinal();
        let make = || {
            let side = Exec::on(&moe_kernels::cuda::device(ordinal)?)?;
            let used = side.stream()?.record_event(None).w()?;
            Ok((Owned::unspecified(bytes, ex)?, (side, used)))
        };
        let made = share(comm, wire, ex, make)?;
        let rank = comm.rank();
        Ok(made.map(|(shared, (side, used))| Self {
            rank,
            bytes,
            side,
            ordinal,
            used: Mutex::new(used),
            shared,
        }))
    }

    /// The address of a range of bytes in a rank's window.
    fn address(&self, rank: usize, at: usize, len: usize) -> Result<u64> {
        let end = at.checked_add(len).filter(|&end| end <= self.bytes);
        match (self.shared.addresses.get(rank), end) {
            (Some(address), Some(_)) => Ok(address + at as u64),
            _ => bail!(
                "{self:?}: expected {} bytes of a rank, got {at}..{at} + {len} of rank {rank}",
                self.bytes
            ),
        }
    }
}

impl Window for PeerWindow {
    fn rank(&self) -> usize {
        self.rank
    }

    fn bytes(&self) -> usize {
        self.bytes
    }

    fn context(&self) -> &Exec {
        &self.side
    }

    fn put(&self, from: View<'_>, rank: usize, at: usize) -> Result<()> {
        let len = from.elem_count() * from.dtype().size_in_bytes();
        if from.dtype() != DType::U8 {
            bail!("{self:?}: expected bytes, got {}", from.dtype().as_str())
        }
        let address = self.address(rank, at, len)?;
        // SAFETY: the memory lives as long as `shared`, and the driver has mapped it for this device. By the contract
        // of `Window`, readers wait for this stream.
        let to = unsafe { mapped_bytes_mut(address, len, self.ordinal) }?;
        self.side.copy(from, to)
    }

    fn own(&self, at: usize, len: usize) -> Result<View<'_>> {
        let address = self.address(self.rank, at, len)?;
        // SAFETY: the memory lives as long as `shared`, which the view borrows; who writes it is agreed by the users.
        unsafe { mapped_bytes(address, len, self.ordinal) }
    }

    fn used_by(&self, ex: &Exec) -> Result<()> {
        let used = self.used.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        used.record(ex.stream()?).w()
    }

    fn wait_unused(&self) -> Result<()> {
        let used = self.used.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        used.synchronize().w()?;
        self.side.synchronize()
    }
}

impl fmt::Debug for PeerWindow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PeerWindow(rank {} of {}, {} bytes)", self.rank, self.shared.addresses.len(), self.bytes)
    }
}

impl Drop for PeerWindow {
    fn drop(&mut self) {
        // Copies of this rank use every rank's memory. A failure here cannot be reported to anyone.
        let _ = self.wait_unused();
    }
}
