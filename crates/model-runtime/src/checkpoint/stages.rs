//! The page-locked buffers through which what is read reaches a CUDA device.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{Device, Result};
use moe_kernels::Exec;
use moe_kernels::cuda::Staging;

/// Bytes of a buffer: a copy of them takes far longer than its start, and reading them no longer than the copies of
/// the other buffers.
const BUFFER: usize = 4 << 20;

/// The buffers of one handle of files: made when it first loads onto a device, and gone with it.
#[derive(Default)]
pub(super) struct Stages(Mutex<Option<Arc<Staging>>>);

/// Another handle has its own.
impl Clone for Stages {
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl Stages {
    /// Two buffers for each thread, one that it fills and one that is copied, but no more than `bytes` fill.
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
