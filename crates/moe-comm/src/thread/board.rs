//! The board of one group: a slot per rank, which is filled and emptied once per collective.
//!
//! A round has three calls: `begin` (waits until the previous round is emptied), `exchange` (posts, and waits for all
//! posts) and `end`. The last rank to end empties the board.

use std::sync::{Arc, Condvar, Mutex, OnceLock};

use moe_kernels::Scratch;

use crate::call::{Call, Op};
use crate::lock::lock;
use crate::round::wait::{Absent, Outcome, Stop, Wait};
use crate::round::{Parts, label};
use crate::thread::world::{Waiting, World};

/// Data that a rank posts.
#[derive(Debug)]
pub(super) enum Payload {
    /// No data.
    None,
    /// Rows for the other ranks, and which rank reads which rows.
    Rows(Scratch, Parts),
    /// A split's colour and key, and a cell for the new group's board. The cell is used if this rank leads the new
    /// group.
    Split { color: usize, key: usize, board: OnceLock<Arc<Board>> },
}

/// What a rank posts for one round.
#[derive(Debug)]
pub(super) struct Post {
    pub call: Call,
    pub payload: Payload,
}

#[derive(Debug, Default)]
struct State {
    posts: Vec<Option<Arc<Post>>>,
    /// Ranks that have ended the round.
    ended: Vec<bool>,
    /// Ranks that have dropped their communicator.
    left: Vec<bool>,
}

/// The part of a group that its ranks share.
#[derive(Debug)]
pub(super) struct Board {
    /// The group's ranks, numbered as in the world.
    members: Vec<usize>,
    pub world: Arc<World>,
    state: Mutex<State>,
    changed: Condvar,
}

impl Board {
    pub fn new(world: &Arc<World>, members: Vec<usize>) -> Arc<Self> {
        let n = members.len();
        let state = State { posts: vec![None; n], ended: vec![false; n], left: vec![false; n] };
        let changed = Condvar::new();
        let board = Arc::new(Self { members, world: world.clone(), state: Mutex::new(state), changed });
        let waiting: Arc<dyn Waiting> = board.clone();
        world.register(Arc::downgrade(&waiting));
        board
    }

    pub fn size(&self) -> usize {
        self.members.len()
    }

    /// The world rank of a member.
    pub fn world_rank(&self, rank: usize) -> usize {
        self.members.get(rank).copied().unwrap_or(rank)
    }

    /// "rank 1" or "ranks 1 and 2", with world ranks in addition if those differ.
    pub fn label(&self, ranks: &[usize]) -> String {
        label(ranks, &self.members)
    }

    /// Waits until this rank's slot is free, which means that all ranks have ended the previous round.
    pub fn begin(&self, rank: usize, op: Op) -> Outcome<()> {
        if self.world.failure().is_some() {
            return Err(Stop::Failed);
        }
        let free = |state: &State| matches!(state.posts.get(rank), Some(None)).then_some(());
        self.wait(op, "to end the collective before", free, |state, r| !state.ended[r])
    }

    /// Posts this rank's data, and waits for every rank's post. Call [`begin`](Self::begin) first.
    pub fn exchange(&self, rank: usize, post: Post) -> Outcome<Vec<Arc<Post>>> {
        let op = post.call.op;
        {
            let mut state = lock(&self.state);
            if let Some(slot) = state.posts.get_mut(rank) {
                *slot = Some(Arc::new(post));
            }
            if state.posts.iter().all(Option::is_some) {
                self.changed.notify_all();
            }
        }
        // A complete round is returned even if the world has failed, so that either all ranks get this far or none.
        let all = |state: &State| state.posts.iter().cloned().collect::<Option<Vec<_>>>();
        self.wait(op, "for", all, |state, r| state.posts[r].is_none())
    }

    /// Ends the round for this rank. The caller must have dropped the posts that `exchange` returned.
    pub fn end(&self, rank: usize) {
        let mut state = lock(&self.state);
        if let Some(ended) = state.ended.get_mut(rank) {
            *ended = true;
        }
        if state.ended.iter().all(|&e| e) {
            // This happens under the lock, so that scratch memory is back in its workspace before the next round.
            state.posts.fill(None);
            state.ended.fill(false);
            self.changed.notify_all();
        }
    }

    /// Notes that this rank's communicator was dropped.
    pub fn leave(&self, rank: usize) {
        let mut state = lock(&self.state);
        if let Some(left) = state.left.get_mut(rank) {
            *left = true;
        }
        self.changed.notify_all();
    }

    /// Waits until `ready` returns a value. `absent` tells which ranks are missing.
    fn wait<T>(
        &self,
        op: Op,
        why: &str,
        ready: impl Fn(&State) -> Option<T>,
        absent: impl Fn(&State, usize) -> bool,
    ) -> Outcome<T> {
        let (failed, label) = (|| self.world.failure().is_some(), |ranks: &[usize]| self.label(ranks));
        let wait = Wait { op, why, timeout: self.world.timeout, failed: &failed, label: &label };
        wait.until(
            (&self.state, &self.changed),
            |state| ready(state),
            |state| {
                let missing: Vec<usize> = (0..self.size()).filter(|&r| absent(state, r)).collect();
                let gone = missing.iter().copied().filter(|&r| state.left[r]).collect();
                Absent { missing, gone }
            },
        )
    }
}

impl Waiting for Board {
    fn wake(&self) {
        // The lock is taken first, so that no rank can miss this between its check and its sleep.
        let _state = lock(&self.state);
        self.changed.notify_all();
    }
}
