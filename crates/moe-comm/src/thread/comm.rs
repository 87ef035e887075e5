//! The communicator between threads of one process; each collective is one round at the board.

use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use candle_core::{Result, bail};
use moe_kernels::{Exec, View};

use crate::call::Call;
use crate::check::Place;
use crate::communicator::Communicator;
use crate::round::wait::{DEFAULT_TIMEOUT, Outcome};
use crate::round::{Give, Posts, Rounds, copied};
use crate::supervised::{Supervised, Supervisor};
use crate::thread::board::{Board, Payload, Post};
use crate::thread::world::World;

/// One rank of a world of threads in this process.
///
/// Only one thread at a time may use a rank: a second concurrent call is an error. Ranks wait for each other, so each
/// needs its own thread. Do not call collectives in a shared rayon pool, whose workers could then all be waiting.
///
/// Dropping the communicator means leaving the group: ranks that still wait for this one fail. A drop during a panic
/// fails the world at once.
#[derive(Debug)]
pub struct ThreadComm {
    rank: usize,
    board: Arc<Board>,
    /// This lock is held during a call.
    turn: Mutex<()>,
    /// Whether another component reports this rank's panic, with its message.
    supervised: bool,
}

impl ThreadComm {
    /// Makes the ranks 0..n of a new world. Move each to its own thread. A rank waits at most [`DEFAULT_TIMEOUT`] for
    /// the others.
    pub fn world(n: usize) -> Vec<ThreadComm> {
        Self::world_with_timeout(n, DEFAULT_TIMEOUT)
    }

    /// Like [`world`](Self::world), with a time limit for a rank that waits for the others in one collective. With
    /// [`Duration::MAX`] it waits as long as the others are alive.
    pub fn world_with_timeout(n: usize, timeout: Duration) -> Vec<ThreadComm> {
        let board = Board::new(&World::new(timeout), (0..n).collect());
        (0..n).map(|rank| Self::new(rank, board.clone(), false)).collect()
    }

    fn new(rank: usize, board: Arc<Board>, supervised: bool) -> Self {
        Self { rank, board, turn: Mutex::new(()), supervised }
    }
}

impl Rounds for ThreadComm {
    type Posts = Shared;

    fn place(&self) -> Place {
        Place { rank: self.rank, size: self.board.size() }
    }

    fn turn(&self) -> &Mutex<()> {
        &self.turn
    }

    fn exchange(&self, call: Call, give: Give<'_>, ex: &Exec) -> Outcome<Shared> {
        self.board.begin(self.rank, call.op)?;
        let payload = match give {
            Give::Nothing => Payload::None,
            Give::Rows(rows, parts) => Payload::Rows(copied(rows, ex).map_err(|e| self.local(&e))?, parts),
            Give::Split { color, key } => Payload::Split { color, key, board: OnceLock::new() },
        };
        let posts = self.board.exchange(self.rank, Post { call, payload })?;
        Ok(Shared { posts, rank: self.rank })
    }

    fn end(&self, posts: Shared) {
        drop(posts);
        self.board.end(self.rank);
    }

    /// The post of the leader carries the new board. The first rank that gets here makes it; every rank would make the
    /// same one.
    fn join(&self, posts: &Shared, members: &[usize], own: usize) -> Result<Arc<dyn Communicator>> {
        let leader = members.first().and_then(|&leader| posts.posts.get(leader));
        let Some(Payload::Split { board, .. }) = leader.map(|post| &post.payload) else {
            bail!("the split lost its first rank")
        };
        let world_ranks = || members.iter().map(|&rank| self.board.world_rank(rank)).collect();
        let board = board.get_or_init(|| Board::new(&self.board.world, world_ranks()));
        Ok(Arc::new(Self::new(own, board.clone(), self.supervised)))
    }

    fn label(&self, ranks: &[usize]) -> String {
        self.board.label(ranks)
    }

    fn fail(&self, cause: String) {
        self.board.world.fail(cause);
    }

    fn failure(&self) -> Option<&str> {
        self.board.world.failure()
    }
}

/// The posts of one round, which all ranks share.
pub(crate) struct Shared {
    posts: Vec<Arc<Post>>,
    rank: usize,
}

impl Posts for Shared {
    fn calls(&self) -> Vec<&Call> {
        self.posts.iter().map(|post| &post.call).collect()
    }

    fn rows(&self, from: usize) -> Result<View<'_>> {
        match self.posts.get(from).map(|post| &post.payload) {
            Some(Payload::Rows(rows, parts)) => parts.of(rows.view(), self.rank),
            _ => bail!("a rank posted no rows"),
        }
    }

    fn split(&self, from: usize) -> Result<(usize, usize)> {
        match self.posts.get(from).map(|post| &post.payload) {
            Some(Payload::Split { color, key, .. }) => Ok((*color, *key)),
            _ => bail!("a rank posted no colour"),
        }
    }
}

impl Supervised for ThreadComm {
    fn supervise(&mut self) -> Supervisor {
        self.supervised = true;
        let name = self.name();
        let world = self.board.world.clone();
        Supervisor::new(name, move |cause| world.fail(cause))
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
