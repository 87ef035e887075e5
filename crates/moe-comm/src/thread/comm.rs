//! The in-process communicator: one round at the board per collective.

use std::sync::{Arc, Mutex, TryLockError};
use std::time::Duration;

use candle_core::{Error, Result};
use moe_kernels::{Exec, View};

use crate::call::{Call, Op, disagreement};
use crate::check::Place;
use crate::dtype::copied;
use crate::thread::board::{Board, Outcome, Payload, Post, Stop};
use crate::thread::world::World;

/// How long a rank waits for the others in one collective.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);

/// One rank of a world of threads in this process.
///
/// A rank is used from one thread at a time: a second concurrent call is an error. Ranks wait
/// for each other, so each needs a thread of its own; do not call collectives from inside a
/// shared rayon pool, whose workers could then all be waiting.
///
/// Dropping the communicator is leaving: ranks that still wait for this one fail. A drop during
/// a panic fails the world at once.
#[derive(Debug)]
pub struct ThreadComm {
    rank: usize,
    pub(super) board: Arc<Board>,
    /// Held during a call.
    turn: Mutex<()>,
    /// Someone else reports this rank's panic, with its message.
    supervised: bool,
}

impl ThreadComm {
    /// The ranks 0..n of a new world, to be moved to a thread each. They wait
    /// [`DEFAULT_TIMEOUT`] for each other.
    pub fn world(n: usize) -> Vec<ThreadComm> {
        Self::world_with_timeout(n, DEFAULT_TIMEOUT)
    }

    /// Like [`world`](Self::world), with the time that a rank waits for the others in one
    /// collective. [`Duration::MAX`] waits as long as the others live.
    pub fn world_with_timeout(n: usize, timeout: Duration) -> Vec<ThreadComm> {
        let board = Board::new(&World::new(timeout), (0..n).collect());
        (0..n).map(|rank| Self::new(rank, board.clone(), false)).collect()
    }

    fn new(rank: usize, board: Arc<Board>, supervised: bool) -> Self {
        Self { rank, board, turn: Mutex::new(()), supervised }
    }

    /// Promises that the caller fails the world if this rank panics.
    pub(super) fn supervise(&mut self) -> Arc<World> {
        self.supervised = true;
        self.board.world.clone()
    }

    pub(super) fn place(&self) -> Place {
        Place { rank: self.rank, size: self.board.size() }
    }

    /// A copy of `rows` for the others to read.
    pub(super) fn pack(&self, rows: View, ex: &Exec) -> Result<Payload> {
        // Alone, the caller's own rows are all that is read.
        if self.board.size() == 1 { Ok(Payload::None) } else { Ok(Payload::Rows(copied(rows, ex)?)) }
    }

    /// One round: posts `call` with the payload that `pack` makes of `data`, and hands `data` and
    /// everyone's posts to `read`. Any failure fails the world.
    pub(super) fn round<D, R>(
        &self,
        op: Op,
        call: Result<Call>,
        data: D,
        pack: impl FnOnce(&D) -> Result<Payload>,
        read: impl FnOnce(D, &[Arc<Post>]) -> Result<R>,
    ) -> Result<R> {
        self.try_round(op, call, data, pack, read).map_err(|stop| {
            if let Stop::Cause(cause) = stop {
                self.board.world.fail(cause);
            }
            self.failure(&format!("{op} on "))
        })
    }

    fn try_round<D, R>(
        &self,
        op: Op,
        call: Result<Call>,
        data: D,
        pack: impl FnOnce(&D) -> Result<Payload>,
        read: impl FnOnce(D, &[Arc<Post>]) -> Result<R>,
    ) -> Outcome<R> {
        let local = |e: Error| Stop::Cause(format!("{} failed: {}", self.name(), plain(&e)));
        let turn = self.turn.try_lock();
        if matches!(turn, Err(TryLockError::WouldBlock)) {
            let name = self.name();
            return Err(Stop::Cause(format!(
                "{name} called {op} while another of its threads was in a collective"
            )));
        }
        self.board.begin(self.rank, op)?;
        let post = Post { call: call.map_err(local)?, payload: pack(&data).map_err(local)? };
        let posts = self.board.exchange(self.rank, post)?;
        let calls: Vec<&Call> = posts.iter().map(|p| &p.call).collect();
        if let Some(cause) = disagreement(&calls, |ranks| self.board.label(ranks)) {
            return Err(Stop::Cause(cause));
        }
        let value = read(data, &posts).map_err(local)?;
        drop(posts);
        self.board.end(self.rank);
        Ok(value)
    }

    /// "rank 1", with the world rank where that differs.
    pub(super) fn name(&self) -> String {
        self.board.label(&[self.rank])
    }

    /// The world's failure as this rank reports it.
    pub(super) fn failure(&self, context: &str) -> Error {
        let cause = self.board.world.failure().unwrap_or("unknown failure");
        Error::msg(format!("{context}{} of {}: {cause}", self.name(), self.board.size()))
    }

    /// The communicator of a group split from this one.
    pub(super) fn child(&self, rank: usize, board: Arc<Board>) -> ThreadComm {
        Self::new(rank, board, self.supervised)
    }
}

/// An error's text without the backtrace of the rank that it happened on.
pub(super) fn plain(e: &Error) -> String {
    match e {
        Error::WithBacktrace { inner, .. } => plain(inner),
        Error::WithPath { inner, path } => format!("{}: {}", path.display(), plain(inner)),
        Error::Context { inner, context } => format!("{context}: {}", plain(inner)),
        other => other.to_string(),
    }
}

impl Drop for ThreadComm {
    fn drop(&mut self) {
        match (std::thread::panicking(), self.supervised) {
            (false, _) => self.board.leave(self.rank),
            (true, false) => self.board.world.fail(format!("{} panicked", self.name())),
            (true, true) => {}
        }
    }
}
