//! The ranks of a tensor-parallel group that follow its first rank, as the first rank sees them.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use candle_core::{Error, Result, bail};
use moe_comm::Messages;

use super::step_message::GroupMessage;
use super::wire::encode;

/// The ranks that follow the first rank of their group, as the first rank sees them.
pub(crate) enum Followers {
    /// Threads of this process.
    Threads(Vec<FollowerThread>),
    /// Processes: their numbers in the world.
    Processes(Messages, Vec<usize>),
}

impl Followers {
    /// There is no other rank.
    pub fn nobody() -> Self {
        Self::Threads(Vec::new())
    }

    /// Whether this rank leads any other rank.
    pub(super) fn is_somebody(&self) -> bool {
        match self {
            Self::Threads(threads) => !threads.is_empty(),
            Self::Processes(_, ranks) => !ranks.is_empty(),
        }
    }

    /// Sends a message to all of them. The collectives that follow show whether they carry it out.
    pub(super) fn tell(&self, message: GroupMessage) -> Result<()> {
        match self {
            Self::Threads(threads) if !threads.is_empty() => {
                let message = Arc::new(message.into_owned());
                threads.iter().try_for_each(|thread| thread.tell(message.clone()))
            }
            Self::Processes(messages, ranks) if !ranks.is_empty() => {
                let message = encode(&message).map_err(Error::wrap)?;
                ranks.iter().try_for_each(|&rank| messages.send(rank, &message))
            }
            _ => Ok(()),
        }
    }
}

/// A rank that follows on a thread, which ends when this object is dropped.
pub(crate) struct FollowerThread {
    rank: usize,
    steps: Option<Sender<Arc<GroupMessage<'static>>>>,
    thread: Option<JoinHandle<()>>,
}

impl FollowerThread {
    /// Starts a thread that carries out messages until there are no more.
    pub(super) fn start(
        rank: usize,
        follow: impl FnOnce(Receiver<Arc<GroupMessage<'static>>>) + Send + 'static,
    ) -> Result<Self> {
        let (steps, told) = channel::<Arc<GroupMessage>>();
        let thread = std::thread::Builder::new().name(format!("rank {rank}")).spawn(move || follow(told))?;
        Ok(Self { rank, steps: Some(steps), thread: Some(thread) })
    }

    fn tell(&self, message: Arc<GroupMessage<'static>>) -> Result<()> {
        match self.steps.as_ref().map(|steps| steps.send(message)) {
            Some(Ok(())) => Ok(()),
            _ => bail!("the thread of rank {} has ended", self.rank),
        }
    }
}

impl Drop for FollowerThread {
    fn drop(&mut self) {
        self.steps = None;
        if let Some(thread) = self.thread.take() {
            // The thread has caught its own panics.
            let _ = thread.join();
        }
    }
}
