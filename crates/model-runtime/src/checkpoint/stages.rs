//! The page-locked buffers through which data from files reaches a CUDA device.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{Device, Result};
use moe_kernels::Exec;
use moe_kernels::cuda::Staging;

/// Bytes of a buffer. Copying it takes far longer than starting the copy, and reading it takes no longer than copying
/// the other buffers.
const BUFFER: usize = 4 << 20;

/// The buffers of one handle of files. They are allocated when the handle first loads onto a device, and freed with it.
#[derive(Default)]
pub(super) struct Stages(Mutex<Option<Arc<Staging>>>);

/// A clone of the handle has its own buffers.
impl Clone for Stages {
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl Stages {
    /// Returns two buffers for each thread, one that it fills and one that is copied, but not more than are needed for
    /// `bytes`.
    pub(super) fn of(&self, device: &Device, bytes: usize) -> Result<Arc<Staging>> {
        let mut made = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(staging) = made.as_ref().filter(|staging| staging.device().same_device(device)) {
            return Ok(staging.clone());
        }
        let most = 2 * rayon::current_num_threads().clamp(2, Staging::MAX_READERS);
        let count = most.min(bytes.div_ceil(BUFFER));
        let staging = Arc::new(Staging::new(count, BUFFER, &Exec::on(device)?)?);
        *made = Some(staging.clone());
        Ok(staging)
    }
}
