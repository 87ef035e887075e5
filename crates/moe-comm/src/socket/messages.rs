//! Messages between two processes of a world, which are independent of its collectives.

use std::sync::Arc;
use std::time::Duration;

use candle_core::{Result, bail};

use crate::error::CommError;
use crate::lock::lock;
use crate::round::wait::{Stop, sleep};
use crate::socket::frame::Outgoing;
use crate::socket::inbox::Inbox;
use crate::socket::world::{Member, World};

/// Messages between this process and others. They keep their order for each pair of ranks. Waiting for a message has no
/// time limit, so that a rank may be idle or busy for hours; the wait ends at once when the world fails. A rank that
/// sends nothing while another waits for it is asked whether it is alive. Its process answers whatever else it is
/// doing. A process that does not answer within the time limit of a collective has stopped, which fails the world.
///
/// Ranks are numbered as in the communicator whose messages these are. If its generation ends, these messages end
/// with an error.
#[derive(Clone, Debug)]
pub struct Messages {
    pub(super) member: Arc<Member>,
    pub(super) generation: usize,
    /// The ranks as ranks of the world.
    pub(super) members: Arc<[usize]>,
}

/// What a rank that waits for messages learns about another rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum News {
    /// The rank has sent this message.
    Message(Vec<u8>),
    /// The rank has left normally.
    Left,
    /// The rank was lost for this reason, and the world goes on ([`SocketComm::survive_replicas`]).
    ///
    /// [`SocketComm::survive_replicas`]: crate::SocketComm::survive_replicas
    Lost(String),
}

impl Messages {
    /// Sends a message to a rank of the world. A rank that has left normally or was lost gets nothing.
    ///
    /// # Errors
    /// The world has failed, or fails because the rank does not read its messages.
    pub fn send(&self, to: usize, message: &[u8]) -> Result<()> {
        let world = self.world();
        world.check(self.generation)?;
        let to = self.in_world(to)?;
        match world.send(to, &Outgoing::Message(self.generation, Vec::new()), message) {
            // What happens to the world after this does not concern the message.
            Ok(()) => return Ok(()),
            Err(Stop::Cause(cause)) => world.lose(to, cause),
            Err(Stop::Failed) => {}
        }
        world.check(self.generation)
    }

    fn world(&self) -> &World {
        &self.member.0
    }

    fn in_world(&self, rank: usize) -> Result<usize> {
        match self.members.get(rank) {
            Some(&rank) => Ok(rank),
            None => bail!("there is no rank {rank} of {}", self.members.len()),
        }
    }

    /// The next message of a rank of the world; `None` once the rank has left normally. One thread at a time may wait
    /// for a rank.
    ///
    /// # Errors
    /// The world has failed, or the rank was lost.
    pub fn recv(&self, from: usize) -> Result<Option<Vec<u8>>> {
        match self.recv_any(&[from])?.1 {
            News::Message(message) => Ok(Some(message)),
            News::Left => Ok(None),
            News::Lost(why) => Err(CommError(why).into()),
        }
    }

    /// The next message of any of these ranks, with its sender, or the end of one of them. `from` has at least one
    /// rank. All messages of a rank come before its end, except what arrives after another rank has reported that it is
    /// lost. Its end comes again in each call that names the rank.
    ///
    /// # Errors
    /// The world has failed.
    pub fn recv_any(&self, from: &[usize]) -> Result<(usize, News)> {
        let world = self.world();
        loop {
            {
                let mut inbox = lock(&world.inbox);
                if let Some(news) = self.next(&mut inbox, from)? {
                    return Ok(news);
                }
                drop(sleep(&world.changed, inbox, world.look_interval()));
            }
            self.look_after(from)?;
        }
    }

    /// Like [`recv_any`](Self::recv_any), without waiting: it returns `None` if nothing has arrived. Call it repeatedly
    /// while something is expected of these ranks.
    ///
    /// # Errors
    /// The world has failed.
    pub fn try_recv_any(&self, from: &[usize]) -> Result<Option<(usize, News)>> {
        if let Some(news) = self.next(&mut lock(&self.world().inbox), from)? {
            return Ok(Some(news));
        }
        self.look_after(from)?;
        self.world().check(self.generation)?;
        Ok(None)
    }

    /// Whether a rank of the world was lost, in any generation.
    pub fn some_are_lost(&self) -> bool {
        lock(&self.world().inbox).some_are_lost()
    }

    /// Whether this rank of the world was lost, in any generation; it is numbered as in the first one.
    pub fn is_lost(&self, rank: usize) -> bool {
        lock(&self.world().inbox).why_lost(rank).is_some()
    }

    fn look_after(&self, ranks: &[usize]) -> Result<()> {
        let ranks = ranks.iter().map(|&rank| self.in_world(rank)).collect::<Result<Vec<_>>>()?;
        self.world().look_after(&ranks);
        Ok(())
    }

    /// The next item from these ranks. Messages come first, even if their rank has left or the world has failed.
    fn next(&self, inbox: &mut Inbox, from: &[usize]) -> Result<Option<(usize, News)>> {
        for &rank in from {
            if let Some(message) = inbox.take_message(self.in_world(rank)?, self.generation) {
                return Ok(Some((rank, News::Message(message))));
            }
        }
        self.world().check(self.generation)?;
        let end = |rank: usize| match inbox.why_lost(rank) {
            Some(why) => Some(News::Lost(why.to_string())),
            None => inbox.is_gone(rank).then_some(News::Left),
        };
        Ok(from.iter().find_map(|&rank| Some((rank, end(*self.members.get(rank)?)?))))
    }
}

/// Waits for the end of the world.
#[derive(Debug)]
pub struct Watch(pub(super) Arc<World>);

impl Watch {
    /// Blocks until the world has failed, and returns the reason; `None` if this process left the world normally.
    pub fn wait(&self) -> Option<String> {
        let mut inbox = lock(&self.0.inbox);
        loop {
            if self.0.failure().is_some() {
                return Some(self.0.report());
            }
            if inbox.over {
                return None;
            }
            inbox = sleep(&self.0.changed, inbox, Duration::MAX);
        }
    }
}
