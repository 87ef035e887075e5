//! What all groups of in-process ranks share: the first failure, and the boards to wake by it.

use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use crate::lock::lock;

/// Where ranks of a group wait.
pub(super) trait Waiting: Send + Sync {
    /// Makes the ranks that wait look at the world's failure.
    fn wake(&self);
}

/// The ranks of one process and all groups split from them.
#[derive(Debug)]
pub(super) struct World {
    failure: OnceLock<String>,
    boards: Mutex<Vec<Weak<dyn Waiting>>>,
    pub timeout: Duration,
}

impl World {
    pub fn new(timeout: Duration) -> Arc<Self> {
        Arc::new(Self { failure: OnceLock::new(), boards: Mutex::new(Vec::new()), timeout })
    }

    /// Adds a board whose waiting ranks a failure must wake.
    pub fn register(&self, board: Weak<dyn Waiting>) {
        let mut boards = lock(&self.boards);
        boards.retain(|b| b.strong_count() > 0);
        boards.push(board);
    }

    /// The first failure.
    pub fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    /// Fails every group, unless one has failed before. No board may be locked by the caller.
    pub fn fail(&self, cause: String) {
        if self.failure.set(cause).is_err() {
            return;
        }
        // A board that is registered after this sees the failure before it first waits.
        let boards: Vec<Arc<dyn Waiting>> = lock(&self.boards).iter().filter_map(Weak::upgrade).collect();
        for board in boards {
            board.wake();
        }
    }
}
