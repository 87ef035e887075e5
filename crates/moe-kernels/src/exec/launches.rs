//! A log of the kernels that a context launches, by the names that plans give them.
//!
//! A test compares it with the plan of the same step. Without a log, contexts record nothing.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Collects the launches of contexts. Clones share one list.
#[derive(Clone, Debug, Default)]
pub struct LaunchLog(Arc<Mutex<Log>>);

#[derive(Debug, Default)]
struct Log {
    launched: Vec<Launched>,
    mark: Option<(&'static str, usize)>,
    /// The number of launches that count as one and contain the next launch.
    within: usize,
}

/// A kernel that was launched, or a few that a plan names as one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launched {
    /// The last [mark](crate::Exec::mark) before it.
    pub mark: Option<(&'static str, usize)>,
    /// Its name in a plan.
    pub kernel: String,
}

/// While this value exists, launches count as part of the launch that was recorded with it.
#[derive(Debug)]
pub struct LaunchedAsOne(LaunchLog);

impl LaunchLog {
    /// The launches since the last call.
    pub fn take(&self) -> Vec<Launched> {
        std::mem::take(&mut self.log().launched)
    }

    fn log(&self) -> MutexGuard<'_, Log> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn note(&self, kernel: String) {
        let mut log = self.log();
        if log.within == 0 {
            let mark = log.mark;
            log.launched.push(Launched { mark, kernel });
        }
    }

    pub(super) fn note_whole(&self, kernel: String) -> LaunchedAsOne {
        self.note(kernel);
        self.log().within += 1;
        LaunchedAsOne(self.clone())
    }

    pub(super) fn mark(&self, what: &'static str, index: usize) {
        self.log().mark = Some((what, index));
    }
}

impl Drop for LaunchedAsOne {
    fn drop(&mut self) {
        self.0.log().within -= 1;
    }
}
