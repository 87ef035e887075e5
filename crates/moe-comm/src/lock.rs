//! Locks that outlive a rank's panic.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks in spite of a panic elsewhere: every critical section of this crate leaves its data
/// consistent at each step, and a rank's panic must not cascade through a lock.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
