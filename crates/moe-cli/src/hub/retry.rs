//! Trying again, at growing intervals, what fails for a reason that may pass.

use std::time::Duration;

use indicatif::ProgressBar;
use tracing::warn;

use super::failure::Failure;

/// Tries after the first one that get no further.
pub const RETRIES: u32 = 4;

/// Asks up to `retries` times more while the failure may pass. `what` is asked for; `backoff` is the first pause, which
/// doubles from try to try; warnings do not tear `bar`.
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
