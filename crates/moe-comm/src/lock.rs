//! Locks that outlive a rank's panic.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex even if a thread panicked while holding it. Every critical section of this crate keeps its data
/// consistent at each step, and the panic of one rank must not spread through a lock.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
