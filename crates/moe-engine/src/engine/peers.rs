//! The engines of the other data-parallel ranks, to which the process of the first rank sends questions. They are
//! threads of that process or other processes. Both answer the same questions in the same loop ([`answer_all`]).

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::JoinHandle;

use moe_comm::{Messages, News};

use super::serve::{Next, Question, Reply, answer_all};
use super::{EngineConfig, Texts};
use crate::error::{Context, Result, bail, failed};
use crate::panic_text;
use crate::parallel::Replica;
use crate::parallel::wire::{decode, encode};
use crate::structured::Grammars;
use crate::tokenizer::Tokenizer;

/// The other ranks' engines, numbered from 0. Dropping this waits for the steps that they are running, and ends the
/// engines.
pub(crate) enum Peers {
    /// On threads of this process.
    Threads {
        threads: Vec<PeerThread>,
        /// Their replies, with the number of the peer.
        replies: Receiver<(usize, Result<Reply>)>,
    },
    /// In other processes.
    Processes {
        messages: Messages,
        /// Their numbers in the world.
        ranks: Vec<usize>,
        /// The ranks among them that were not lost.
        live: Vec<usize>,
    },
}

/// What comes from a peer.
pub(super) enum Heard {
    Reply(Reply),
    /// The peer was lost for this reason. It tells nothing else.
    Lost(String),
}

impl Peers {
    /// Starts a thread for each replica.
    pub(super) fn threads(
        replicas: Vec<Replica>,
        tokenizer: Option<&Tokenizer>,
        grammars: Option<&Arc<Grammars>>,
    ) -> Result<Self> {
        let (send, replies) = channel();
        let mut threads = Vec::with_capacity(replicas.len());
        for (peer, replica) in replicas.into_iter().enumerate() {
            let texts = (tokenizer.cloned(), grammars.cloned());
            threads.push(PeerThread::start(peer, replica, texts, send.clone())?);
        }
        Ok(Self::Threads { threads, replies })
    }

    /// The peers in these processes of the world.
    pub(super) fn processes(messages: Messages, ranks: Vec<usize>) -> Self {
        Self::Processes { messages, live: ranks.clone(), ranks }
    }

    /// The number of peers, including the ones that were lost.
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Threads { threads, .. } => threads.len(),
            Self::Processes { ranks, .. } => ranks.len(),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The number of a peer in the world.
    pub(super) fn rank(&self, peer: usize) -> usize {
        match self {
            Self::Threads { threads, .. } => threads[peer].rank,
            Self::Processes { ranks, .. } => ranks[peer],
        }
    }

    /// The peers that were not lost.
    pub(super) fn live(&self) -> Vec<usize> {
        let is_live = |&peer: &usize| match self {
            Self::Threads { .. } => true,
            Self::Processes { ranks, live, .. } => live.contains(&ranks[peer]),
        };
        (0..self.len()).filter(is_live).collect()
    }

    /// Expects nothing more of a peer that was lost.
    pub(super) fn forget(&mut self, peer: usize) {
        if let Self::Processes { ranks, live, .. } = self {
            live.retain(|rank| *rank != ranks[peer]);
        }
    }

    /// Sends a question to a peer, without waiting for the answer.
    ///
    /// # Errors
    /// The peer has ended.
    pub(super) fn tell(&self, peer: usize, question: Question) -> Result<()> {
        match self {
            Self::Threads { threads, .. } => threads[peer].tell(question),
            Self::Processes { messages, ranks, .. } => Ok(messages.send(ranks[peer], &encode(&question)?)?),
        }
    }

    /// The next reply of any peer, with its number. It is `None` if there is no reply and `wait` is false, or if there
    /// are no peers.
    ///
    /// # Errors
    /// A peer has failed or ended, or was lost.
    pub(super) fn next(&self, wait: bool) -> Result<Option<(usize, Reply)>> {
        match self.hear(wait)? {
            Some((peer, Heard::Reply(reply))) => Ok(Some((peer, reply))),
            Some((_, Heard::Lost(why))) => bail!("{why}"),
            None => Ok(None),
        }
    }

    /// Like [`next`](Self::next), where a peer may be lost.
    ///
    /// # Errors
    /// A peer has failed or ended.
    pub(super) fn hear(&self, wait: bool) -> Result<Option<(usize, Heard)>> {
        match self {
            Self::Threads { threads, .. } if threads.is_empty() => Ok(None),
            Self::Threads { replies, .. } => {
                let reply = match wait {
                    true => replies.recv().map_err(|_| TryRecvError::Disconnected),
                    false => replies.try_recv(),
                };
                let (peer, reply) = match reply {
                    Ok(reply) => reply,
                    Err(TryRecvError::Empty) => return Ok(None),
                    Err(TryRecvError::Disconnected) => bail!("the threads of the other ranks have ended"),
                };
                let reply = reply.with_context(|| format!("rank {}", self.rank(peer)))?;
                Ok(Some((peer, Heard::Reply(reply))))
            }
            Self::Processes { live, .. } if live.is_empty() => Ok(None),
            Self::Processes { messages, ranks, live } => {
                let news = match wait {
                    true => Some(messages.recv_any(live)?),
                    false => messages.try_recv_any(live)?,
                };
                let Some((rank, news)) = news else { return Ok(None) };
                let heard = match news {
                    News::Message(message) => {
                        Heard::Reply(decode(&message).with_context(|| format!("rank {rank}"))?)
                    }
                    News::Lost(why) => Heard::Lost(why),
                    News::Left => bail!("rank {rank} has left"),
                };
                let peer = ranks.iter().position(|&other| other == rank);
                Ok(Some((peer.context("a message of a rank that leads no group")?, heard)))
            }
        }
    }

    /// Makes an engine on each peer, one after the other, because each takes a share of the remaining memory. Returns
    /// the length of the longest sequence that all of them can hold, at most `max_model_len`.
    ///
    /// # Errors
    /// Settings that do not fit the model or a rank's machine.
    pub(super) fn start(&self, config: &EngineConfig, text: bool, max_model_len: usize) -> Result<usize> {
        let mut shortest = max_model_len;
        for peer in 0..self.len() {
            self.tell(peer, Question::Start(Box::new(config.clone()), text))?;
            match self.next(true)? {
                Some((_, Reply::Started(held @ 1..))) => shortest = shortest.min(held),
                Some((_, Reply::Refused(why))) => bail!("rank {}: {why}", self.rank(peer)),
                _ => return Err(self.unasked(peer)),
            }
        }
        (0..self.len()).try_for_each(|peer| self.tell(peer, Question::Limit(shortest)))?;
        Ok(shortest)
    }

    /// Makes each peer run the largest step at the same time as `own`, the first rank's. Each peer stores the size that
    /// a KV cache may have then, for its next engine. Returns the result of `own`.
    ///
    /// # Errors
    /// The step does not fit a rank's memory.
    pub(super) fn measure<T>(&self, config: &EngineConfig, own: impl FnOnce() -> Result<T>) -> Result<T> {
        (0..self.len()).try_for_each(|peer| self.tell(peer, Question::Measure(Box::new(config.clone()))))?;
        let measured = own()?;
        for _ in 0..self.len() {
            match self.next(true)? {
                Some((_, Reply::Measured)) => {}
                Some((peer, _)) => return Err(self.unasked(peer)),
                None => bail!("no rank answers"),
            }
        }
        Ok(measured)
    }

    pub(super) fn unasked(&self, peer: usize) -> crate::error::Error {
        failed!("rank {} answers another question", self.rank(peer))
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        if let Self::Threads { .. } = self {
            return;
        }
        // When the peers have ended, no message of this engine is on its way, and another engine can start. If the
        // world has failed, the peers have ended.
        if self.live().into_iter().try_for_each(|peer| self.tell(peer, Question::End)).is_err() {
            return;
        }
        let mut left = self.live().len();
        while left > 0
            && let Ok(Some((peer, heard))) = self.hear(true)
        {
            if let Heard::Lost(_) = heard {
                self.forget(peer);
            }
            left -= usize::from(matches!(heard, Heard::Lost(_) | Heard::Reply(Reply::Ended)));
        }
    }
}

/// The engine of a rank on a thread, which ends when this object is dropped.
pub(crate) struct PeerThread {
    rank: usize,
    questions: Option<Sender<Question>>,
    thread: Option<JoinHandle<()>>,
}

impl PeerThread {
    fn start(
        peer: usize,
        replica: Replica,
        texts: Texts,
        replies: Sender<(usize, Result<Reply>)>,
    ) -> Result<Self> {
        let rank = replica.world.rank();
        let (questions, asked) = channel();
        let run = move || {
            let world = replica.world.clone();
            let serve = || serve(&replica, &texts, &asked, |reply| drop(replies.send((peer, Ok(reply)))));
            let panicked = |panic: Box<dyn Any + Send>| Err(failed!("it panicked: {}", panic_text(&*panic)));
            if let Err(e) = catch_unwind(AssertUnwindSafe(serve)).unwrap_or_else(panicked) {
                world.abort(&format!("{e:#}"));
                // The receiver may already be gone.
                let _ = replies.send((peer, Err(e)));
            }
        };
        let thread = std::thread::Builder::new().name(format!("rank {rank}")).spawn(run);
        let thread = thread.context("cannot start a thread")?;
        Ok(Self { rank, questions: Some(questions), thread: Some(thread) })
    }

    fn tell(&self, question: Question) -> Result<()> {
        match self.questions.as_ref().map(|questions| questions.send(question)) {
            Some(Ok(())) => Ok(()),
            _ => bail!("the thread of rank {} has ended", self.rank),
        }
    }
}

impl Drop for PeerThread {
    fn drop(&mut self) {
        self.questions = None;
        if let Some(thread) = self.thread.take() {
            // The thread has caught its own panics.
            let _ = thread.join();
        }
    }
}

/// Answers the questions of the first rank's thread until that thread drops its channel.
fn serve(replica: &Replica, texts: &Texts, asked: &Receiver<Question>, reply: impl Fn(Reply)) -> Result<()> {
    let next = |wait: bool| {
        let question = match wait {
            true => asked.recv().map_err(|_| TryRecvError::Disconnected),
            false => asked.try_recv(),
        };
        Ok(match question {
            Ok(question) => Next::Answer(question),
            Err(TryRecvError::Empty) => Next::Nothing,
            Err(TryRecvError::Disconnected) => Next::Stop,
        })
    };
    answer_all(
        (replica.model.as_ref(), &replica.ex),
        |_| Ok(texts.clone()),
        next,
        |news| {
            reply(news);
            Ok(())
        },
    )
}

#[cfg(test)]
#[path = "peers_tests.rs"]
mod tests;
