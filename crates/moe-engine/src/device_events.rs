//! What a CUDA device did, as `tracing` events with times of their own: a profile shows them beside the
//! spans of the host.

use std::sync::OnceLock;
use std::time::Instant;

/// Target of the events.
pub const TARGET: &str = "moe_engine::device";

/// Where the time of the events starts.
pub fn origin() -> Instant {
    static ORIGIN: OnceLock<Instant> = OnceLock::new();
    *ORIGIN.get_or_init(Instant::now)
}

/// Whether anybody wants to know what a device does.
#[cfg(feature = "cuda")]
pub(crate) fn wanted() -> bool {
    tracing::enabled!(target: TARGET, tracing::Level::TRACE)
}

/// Tells what a device did, in microseconds since [`origin`]; `index` says which one of several.
pub fn section(what: &str, index: usize, start_us: f64, duration_us: f64) {
    tracing::event!(target: TARGET, tracing::Level::TRACE, what, index, start_us, duration_us);
}
