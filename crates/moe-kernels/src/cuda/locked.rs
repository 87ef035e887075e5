//! Page-locked host memory for large transfers.
//!
//! Where the driver allocates such memory itself, it takes and clears page after page on one thread, and other
//! threads' calls wait for it. So the pages come from the system, a few threads touch them, and the driver only locks
//! what is there. Large pages are not asked for: beside a page cache that fills memory, the system would first move
//! pages to make room for one (96 MiB took 315 ms once, where small pages took 65).

use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::thread;

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{CudaContext, sys};
use candle_core::{Result, bail};
use memmap2::MmapMut;

use super::counts;

/// Threads that touch pages: enough for what the system clears at once.
const TOUCHING: usize = 8;

/// Bytes of host memory that devices copy from and to by themselves. Who frees them has waited for the copies.
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
    /// Where kernels find it.
    ///
    /// # Errors
    /// A device that cannot read host memory by itself.
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

/// Writes to every page. These are not rayon's threads: one that waits for those may be given work that waits for
/// this very memory.
fn touch(bytes: &mut [u8]) {
    let part = bytes.len().div_ceil(TOUCHING).max(1);
    thread::scope(|scope| {
        for part in bytes.chunks_mut(part) {
            // Pages that no thread touches, because none can be started, the driver does.
            let _ = thread::Builder::new().spawn_scoped(scope, move || part.fill(0));
        }
    });
}
