//! Device memory that other ranks map, and a word in host memory that makes kernels stop waiting.
//!
//! Within a process a buffer is shared by its address, once the device of the other rank may access it. Other processes
//! open it by a handle of the driver.
//!
//! A buffer must not be freed while another rank has it mapped. In one process it is freed with the last rank that
//! holds it. A buffer that other processes have opened is kept until the end of this process, because this process
//! cannot know when they have closed it. This is acceptable because a group allocates its buffers only once.

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

/// Buffers of this process that its ranks share.
static LENT: Mutex<Vec<Weak<Owned>>> = Mutex::new(Vec::new());

/// A rank's own buffer.
pub(super) struct Owned {
    context: Arc<CudaContext>,
    address: u64,
    /// Whether the handle was given to another process.
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

    /// Allocates bytes on the context's device; their contents are unspecified.
    pub(super) fn unspecified(bytes: usize, ex: &Exec) -> Result<Arc<Self>> {
        let context = ex.stream()?.context().clone();
        context.bind_to_thread().w()?;
        // SAFETY: any bits are valid bytes, and they are written before they are read as values.
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

    /// Keeps the buffer until the process ends.
    pub(super) fn keep(&self) {
        self.exported.store(true, Ordering::Relaxed);
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        if !self.exported.load(Ordering::Relaxed) && self.context.bind_to_thread().is_ok() {
            // SAFETY: `new` allocated it. Ranks that have mapped it hold it, and wait for their kernels before they
            // release it. A failure here cannot be reported to anyone.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}

/// Another rank's buffer, mapped for this rank's device.
pub(super) enum Mapping {
    /// A buffer of this process.
    Shared(Arc<Owned>),
    /// A buffer of another process.
    Opened(Opened),
}

/// A buffer of another process.
pub(super) struct Opened {
    context: Arc<CudaContext>,
    address: u64,
}

impl Mapping {
    /// Maps the buffer of an offer. `process` is the identity of this process.
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

/// The buffer of another rank of this process. After this call the device of `context` may access it.
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
    // SAFETY: the context lives as long as the buffer, which the mapping holds; `context` is current.
    match unsafe { sys::cuCtxEnablePeerAccess(owned.context.cu_ctx(), 0) }.result() {
        Ok(()) | Err(DriverError(sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED)) => Ok(owned),
        Err(e) => bail!("CUDA device {here} cannot access the memory of device {there}: {e}"),
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: it was opened once, and the rank waits for its kernels before it releases it. A failure here
            // cannot be reported to anyone.
            let _ = unsafe { sys::cuIpcCloseMemHandle(self.address) };
        }
    }
}

/// The group in the form that kernels take. `buffers` are the addresses of all ranks' buffers on this rank's device.
/// The caller must hold the buffers, wait for its kernels before it releases them, and launch them on one stream.
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

/// The value that the host writes to end the waiting; kernels write 1 + the missing rank.
const STOP: u32 = u32::MAX;

/// A word in host memory, written by a rank's kernels and by the host: it says why waiting has ended.
pub(crate) struct Status {
    context: Arc<CudaContext>,
    word: NonNull<AtomicU32>,
    /// Address on the device.
    address: u64,
}

// SAFETY: the word is only accessed atomically, and lives as long as this object.
unsafe impl Send for Status {}
// SAFETY: as above.
unsafe impl Sync for Status {}

impl Status {
    pub(super) fn new(context: &Arc<CudaContext>) -> Result<Self> {
        context.bind_to_thread().w()?;
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the word is initialised below, before it is read.
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

    /// Makes this rank's kernels stop waiting, now and in the future.
    pub(crate) fn stop(&self) {
        // If a kernel has already written a missing rank, that reason is kept, because it says more.
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
            // SAFETY: `new` allocated it, and the rank waits for its kernels before it releases it. A failure here
            // cannot be reported to anyone.
            let _ = unsafe { result::free_host(self.word.as_ptr().cast()) };
        }
    }
}
