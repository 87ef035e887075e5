//! Repeats requests that failed for a temporary reason, after pauses of increasing length.

use std::time::Duration;

use indicatif::ProgressBar;
use tracing::warn;

use super::failure::Failure;

/// The number of attempts after the first one that may fail without any progress.
pub const RETRIES: u32 = 4;

/// Repeats a request up to `retries` times while its failure is temporary. `what` is the name in messages. `backoff` is
/// the first pause, and each further pause is twice as long. Warnings are printed without breaking `bar`.
pub fn retry<T>(
    what: &str,
    retries: u32,
    backoff: Duration,
    bar: &ProgressBar,
    mut attempt: impl FnMut() -> Result<T, Failure>,
) -> Result<T, Failure> {
    let mut pause = backoff;
    for _ in 0..retries {
        match attempt() {
            Err(Failure::Transient(reason)) => {
                let seconds = pause.as_secs_f32();
                bar.suspend(|| warn!("{what}: {reason}; trying again in {seconds} s"));
                std::thread::sleep(pause);
                pause *= 2;
            }
            result => return result,
        }
    }
    attempt()
}
