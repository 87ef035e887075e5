//! Page-locked buffers through which data from files reaches a device.
//!
//! Each thread takes a buffer, fills it, and puts its copy on the device's stream. Only the next user of the same
//! buffer waits for a copy. So the copy engine empties some buffers while others are filled, and host memory holds no
//! more than the buffers.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::sys::CUevent_flags;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream, result};
use candle_core::{Device, Error, Result, bail};
use rayon::{ThreadPool, ThreadPoolBuilder};

use super::CudaExec;
use super::locked::LockedMemory;
use super::scratch::Scratch;
use crate::exec::Exec;
use crate::view::ViewMut;

/// A few page-locked buffers that are used in turn. They are one allocation, because locking and unlocking memory is
/// expensive.
///
/// It may be used from many threads at once.
pub struct Staging {
    device: Device,
    cuda: CudaExec,
    /// Bytes of a buffer.
    len: usize,
    /// The buffers that no thread is filling, in the order of their copies.
    idle: Mutex<VecDeque<Stage>>,
    returned: Condvar,
    /// The device memory for data that goes through a kernel.
    scratch: Scratch,
    /// Threads that only read. The threads of rayon's own pool stay free to prepare the next reads.
    readers: ThreadPool,
    /// The memory that contains the buffers. Fields are dropped in order, so it is dropped after them.
    _memory: LockedMemory,
}

/// A buffer and the event of its last copy.
struct Stage {
    bytes: &'static mut [u8],
    copied: CudaEvent,
}

impl Stage {
    /// Fills the buffer after its last copy has ended.
    fn fill(&mut self, len: usize, fill: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<()> {
        self.copied.synchronize().w()?;
        fill(&mut self.bytes[..len])
    }

    /// Starts the copy of `len` bytes, and records its end.
    ///
    /// # Safety
    /// `address` points to `len` bytes of the stream's device, which is current on this thread.
    unsafe fn copy(&mut self, len: usize, address: u64, stream: &CudaStream) -> Result<&CudaEvent> {
        // SAFETY: both sides have `len` bytes. The host's bytes are neither written nor freed before `copied`.
        unsafe { result::memcpy_htod_async(address, &self.bytes[..len], stream.cu_stream()) }.w()?;
        self.copied.record(stream).w()?;
        Ok(&self.copied)
    }
}

impl Staging {
    /// The largest number of threads that read at the same time. More threads take memory bandwidth from the copies and
    /// delay each other's driver calls (one H200, 32 cores: 5 GB of a quantised checkpoint in 0.38 s by 32 threads, in
    /// 0.31 s by 12 or 16).
    pub const MAX_READERS: usize = 16;

    /// `count` buffers of `len` bytes, at least one of each, for the device of `ex`.
    ///
    /// # Errors
    /// A context on the CPU; memory that the system or the driver refuses.
    pub fn new(count: usize, len: usize, ex: &Exec) -> Result<Self> {
        let count = count.max(1);
        let len = len.max(1);
        let cuda = ex.cuda("staging")?.clone();
        let context = cuda.stream.context();
        let mut memory = LockedMemory::new(context, count.saturating_mul(len))?;
        // SAFETY: the memory does not move, lives as long as the buffers (`Staging`), and is only used through them.
        let bytes = unsafe { std::slice::from_raw_parts_mut(memory.as_mut_ptr(), memory.len()) };
        let stage = |bytes| {
            // A thread that waits leaves its core to other threads.
            let copied = context.new_event(Some(CUevent_flags::CU_EVENT_BLOCKING_SYNC)).w()?;
            Ok(Stage { bytes, copied })
        };
        let idle = bytes.chunks_exact_mut(len).map(stage).collect::<Result<_>>()?;
        // Half of the buffers are filled while the other half is copied.
        let readers = count.div_ceil(2).min(Self::MAX_READERS);
        let readers = ThreadPoolBuilder::new().num_threads(readers).build().map_err(Error::wrap)?;
        Ok(Self {
            device: ex.device().clone(),
            len,
            idle: Mutex::new(idle),
            returned: Condvar::new(),
            scratch: Scratch::new(ex.device(), len),
            readers,
            cuda,
            _memory: memory,
        })
    }

    /// Runs `work` on the reading threads. Its parallel loops use only these threads.
    pub fn read<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        self.readers.install(work)
    }

    /// The device to which data is copied.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Bytes of a buffer.
    pub fn buffer_len(&self) -> usize {
        self.len
    }

    /// Calls `fill` to write the bytes of `to` into a buffer, at most [`buffer_len`](Self::buffer_len) of them, and
    /// starts their copy, in stream order. It waits only for a free buffer.
    ///
    /// # Errors
    /// The errors of `fill`; more bytes than a buffer has; a view of another device.
    pub fn put(&self, mut to: ViewMut<'_>, fill: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<()> {
        let len = to.elem_count() * to.dtype().size_in_bytes();
        let address = self.cuda.write::<u8>("staging", "to", &mut to)? as u64;
        if len > self.len {
            bail!("staging: expected at most {} bytes, got {len}", self.len)
        }
        if len == 0 {
            return Ok(());
        }
        self.with_stage(|stage| {
            stage.fill(len, fill)?;
            self.cuda.raw()?; // makes the device current on this thread
            // SAFETY: `to` has room for `len` bytes.
            unsafe { stage.copy(len, address, &self.cuda.stream) }.map(drop)
        })
    }

    /// Calls `fill` to write `len` bytes into a buffer, copies them to device memory whose address is a multiple of 16,
    /// and calls `launch` to put the kernel that reads them on the stream. The bytes are not overwritten before that
    /// kernel has ended. It waits only for a free buffer.
    ///
    /// # Errors
    /// The errors of `fill` and `launch`; more bytes than a buffer has; no device memory left.
    pub(crate) fn put_through(
        &self,
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<()>,
        launch: impl FnOnce(u64, &CudaExec) -> Result<()>,
    ) -> Result<()> {
        if len > self.len {
            bail!("staging: expected at most {} bytes, got {len}", self.len)
        }
        self.with_stage(|stage| {
            stage.fill(len, fill)?;
            self.scratch.pass(
                &self.cuda,
                // SAFETY: scratch memory has room for a buffer.
                |address, copies| unsafe { stage.copy(len, address, copies) },
                launch,
            )
        })
    }

    fn with_stage(&self, work: impl FnOnce(&mut Stage) -> Result<()>) -> Result<()> {
        let mut stage = self.take();
        let worked = work(&mut stage);
        self.lock().push_back(stage);
        self.returned.notify_one();
        worked
    }

    /// The buffer whose copy will be the first to end.
    fn take(&self) -> Stage {
        let mut idle = self.lock();
        loop {
            match idle.pop_front() {
                Some(stage) => return stage,
                None => idle = self.returned.wait(idle).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Stage>> {
        // A panic elsewhere cannot leave the list inconsistent: every update is one push or pop.
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // Memory that the copy engine reads must not be freed. An error shows at the next use of the device.
        self.lock().drain(..).for_each(|stage| _ = stage.copied.synchronize());
    }
}
