//! The second half of a split call: what is still in flight.
//!
//! A split prepare posts its sends, then hands out a receiver, so that the caller can
//! compute something else (shared experts) before it waits. The receiver owns all that the
//! second half needs, so any number of calls may be in flight on one backend.

use candle_core::Result;
use moe_kernels::Exec;

/// The pending result of [`begin_prepare`](crate::PrepareFinalize::begin_prepare).
///
/// [`end`](Self::end) must be called on every rank, in the order of the begins. A receiver that
/// is dropped instead leaves peers waiting; a backend whose first half has sent something
/// therefore aborts its communicator when the closure is dropped uncalled.
#[must_use = "the call completes only in `end`"]
pub struct Receiver<'a, T>(State<'a, T>);

enum State<'a, T> {
    Ready(T),
    Pending(End<'a, T>),
}

type End<'a, T> = Box<dyn FnOnce(&mut Exec) -> Result<T> + Send + 'a>;

impl<'a, T> Receiver<'a, T> {
    /// A call that is already complete.
    pub fn ready(value: T) -> Self {
        Self(State::Ready(value))
    }

    /// A call that `end` completes.
    pub fn pending(end: impl FnOnce(&mut Exec) -> Result<T> + Send + 'a) -> Self {
        Self(State::Pending(Box::new(end)))
    }

    /// Waits for the second half and returns the result of the whole call.
    pub fn end(self, ex: &mut Exec) -> Result<T> {
        match self.0 {
            State::Ready(value) => Ok(value),
            State::Pending(end) => end(ex),
        }
    }
}

impl<T> std::fmt::Debug for Receiver<'_, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self.0 {
            State::Ready(_) => "Receiver(ready)",
            State::Pending(_) => "Receiver(pending)",
        })
    }
}
