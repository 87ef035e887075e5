//! Messages between two processes of a world, which are independent of its collectives.

use std::sync::Arc;
use std::time::Duration;

use candle_core::Result;

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
#[derive(Clone, Debug)]
pub struct Messages(pub(super) Arc<Member>);

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
        let world = &self.0.0;
        world.check()?;
        match world.send(to, &Outgoing::Message(Vec::new()), message) {
            // What happens to the world after this does not concern the message.
            Ok(()) => return Ok(()),
            Err(Stop::Cause(cause)) => world.lose(to, cause),
            Err(Stop::Failed) => {}
        }
        world.check()
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
    /// rank. All messages of a rank come before its end, and its end comes again in each call that names the rank.
    ///
    /// # Errors
    /// The world has failed.
    pub fn recv_any(&self, from: &[usize]) -> Result<(usize, News)> {
        let world = &self.0.0;
        loop {
            {
                let mut inbox = lock(&world.inbox);
                if let Some(news) = world.next(&mut inbox, from)? {
                    return Ok(news);
                }
                drop(sleep(&world.changed, inbox, world.look_interval()));
            }
            world.look_after(from);
        }
    }

    /// Like [`recv_any`](Self::recv_any), without waiting: it returns `None` if nothing has arrived. Call it repeatedly
    /// while something is expected of these ranks.
    ///
    /// # Errors
    /// The world has failed.
    pub fn try_recv_any(&self, from: &[usize]) -> Result<Option<(usize, News)>> {
        let world = &self.0.0;
        if let Some(news) = world.next(&mut lock(&world.inbox), from)? {
            return Ok(Some(news));
        }
        world.look_after(from);
        world.check()?;
        Ok(None)
    }

    /// Whether a rank of the world was lost.
    pub fn some_are_lost(&self) -> bool {
        lock(&self.0.0.inbox).some_are_lost()
    }

    /// Whether this rank of the world was lost.
    pub fn is_lost(&self, rank: usize) -> bool {
        lock(&self.0.0.inbox).why_lost(rank).is_some()
    }
}

impl World {
    /// The next item from these ranks. Messages come first, even if their rank has left or the world has failed.
    fn next(&self, inbox: &mut Inbox, from: &[usize]) -> Result<Option<(usize, News)>> {
        let mut ranks = from.iter();
        if let Some((rank, message)) = ranks.find_map(|&rank| Some((rank, inbox.take_message(rank)?))) {
            return Ok(Some((rank, News::Message(message))));
        }
        self.check()?;
        let end = |rank: usize| match inbox.why_lost(rank) {
            Some(why) => Some(News::Lost(why.to_string())),
            None => inbox.is_gone(rank).then_some(News::Left),
        };
        Ok(from.iter().find_map(|&rank| Some((rank, end(rank)?))))
    }

    /// Fails if the world has failed.
    fn check(&self) -> Result<()> {
        self.failure().map_or(Ok(()), |_| Err(self.error()))
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
