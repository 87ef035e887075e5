//! Messages between two processes of a world, which are independent of its collectives.

use std::sync::Arc;
use std::time::Duration;

use candle_core::Result;

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

impl Messages {
    /// Sends a message to a rank of the world. A rank that has left normally gets nothing.
    ///
    /// # Errors
    /// The world has failed, or the rank does not read its messages.
    pub fn send(&self, to: usize, message: &[u8]) -> Result<()> {
        let world = &self.0.0;
        if world.failure().is_some() {
            return Err(world.error());
        }
        world.send(to, &Outgoing::Message(Vec::new()), message).map_err(|stop| {
            if let Stop::Cause(cause) = stop {
                world.fail(cause);
            }
            world.error()
        })
    }

    /// The next message of a rank of the world; `None` once the rank has left normally. One thread at a time may wait
    /// for a rank.
    ///
    /// # Errors
    /// The world has failed.
    pub fn recv(&self, from: usize) -> Result<Option<Vec<u8>>> {
        self.recv_any(&[from]).map(|(_, message)| message)
    }

    /// The next message of any of these ranks, with its sender. `from` has at least one rank. Once one of the ranks has
    /// left normally, its message is `None`.
    ///
    /// # Errors
    /// The world has failed.
    pub fn recv_any(&self, from: &[usize]) -> Result<(usize, Option<Vec<u8>>)> {
        let world = &self.0.0;
        loop {
            {
                let mut inbox = lock(&world.inbox);
                if let Some(news) = world.next(&mut inbox, from)? {
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
    pub fn try_recv_any(&self, from: &[usize]) -> Result<Option<(usize, Option<Vec<u8>>)>> {
        let world = &self.0.0;
        if let Some(news) = world.next(&mut lock(&world.inbox), from)? {
            return Ok(Some(news));
        }
        self.look_after(from)?;
        Ok(None)
    }

    fn look_after(&self, ranks: &[usize]) -> Result<()> {
        let world = &self.0.0;
        world.look_after(ranks).map_err(|stop| {
            if let Stop::Cause(cause) = stop {
                world.fail(cause);
            }
            world.error()
        })
    }
}

impl World {
    /// The next item from these ranks. Messages come first, even if their rank has left or the world has failed.
    fn next(&self, inbox: &mut Inbox, from: &[usize]) -> Result<Option<(usize, Option<Vec<u8>>)>> {
        if let Some(news) = from.iter().find_map(|&rank| inbox.take_message(rank).map(|m| (rank, Some(m)))) {
            return Ok(Some(news));
        }
        if self.failure().is_some() {
            return Err(self.error());
        }
        Ok(from.iter().find(|&&rank| inbox.is_gone(rank)).map(|&rank| (rank, None)))
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
