//! Collectives as rounds. In a round every rank says which collective it calls, gives the other ranks the data that
//! they need, takes the data that they gave, compares all calls, and reads the data.
//!
//! [`Rounds`] is the part that differs between ranks of one process and ranks of several processes: how calls and data
//! reach the other ranks. The collectives ([`collectives`]), the waiting ([`wait`]) and the failures are the same for
//! both. Once a rank has received everything of a round, the outcome no longer depends on what the others do: all ranks
//! find the same agreement or disagreement, and combine the same data in the same order.

mod collectives;
pub(crate) mod wait;

use std::fmt::Debug;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

use candle_core::{Error, Result};
use moe_kernels::{Exec, Scratch, View};

use crate::call::{Call, Op, disagreement};
use crate::check::Place;
use crate::communicator::Communicator;
use crate::error::{CommError, plain};
use wait::{Outcome, Stop};

/// Copies host rows into scratch memory of the workspace, which other threads may read.
pub(crate) fn copied(rows: View, ex: &Exec) -> Result<Scratch> {
    let mut scratch = ex.scratch(rows.dtype(), rows.dims())?;
    scratch.view_mut().copy_from(rows)?;
    Ok(scratch)
}

/// The data that a rank gives to the others in one round.
pub(crate) enum Give<'a> {
    /// No data.
    Nothing,
    /// Rows, and which rank needs which of them.
    Rows(View<'a>, Parts),
    /// A split's colour and key.
    Split { color: usize, key: usize },
}

/// Which of the given rows each rank needs.
#[derive(Clone, Debug)]
pub(crate) enum Parts {
    /// Every rank needs all rows.
    Whole,
    /// The rows that each rank needs.
    Each(Vec<Range<usize>>),
}

impl Parts {
    /// The rows of `view` that are for rank `to`.
    pub fn of<'a>(&self, view: View<'a>, to: usize) -> Result<View<'a>> {
        match self {
            Self::Whole => Ok(view),
            Self::Each(ranges) => match ranges.get(to) {
                Some(range) => view.narrow(range.start, range.len()),
                None => candle_core::bail!("rank {to} has no part of {} parts", ranges.len()),
            },
        }
    }
}

/// The data of all ranks in one round, this rank included.
pub(crate) trait Posts {
    /// The call of every rank, in rank order.
    fn calls(&self) -> Vec<&Call>;
    /// The rows that a rank gave this one.
    fn rows(&self, from: usize) -> Result<View<'_>>;
    /// Colour and key that a rank passed to a split.
    fn split(&self, from: usize) -> Result<(usize, usize)>;
}

/// One rank of a group, with the operations that the collectives need.
pub(crate) trait Rounds: Debug + Send + Sync + Sized + 'static {
    type Posts: Posts;

    fn place(&self) -> Place;

    /// This lock is held during a call: a rank is in one collective at a time.
    fn turn(&self) -> &Mutex<()>;

    /// Gives this rank's call and data, and waits for the calls and data of the other ranks.
    fn exchange(&self, call: Call, give: Give<'_>, ex: &Exec) -> Outcome<Self::Posts>;

    /// Ends the round for this rank.
    fn end(&self, posts: Self::Posts);

    /// Makes this rank's communicator of a new group. `members` are ranks of this group in the new order, `own` is this
    /// rank's index among them.
    fn join(&self, posts: &Self::Posts, members: &[usize], own: usize) -> Result<Arc<dyn Communicator>>;

    /// "rank 1" or "ranks 1 and 2", with world ranks in addition if those differ.
    fn label(&self, ranks: &[usize]) -> String;

    /// Fails the world, unless it has failed before.
    fn fail(&self, cause: String);

    /// Fails the world because a collective failed. A world that goes on without a rank may end its generation instead.
    fn give_up(&self, cause: String) {
        self.fail(cause);
    }

    /// The world's first failure.
    fn failure(&self) -> Option<&str>;

    /// This rank's name.
    fn name(&self) -> String {
        self.label(&[self.place().rank])
    }

    /// The world's failure as an error of this rank.
    fn error(&self, context: &str) -> Error {
        let name = self.name();
        let size = self.place().size;
        let cause = self.failure().unwrap_or("unknown failure");
        CommError(format!("{context}{name} of {size}: {cause}")).into()
    }

    /// Enters a round with `call`. Any failure fails the world.
    fn enter(&self, op: Op, call: Result<Call>, give: Give<'_>, ex: &Exec) -> Result<Round<'_, Self>> {
        self.try_enter(op, call, give, ex).map_err(|stop| self.stopped(op, stop))
    }

    fn try_enter(&self, op: Op, call: Result<Call>, give: Give<'_>, ex: &Exec) -> Outcome<Round<'_, Self>> {
        let turn = match self.turn().try_lock() {
            Ok(turn) => turn,
            Err(TryLockError::Poisoned(turn)) => turn.into_inner(),
            Err(TryLockError::WouldBlock) => {
                let name = self.name();
                return Err(Stop::Cause(format!(
                    "{name} called {op} while another of its threads was in a collective"
                )));
            }
        };
        let call = call.map_err(|e| self.local(&e))?;
        let posts = self.exchange(call, give, ex)?;
        match disagreement(&posts.calls(), |ranks| self.label(ranks)) {
            Some(cause) => Err(Stop::Cause(cause)),
            None => Ok(Round { group: self, op, posts, _turn: turn }),
        }
    }

    /// An error that happened on this rank alone.
    fn local(&self, e: &Error) -> Stop {
        Stop::Cause(format!("{} failed: {}", self.name(), plain(e)))
    }

    fn stopped(&self, op: Op, stop: Stop) -> Error {
        if let Stop::Cause(cause) = stop {
            self.give_up(cause);
        }
        self.error(&format!("{op} on "))
    }
}

/// A round that all ranks have entered and agree on.
pub(crate) struct Round<'g, G: Rounds> {
    group: &'g G,
    op: Op,
    posts: G::Posts,
    _turn: MutexGuard<'g, ()>,
}

impl<G: Rounds> Round<'_, G> {
    /// Reads what this rank needs, and ends the round.
    pub fn read<R>(self, read: impl FnOnce(&G::Posts) -> Result<R>) -> Result<R> {
        let value = read(&self.posts);
        let value = value.map_err(|e| self.group.stopped(self.op, self.group.local(&e)))?;
        self.group.end(self.posts);
        Ok(value)
    }
}

/// "rank 1" or "ranks 1 and 2", with world ranks in addition if those differ; `members` are the group's ranks, numbered
/// as in the world.
pub(crate) fn label(ranks: &[usize], members: &[usize]) -> String {
    let names: Vec<String> = ranks
        .iter()
        .map(|&rank| match members.get(rank) {
            Some(&world) if world != rank => format!("{rank} (world rank {world})"),
            _ => rank.to_string(),
        })
        .collect();
    match &names[..] {
        [one] => format!("rank {one}"),
        [head @ .., last] => format!("ranks {} and {last}", head.join(", ")),
        [] => "no rank".to_string(),
    }
}

/// The text of another process, made safe for a terminal: without control characters, and of limited length.
pub(crate) fn foreign(text: &str) -> String {
    const MOST: usize = 4000;
    let shown = text.chars().take(MOST).map(|c| if c.is_control() { ' ' } else { c });
    shown.chain((text.chars().count() > MOST).then_some('…')).collect()
}
