//! Page-locked host memory for large transfers.
//!
//! If the driver allocates such memory itself, it takes and clears page after page on one thread, and calls of other
//! threads wait for it. So the system allocates the pages here, a few threads touch them, and the driver only locks
//! existing pages. Large pages are not requested: if the page cache fills memory, the system would first move pages to
//! make room for one (in one case 96 MiB took 315 ms, compared with 65 ms for small pages).

use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::thread;

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{CudaContext, sys};
use candle_core::{Result, bail};
use memmap2::MmapMut;

use super::counts;

/// Number of threads that touch pages: as many as the system can clear at the same time.
const TOUCHING: usize = 8;

/// Bytes of host memory that devices copy from and to directly. The owner must wait for the copies before it frees
/// them.
pub(super) struct LockedMemory {
    bytes: MmapMut,
    context: Arc<CudaContext>,
}

impl LockedMemory {
    /// `len` zeros, at least one.
    ///
    /// # Errors
    /// No memory left; a limit of the system on what may be locked.
    pub(super) fn new(context: &Arc<CudaContext>, len: usize) -> Result<Self> {
        counts::allocation();
        let mut bytes = match MmapMut::map_anon(len) {
            Ok(bytes) => bytes,
            Err(e) => bail!("the system refuses {len} bytes of host memory: {e}"),
        };
        touch(&mut bytes);
        let locked = context.bind_to_thread().and_then(|()| {
            // SAFETY: the range is mapped, and stays so until it is unlocked.
            unsafe {
                sys::cuMemHostRegister_v2(bytes.as_mut_ptr().cast(), len, sys::CU_MEMHOSTREGISTER_DEVICEMAP)
            }
            .result()
        });
        match locked {
            Ok(()) => Ok(Self { bytes, context: context.clone() }),
            Err(e) => bail!("the driver refuses to page-lock {len} bytes of host memory: {e}"),
        }
    }
}

impl LockedMemory {
    /// The address at which kernels find it.
    ///
    /// # Errors
    /// The device cannot read host memory directly.
    pub(super) fn device_address(&self) -> Result<u64> {
        self.context.bind_to_thread().w()?;
        let mut address = 0;
        let host = self.bytes.as_ptr().cast_mut().cast();
        // SAFETY: `new` locked this memory with a mapping for the device; the call writes one address.
        match unsafe { sys::cuMemHostGetDevicePointer_v2(&mut address, host, 0) }.result() {
            Ok(()) => Ok(address),
            Err(e) => bail!("the device does not read page-locked host memory by itself: {e}"),
        }
    }
}

impl Deref for LockedMemory {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl DerefMut for LockedMemory {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }
}

impl Drop for LockedMemory {
    fn drop(&mut self) {
        let unlocked = self.context.bind_to_thread().and_then(|()| {
            // SAFETY: `new` locked this range, and nothing else unlocks it.
            unsafe { sys::cuMemHostUnregister(self.bytes.as_mut_ptr().cast()) }.result()
        });
        self.context.record_err(unlocked); // shows at the next use of the device
    }
}

/// Writes to every page. It does not use rayon's threads: a thread that waits for those may be given work that waits
/// for this very memory.
fn touch(bytes: &mut [u8]) {
    let part = bytes.len().div_ceil(TOUCHING).max(1);
    thread::scope(|scope| {
        for part in bytes.chunks_mut(part) {
            // If a thread cannot be started, its pages are not touched here, and the driver touches them.
            let _ = thread::Builder::new().spawn_scoped(scope, move || part.fill(0));
        }
    });
}
