//! The work of a CUDA device as `tracing` events with their own times. A profile shows them next to the spans of the
//! host.

use std::sync::OnceLock;
use std::time::Instant;

/// Target of the events.
pub const TARGET: &str = "moe_engine::device";

/// The origin of the events' times.
pub fn origin() -> Instant {
    static ORIGIN: OnceLock<Instant> = OnceLock::new();
    *ORIGIN.get_or_init(Instant::now)
}

/// Whether a subscriber wants these events.
#[cfg(feature = "cuda")]
pub(crate) fn wanted() -> bool {
    tracing::enabled!(target: TARGET, tracing::Level::TRACE)
}

/// Reports a section of the device's work, in microseconds since [`origin`]. `index` is its number among several of the
/// same name.
pub fn section(what: &str, index: usize, start_us: f64, duration_us: f64) {
    tracing::event!(target: TARGET, tracing::Level::TRACE, what, index, start_us, duration_us);
}
