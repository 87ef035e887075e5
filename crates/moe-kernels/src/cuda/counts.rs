//! Counts how often this process allocated device or page-locked memory and waited for a device, so that a test can
//! show that a step does neither. All code in this crate that does so calls this module.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
static SYNCHRONIZATIONS: AtomicU64 = AtomicU64::new(0);
static WAITS: AtomicU64 = AtomicU64::new(0);

/// Calls so far, over all devices and threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceCalls {
    /// Allocations of device memory and of page-locked host memory.
    pub allocations: u64,
    /// Waits until all work of a stream has ended.
    pub synchronizations: u64,
    /// Waits for a copy from or to page-locked memory that had not yet ended.
    pub waits: u64,
}

/// The calls of this process so far.
pub fn device_calls() -> DeviceCalls {
    DeviceCalls {
        allocations: ALLOCATIONS.load(Relaxed),
        synchronizations: SYNCHRONIZATIONS.load(Relaxed),
        waits: WAITS.load(Relaxed),
    }
}

pub(crate) fn allocation() {
    ALLOCATIONS.fetch_add(1, Relaxed);
}

pub(super) fn synchronization() {
    SYNCHRONIZATIONS.fetch_add(1, Relaxed);
}

pub(super) fn wait() {
    WAITS.fetch_add(1, Relaxed);
}
