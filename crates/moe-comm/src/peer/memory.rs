//! Device memory that other ranks map, and the host word that ends their kernels' waiting.
//!
//! Within a process a buffer is shared by its address, once the device of the other rank may access it; other
//! processes open it by a handle of the driver.
//!
//! A buffer must not be freed while another rank has it mapped. In one process it is freed with the last rank
//! that holds it. What other processes have open is left to the end of this one, since nobody can know when
//! they have closed it: what was allocated once for a group.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{CudaContext, DriverError, result, sys};
use candle_core::{Result, bail};
use moe_kernels::Exec;
use moe_kernels::cuda::PeerBuffers;

use super::offer::Offer;

/// Buffers of this process.
static LENT: Mutex<Vec<Weak<Owned>>> = Mutex::new(Vec::new());

/// A rank's own buffer.
pub(super) struct Owned {
    context: Arc<CudaContext>,
    address: u64,
    /// Whether another process has been told the handle.
    exported: AtomicBool,
}

impl Owned {
    /// A buffer on the context's device, ready for a group of `ranks`.
    pub(super) fn new(ranks: usize, capacity: usize, ex: &Exec) -> Result<Arc<Self>> {
        let bytes = PeerBuffers::bytes(ranks, capacity)?;
        let owned = Self::unspecified(bytes, ex)?;
        // SAFETY: the allocation at the address has `bytes` bytes.
        unsafe { PeerBuffers::init(owned.address, bytes, ex) }?;
        ex.synchronize()?;
        Ok(owned)
    }

    /// Bytes on the context's device that hold anything.
    pub(super) fn unspecified(bytes: usize, ex: &Exec) -> Result<Arc<Self>> {
        let context = ex.stream()?.context().clone();
        context.bind_to_thread().w()?;
        // SAFETY: any bits are bytes; who gives them a meaning writes them first.
        let address = unsafe { result::malloc_sync(bytes) }.w()?;
        let owned = Arc::new(Self { context, address, exported: AtomicBool::new(false) });
        let mut lent = LENT.lock().unwrap_or_else(PoisonError::into_inner);
        lent.retain(|other| other.strong_count() > 0);
        lent.push(Arc::downgrade(&owned));
        Ok(owned)
    }

    pub(super) fn address(&self) -> u64 {
        self.address
    }

    /// The handle by which other processes open the buffer.
    pub(super) fn handle(&self) -> Result<Vec<u8>> {
        self.context.bind_to_thread().w()?;
        let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: the address is an allocation of this process; the call writes the handle.
        unsafe { sys::cuIpcGetMemHandle(&mut handle, self.address) }.result().w()?;
        Ok(handle.reserved.map(|byte| byte as u8).to_vec())
    }

    /// Leaves the buffer to the end of the process.
    pub(super) fn keep(&self) {
        self.exported.store(true, Ordering::Relaxed);
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        if !self.exported.load(Ordering::Relaxed) && self.context.bind_to_thread().is_ok() {
            // SAFETY: allocated by `new`; ranks that have mapped it hold it and wait for their kernels before they let go.
            // There is nobody to tell about a failure.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}

/// Another rank's buffer, mapped for this rank's device.
pub(super) enum Mapping {
    /// Of this process.
    Shared(Arc<Owned>),
    /// Of another process.
    Opened(Opened),
}

/// A buffer of another process.
pub(super) struct Opened {
    context: Arc<CudaContext>,
    address: u64,
}

impl Mapping {
    /// Maps the buffer of an offer. `process` is the identity of this one.
    pub(super) fn of(offer: &Offer, process: u64, context: &Arc<CudaContext>) -> Result<Self> {
        context.bind_to_thread().w()?;
        if offer.process == process {
            return share(offer.address, context).map(Self::Shared);
        }
        let handle = match &offer.handle {
            Ok(handle) => handle,
            Err(reason) => bail!("the buffer has no handle for other processes: {reason}"),
        };
        let Ok(bytes) = <[u8; 64]>::try_from(&handle[..]) else {
            bail!("expected a handle of 64 bytes, got {}", handle.len())
        };
        let handle = sys::CUipcMemHandle { reserved: bytes.map(|byte| byte as _) };
        let mut address = 0;
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        // SAFETY: the call writes an address; the driver checks the handle.
        unsafe { sys::cuIpcOpenMemHandle_v2(&mut address, handle, flags) }.result().w()?;
        Ok(Self::Opened(Opened { context: context.clone(), address }))
    }

    pub(super) fn address(&self) -> u64 {
        match self {
            Self::Shared(owned) => owned.address,
            Self::Opened(opened) => opened.address,
        }
    }
}

/// The buffer of another rank of this process, which the device of `context` may access from now on.
fn share(address: u64, context: &Arc<CudaContext>) -> Result<Arc<Owned>> {
    let lent = LENT.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(owned) = lent.iter().filter_map(Weak::upgrade).find(|owned| owned.address == address) else {
        bail!("this process has no buffer at {address:#x}")
    };
    let here = context.ordinal();
    let there = owned.context.ordinal();
    let mut can = 0;
    // SAFETY: both devices exist; the call writes a number.
    unsafe { sys::cuDeviceCanAccessPeer(&mut can, context.cu_device(), owned.context.cu_device()) }
        .result()
        .w()?;
    if can == 0 {
        bail!("CUDA device {here} cannot access the memory of device {there}")
    }
    // SAFETY: the context lives as long as the buffer, which the mapping holds; this one is current.
    match unsafe { sys::cuCtxEnablePeerAccess(owned.context.cu_ctx(), 0) }.result() {
        Ok(()) | Err(DriverError(sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED)) => Ok(owned),
        Err(e) => bail!("CUDA device {here} cannot access the memory of device {there}: {e}"),
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: opened once; the rank waits for its kernels before it lets go. There is nobody to tell about a failure.
            let _ = unsafe { sys::cuIpcCloseMemHandle(self.address) };
        }
    }
}

/// The group as kernels take it; `buffers` are the addresses of all ranks' for this rank's device. Its owner holds what
/// they name and waits for its kernels before it lets go, and launches them on one stream.
pub(super) fn group(
    rank: usize,
    buffers: &[u64],
    capacity: usize,
    status: &Status,
    limit: Duration,
) -> Result<PeerBuffers> {
    // SAFETY: the buffers are of this capacity, mapped and ready on all ranks; the owner's part is stated above.
    unsafe { PeerBuffers::new(rank, buffers, capacity, status.address, limit) }
}

/// What the host writes to end the waiting; kernels write 1 + the missing rank.
const STOP: u32 = u32::MAX;

/// A word in host memory that a rank's kernels and the host write: why waiting has ended.
pub(crate) struct Status {
    context: Arc<CudaContext>,
    word: NonNull<AtomicU32>,
    /// Address on the device.
    address: u64,
}

// SAFETY: the word is only accessed atomically, and lives as long as this.
unsafe impl Send for Status {}
// SAFETY: as above.
unsafe impl Sync for Status {}

impl Status {
    pub(super) fn new(context: &Arc<CudaContext>) -> Result<Self> {
        context.bind_to_thread().w()?;
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the word is set below, before anybody reads it.
        let word: *mut AtomicU32 = unsafe { result::malloc_host(size_of::<AtomicU32>(), flags) }.w()?.cast();
        let Some(word) = NonNull::new(word) else { bail!("the driver returned no host memory") };
        let mut status = Self { context: context.clone(), word, address: 0 };
        status.get().store(0, Ordering::Relaxed);
        // SAFETY: the word was allocated with a mapping on devices; the call writes its address there.
        unsafe { sys::cuMemHostGetDevicePointer_v2(&mut status.address, word.as_ptr().cast(), 0) }
            .result()
            .w()?;
        Ok(status)
    }

    fn get(&self) -> &AtomicU32 {
        // SAFETY: allocated by `new`, aligned to a page, and freed by `drop`.
        unsafe { self.word.as_ref() }
    }

    /// Ends the waiting of this rank's kernels, now and from now on.
    pub(crate) fn stop(&self) {
        // A rank that is missing is the better reason.
        let _ = self.get().compare_exchange(0, STOP, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Why waiting has ended, if it has.
    pub(crate) fn failure(&self) -> Option<String> {
        match self.get().load(Ordering::Relaxed) {
            0 => None,
            STOP => Some("the all-reduces over peer memory were stopped".to_string()),
            rank => Some(format!("rank {} did not come to a collective over peer memory in time", rank - 1)),
        }
    }
}

impl Drop for Status {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: allocated by `new`; the rank waits for its kernels before it lets go. There is nobody to tell about a
            // failure.
            let _ = unsafe { result::free_host(self.word.as_ptr().cast()) };
        }
    }
}
