//! Waiting for other ranks. A wait ends when the data arrives, at a deadline, when the world fails, or when a rank has
//! left. So no rank waits forever.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::call::Op;
use crate::lock::lock;

/// How long a rank waits for the others in one collective, unless set otherwise.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a waiting rank waits for the reason why another rank has left. The error or panic of that rank reaches the
/// world right after its communicator is dropped, and says more than its absence.
const LEAVE_GRACE: Duration = Duration::from_millis(100);

/// How often a waiting rank yields its core before it sleeps. Ranks mostly arrive within microseconds of each other,
/// and waking a sleeping thread costs tens of microseconds (2 ranks on 2 cores: a barrier takes 3 us with yielding, 11
/// to 65 us without). A yield leaves the core to the thread that computes.
const YIELDS: usize = 64;

/// Why a rank's call stops.
#[derive(Debug)]
pub(crate) enum Stop {
    /// The world has failed before.
    Failed,
    /// This rank fails the world for this reason.
    Cause(String),
}

#[cfg(feature = "nccl")]
impl From<candle_core::Error> for Stop {
    fn from(e: candle_core::Error) -> Self {
        Self::Cause(crate::error::plain(&e))
    }
}

/// The result of waiting.
pub(crate) type Outcome<T> = std::result::Result<T, Stop>;

/// The ranks for which a wait is waiting.
pub(crate) struct Absent {
    pub missing: Vec<usize>,
    /// The missing ranks that have left.
    pub gone: Vec<usize>,
}

/// A wait of one rank in one collective.
pub(crate) struct Wait<'a> {
    pub op: Op,
    /// The reason for the wait; the collective's name follows it in messages.
    pub why: &'a str,
    pub timeout: Duration,
    pub failed: &'a dyn Fn() -> bool,
    pub label: &'a dyn Fn(&[usize]) -> String,
}

impl Wait<'_> {
    /// Waits until `ready` returns a value for the state. `changed` is notified whenever that may have become possible.
    pub fn until<S, T>(
        &self,
        (state, changed): (&Mutex<S>, &Condvar),
        mut ready: impl FnMut(&mut S) -> Option<T>,
        absent: impl Fn(&S) -> Absent,
    ) -> Outcome<T> {
        for _ in 0..YIELDS {
            if let Some(value) = ready(&mut lock(state)) {
                return Ok(value);
            }
            std::thread::yield_now();
        }
        let start = Instant::now();
        let mut leave_seen = None;
        let mut state = lock(state);
        loop {
            if let Some(value) = ready(&mut state) {
                return Ok(value);
            }
            if (self.failed)() {
                return Err(Stop::Failed);
            }
            let left = self.patience(&absent(&state), start, &mut leave_seen)?;
            state = sleep(changed, state, left);
        }
    }

    /// How much longer to wait; an error if the time is over.
    fn patience(
        &self,
        absent: &Absent,
        start: Instant,
        leave_seen: &mut Option<Instant>,
    ) -> Outcome<Duration> {
        let Self { op, why, timeout, label, .. } = self;
        let mut left = timeout.saturating_sub(start.elapsed());
        if !absent.gone.is_empty() {
            let grace = LEAVE_GRACE.saturating_sub(leave_seen.get_or_insert_with(Instant::now).elapsed());
            if grace.is_zero() {
                let gone = label(&absent.gone);
                return Err(Stop::Cause(format!(
                    "{gone} left (dropped the communicator) while others waited {why} {op}"
                )));
            }
            left = left.min(grace);
        }
        if left.is_zero() {
            let missing = label(&absent.missing);
            return Err(Stop::Cause(format!("{missing} stalled: others waited {why} {op} for {timeout:?}")));
        }
        Ok(left)
    }
}

/// Sleeps until it is notified, or for a limited time.
pub(crate) fn sleep<'a, S>(
    changed: &Condvar,
    state: MutexGuard<'a, S>,
    at_most: Duration,
) -> MutexGuard<'a, S> {
    // The time is limited, because not every platform can wait for any `Duration`; the caller checks again.
    let at_most = at_most.min(Duration::from_secs(3600));
    changed.wait_timeout(state, at_most).unwrap_or_else(PoisonError::into_inner).0
}
