//! State that all groups of in-process ranks share: the first failure, and the boards that a failure must wake.

use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use crate::lock::lock;

/// A place where ranks of a group wait.
pub(super) trait Waiting: Send + Sync {
    /// Makes the waiting ranks check for the world's failure.
    fn wake(&self);
}

/// The ranks of one process, and all groups that were split from them.
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

    /// Fails every group, unless one has failed before. The caller must not hold the lock of a board.
    pub fn fail(&self, cause: String) {
        if self.failure.set(cause).is_err() {
            return;
        }
        // A board that is registered after this sees the failure before it waits for the first time.
        let boards: Vec<Arc<dyn Waiting>> = lock(&self.boards).iter().filter_map(Weak::upgrade).collect();
        for board in boards {
            board.wake();
        }
    }
}
