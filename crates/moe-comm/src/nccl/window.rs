//! A window that is filled by collectives of its group, for GPUs on several hosts or without access to each other's
//! memory.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::CudaEvent;
use candle_core::{DType, Result, bail};
use moe_kernels::cuda::{mapped_bytes, mapped_bytes_mut};
use moe_kernels::{Buffer, Exec, View, ViewMut};

use crate::collective::ReduceOp;
use crate::collectives::Collectives;
use crate::communicator::Communicator;
use crate::lock::lock;
use crate::window::{Transfer, TransferSource, Window, batches};

/// Size of each of the two staging buffers (bytes to send, bytes received), and so of one batch.
const STAGE: usize = 32 << 20;

/// The [`Window`] of one rank whose group exchanges bytes through its communicator.
///
/// Exchanges run on the stream of the steps, in order with the collectives of the layers, so that two collectives never
/// wait for each other on different GPUs. A later step waits for them. Only the ops that read the received bytes run in
/// parallel with the steps.
pub struct NcclWindow {
    comm: Arc<dyn Communicator>,
    bytes: usize,
    /// The stream of the steps.
    main: Exec,
    side: Exec,
    ordinal: usize,
    /// This rank's memory, and its address.
    _own: Buffer,
    address: u64,
    /// The staging buffers: bytes to send, and bytes received.
    staging: Mutex<[Buffer; 2]>,
    /// An event at the end of the last work that used the window.
    used: Mutex<CudaEvent>,
}

impl NcclWindow {
    /// Makes a window for the ranks of `comm`, which exchanges device memory, on the device of `ex`. Each rank gets the
    /// largest `bytes` that any rank asks for. All ranks of `comm` must call it.
    ///
    /// # Errors
    /// A context on the CPU; no memory left; any error of a collective of `comm`.
    pub fn new(comm: Arc<dyn Communicator>, bytes: usize, ex: &Exec) -> Result<Self> {
        let ordinal = ex.stream()?.context().ordinal();
        let mut most = [i64::try_from(bytes).map_err(candle_core::Error::wrap)?];
        comm.all_reduce(ViewMut::new(&mut most, &[1])?, ReduceOp::Max, &mut ex.clone())?;
        let bytes = most[0].max(1) as usize;
        let side = Exec::on(&moe_kernels::cuda::device(ordinal)?)?;
        let used = Mutex::new(side.stream()?.record_event(None).w()?);
        let stage =
            || Buffer::unspecified_on(ex.device(), DType::U8, &[STAGE.min(bytes * comm.world_size())]);
        let staging = Mutex::new([stage()?, stage()?]);
        let own = Buffer::unspecified_on(ex.device(), DType::U8, &[bytes])?;
        let address = ex.address("NCCL window", "memory", own.view())?;
        let window = Self { comm, bytes, main: ex.clone(), side, ordinal, _own: own, address, staging, used };
        window.connect()?;
        Ok(window)
    }

    /// Exchanges one byte with every rank. NCCL connects ranks in their first exchange, and otherwise a step would wait
    /// tens of milliseconds for that.
    fn connect(&self) -> Result<()> {
        let mut staging = lock(&self.staging);
        let [leaves, comes] = &mut *staging;
        let each = vec![1; self.comm.world_size()];
        let input = leaves.view().narrow(0, each.len())?;
        let out = comes.view_mut().narrow(0, each.len())?;
        self.comm.all_to_all_v(input, &each, out, &each, &mut self.main.clone())?;
        self.main.synchronize()
    }

    /// The address of a range of bytes in this rank's window.
    fn address(&self, at: usize, len: usize) -> Result<u64> {
        match at.checked_add(len) {
            Some(end) if end <= self.bytes => Ok(self.address + at as u64),
            _ => bail!(
                "{self:?}: expected {} bytes of a rank, got {at}..{at} + {len} of rank {}",
                self.bytes,
                self.rank()
            ),
        }
    }

    fn own_mut(&self, at: usize, len: usize) -> Result<ViewMut<'_>> {
        let address = self.address(at, len)?;
        // SAFETY: the memory lives as long as `own`. By the contract of `Window`, readers wait for this rank's streams.
        unsafe { mapped_bytes_mut(address, len, self.ordinal) }
    }

    /// Exchanges ranges of some transfers, which together fit the staging memory.
    fn exchange(
        &self,
        transfers: &[Transfer],
        batch: &[(usize, Range<usize>)],
        source: &TransferSource<'_>,
    ) -> Result<()> {
        let rank = self.rank();
        let ranks = self.comm.world_size();
        let between = |from, to| {
            batch.iter().filter(move |(i, _)| (transfers[*i].from, transfers[*i].to) == (from, to))
        };
        let bytes = |from, to| between(from, to).map(|(_, range)| range.len()).sum::<usize>();
        let send: Vec<usize> = (0..ranks).map(|to| bytes(rank, to)).collect();
        let receive: Vec<usize> = (0..ranks).map(|from| bytes(from, rank)).collect();
        let mut staging = lock(&self.staging);
        let [leaves, comes] = &mut *staging;
        // The bytes to one rank are contiguous, in the order of the transfers; so are the bytes from one rank.
        let mut first = 0;
        for (number, range) in (0..ranks).flat_map(|to| between(rank, to)) {
            source(*number, range.clone(), &mut |place, bytes| {
                let at = first + place - range.start;
                self.main.copy(bytes, leaves.view_mut().narrow(at, bytes.elem_count())?)
            })?;
            first += range.len();
        }
        let input = leaves.view().narrow(0, first)?;
        let out = comes.view_mut();
        let out = out.narrow(0, receive.iter().sum())?;
        self.comm.all_to_all_v(input, &send, out, &receive, &mut self.main.clone())?;
        let mut first = 0;
        for (number, range) in (0..ranks).flat_map(|from| between(from, rank)) {
            let to = self.own_mut(transfers[*number].at + range.start, range.len())?;
            self.main.copy(comes.view().narrow(first, range.len())?, to)?;
            first += range.len();
        }
        Ok(())
    }
}

impl Window for NcclWindow {
    fn rank(&self) -> usize {
        self.comm.rank()
    }

    fn bytes(&self) -> usize {
        self.bytes
    }

    fn context(&self) -> &Exec {
        &self.side
    }

    fn put(&self, from: View<'_>, rank: usize, at: usize) -> Result<()> {
        if from.dtype() != DType::U8 {
            bail!("{self:?}: expected bytes, got {}", from.dtype().as_str())
        }
        if rank != self.rank() {
            bail!(
                "{self:?}: expected bytes for this rank, got some for rank {rank}, which an exchange alone reaches"
            )
        }
        self.side.copy(from, self.own_mut(at, from.elem_count())?)
    }

    fn carry(&self, transfers: &[Transfer], source: &TransferSource<'_>) -> Result<()> {
        for batch in batches(transfers, STAGE) {
            self.exchange(transfers, &batch, source)?;
        }
        let arrived = self.main.stream()?.record_event(None).w()?;
        self.side.stream()?.wait(&arrived).w()
    }

    fn own(&self, at: usize, len: usize) -> Result<View<'_>> {
        let address = self.address(at, len)?;
        // SAFETY: the memory lives as long as `own`, which the view borrows; who writes it is agreed by the users.
        unsafe { mapped_bytes(address, len, self.ordinal) }
    }

    fn used_by(&self, ex: &Exec) -> Result<()> {
        lock(&self.used).record(ex.stream()?).w()
    }

    fn wait_unused(&self) -> Result<()> {
        lock(&self.used).synchronize().w()?;
        self.side.synchronize()
    }
}

impl fmt::Debug for NcclWindow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NcclWindow(rank {} of {}, {} bytes)", self.rank(), self.comm.world_size(), self.bytes)
    }
}

impl Drop for NcclWindow {
    fn drop(&mut self) {
        // Copies of this rank use its memory. A failure here cannot be reported to anyone.
        let _ = self.wait_unused().and_then(|()| self.main.synchronize());
    }
}
