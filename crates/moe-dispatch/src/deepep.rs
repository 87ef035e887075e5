//! `deepep`: all-to-all. Each rank receives only the rows that its experts need, each once however
//! many of its experts the token chose.
//!
//! Two forms, after DeepEP's two families of kernels:
//!
//! | form | rows | counts |
//! |---|---|---|
//! | [`HighThroughput`] | Standard [T', H] | exact, exchanged before the rows |
//! | [`LowLatency`] | BatchedExperts [E_local, max, H] | a fixed maximum per rank, so no size depends on data |
//!
//! Dispatch and combine come in two halves each (DeepEP's and SGLang's a and b): after the first,
//! rows are on their way, and the caller may compute something else.

mod high_throughput;
mod low_latency;

use candle_core::Result;
use moe_kernels::Exec;

use crate::receiver::Receiver;
use crate::transport::Transport;

pub use high_throughput::{Dispatching, HighThroughput};
pub use low_latency::LowLatency;

/// Fails the group if a call that has begun is dropped before its second half: peers wait for it.
struct Begun<'a> {
    transport: &'a dyn Transport,
    what: &'static str,
    ended: bool,
}

impl Begun<'_> {
    fn end(mut self) {
        self.ended = true;
    }
}

impl Drop for Begun<'_> {
    fn drop(&mut self) {
        if !self.ended {
            self.transport.abort(&format!("a {} that had begun was dropped before its end", self.what));
        }
    }
}

/// The second half of a call, as a receiver.
fn pending<'a, T>(
    transport: &'a dyn Transport,
    what: &'static str,
    end: impl FnOnce(&mut Exec) -> Result<T> + Send + 'a,
) -> Receiver<'a, T> {
    let begun = Begun { transport, what, ended: false };
    Receiver::pending(move |ex| {
        begun.end();
        end(ex)
    })
}
