//! Pinned buffers through which data from files reaches a device.
//!
//! Threads take a buffer each, fill it, and put its copy on the device's stream; nobody waits for a
//! copy but the next user of the same buffer. So the copy engine empties some buffers while others
//! are filled, and host memory holds no more than the buffers.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::sys::CUevent_flags;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, PinnedHostSlice, result};
use candle_core::{Device, Result, bail};

use super::CudaExec;
use crate::exec::Exec;
use crate::view::ViewMut;

/// A few page-locked buffers in turn. They are made as they are needed, and freed with this.
///
/// It may be used from many threads at once: each is then one reader.
pub struct Staging {
    device: Device,
    cuda: CudaExec,
    most: usize,
    stages: Mutex<Stages>,
    returned: Condvar,
}

#[derive(Default)]
struct Stages {
    /// Those that nobody fills, in the order of their copies.
    idle: VecDeque<Stage>,
    made: usize,
}

/// A buffer and the mark of its last copy.
struct Stage {
    bytes: PinnedHostSlice<u8>,
    copied: CudaEvent,
}

impl Drop for Stage {
    fn drop(&mut self) {
        // Memory that the copy engine reads must not be freed; an error shows at the next use of the device.
        let _ = self.copied.synchronize();
    }
}

impl Staging {
    /// Bytes of a buffer: long enough that a copy costs far more than its start, short enough that
    /// many threads fill theirs at once.
    pub const BYTES: usize = 4 << 20;

    /// At most `most` buffers, at least one, for the device of `ex`.
    ///
    /// # Errors
    /// A context on the CPU.
    pub fn new(most: usize, ex: &Exec) -> Result<Self> {
        Ok(Self {
            device: ex.device().clone(),
            cuda: ex.cuda("staging")?.clone(),
            most: most.max(1),
            stages: Mutex::default(),
            returned: Condvar::new(),
        })
    }

    /// The device that it feeds.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Lets `fill` write the bytes of `to` into a pinned buffer, at most [`BYTES`](Self::BYTES) of them, and
    /// starts their copy, in stream order. Waits only for a free buffer.
    ///
    /// # Errors
    /// Those of `fill`; more bytes than a buffer has; a view of another device.
    pub fn put(&self, mut to: ViewMut<'_>, fill: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<()> {
        let len = to.elem_count() * to.dtype().size_in_bytes();
        let address = self.cuda.write::<u8>("staging", "to", &mut to)? as u64;
        if len > Self::BYTES {
            bail!("staging: expected at most {} bytes, got {len}", Self::BYTES)
        }
        if len == 0 {
            return Ok(());
        }
        let stream = self.cuda.raw()?; // makes the device current on this thread
        let mut stage = self.take()?;
        let copied = stage.bytes.as_mut_slice().w().and_then(|bytes| {
            let bytes = &mut bytes[..len];
            fill(bytes)?;
            // SAFETY: both sides hold `len` bytes; the host's are neither written nor freed before `copied`.
            unsafe { result::memcpy_htod_async(address, bytes, stream.cast()) }.w()?;
            stage.copied.record(&self.cuda.stream).w()
        });
        self.lock().idle.push_back(stage);
        self.returned.notify_one();
        copied
    }

    /// A buffer that no copy reads: one whose copy has ended, else a new one, else the first to be free.
    fn take(&self) -> Result<Stage> {
        let mut stages = self.lock();
        loop {
            let is_free = stages.idle.front().is_some_and(|stage| stage.copied.is_complete());
            if !is_free && stages.made < self.most {
                stages.made += 1;
                drop(stages);
                return self.make().inspect_err(|_| {
                    self.lock().made -= 1;
                    // Whoever waits for a buffer must not wait for this one.
                    self.returned.notify_all();
                });
            }
            if let Some(stage) = stages.idle.pop_front() {
                drop(stages);
                stage.copied.synchronize().w()?;
                return Ok(stage);
            }
            stages = self.returned.wait(stages).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn make(&self) -> Result<Stage> {
        let context = self.cuda.stream.context();
        // SAFETY: any bits are a u8.
        let mut bytes = unsafe { context.alloc_pinned_with_flags::<u8>(Self::BYTES, 0) }.w()?;
        bytes.as_mut_slice().w()?.fill(0);
        // A thread that waits leaves its core to others.
        let copied = context.new_event(Some(CUevent_flags::CU_EVENT_BLOCKING_SYNC)).w()?;
        Ok(Stage { bytes, copied })
    }

    fn lock(&self) -> MutexGuard<'_, Stages> {
        // A panic elsewhere cannot leave the list inconsistent: every update is one push or pop.
        self.stages.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
