//! The engines of the other data-parallel ranks, to which the process of the first rank sends questions. They are
//! threads of that process or other processes. Both answer the same questions in the same loop ([`answer_all`]).

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::JoinHandle;

use moe_comm::Messages;

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
    /// In other processes: their numbers in the world.
    Processes { messages: Messages, ranks: Vec<usize> },
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

    /// The number of peers.
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

    /// Sends a question to a peer, without waiting for the answer.
    ///
    /// # Errors
    /// The peer has ended.
    pub(super) fn tell(&self, peer: usize, question: Question) -> Result<()> {
        match self {
            Self::Threads { threads, .. } => threads[peer].tell(question),
            Self::Processes { messages, ranks } => Ok(messages.send(ranks[peer], &encode(&question)?)?),
        }
    }

    /// The next reply of any peer, with its number. It is `None` if there is no reply and `wait` is false, or if there
    /// are no peers.
    ///
    /// # Errors
    /// A peer has failed or ended.
    pub(super) fn next(&self, wait: bool) -> Result<Option<(usize, Reply)>> {
        if self.is_empty() {
            return Ok(None);
        }
        match self {
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
                Ok(Some((peer, reply)))
            }
            Self::Processes { messages, ranks } => {
                let news = match wait {
                    true => Some(messages.recv_any(ranks)?),
                    false => messages.try_recv_any(ranks)?,
                };
                let Some((rank, message)) = news else { return Ok(None) };
                let message = message.with_context(|| format!("rank {rank} has left"))?;
                let peer = ranks.iter().position(|&other| other == rank);
                let reply = decode(&message).with_context(|| format!("rank {rank}"))?;
                Ok(Some((peer.context("a message of a rank that leads no group")?, reply)))
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
        let Self::Processes { ranks, .. } = self else { return };
        // When the peers have ended, no message of this engine is on its way, and another engine can start. If the
        // world has failed, the peers have ended.
        let told = (0..ranks.len()).try_for_each(|peer| self.tell(peer, Question::End));
        let mut left = if told.is_ok() { self.len() } else { 0 };
        while left > 0
            && let Ok(Some((_, reply))) = self.next(true)
        {
            left -= usize::from(matches!(reply, Reply::Ended));
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
mod tests {
    use std::sync::Mutex;
    use std::time::Duration;

    use model_runtime::{
        CausalLm, Exec, KvCache, LogitsOut, ModelInfo, Observer, StepContext, StepViews, ViewMut,
    };
    use moe_comm::{Collectives, Communicator, ReduceOp, SocketComm, ThreadComm};

    use super::super::serve::Stepped;
    use super::*;
    use crate::engine::{DpEngine, Output, Request, step_memory};
    use crate::testing::small_model;

    /// A model whose steps wait for the steps of the other ranks.
    struct Meeting {
        info: ModelInfo,
        world: Arc<dyn Communicator>,
        rows: Mutex<Vec<usize>>,
    }

    impl CausalLm for Meeting {
        fn info(&self) -> &ModelInfo {
            &self.info
        }

        fn forward(
            &self,
            step: &StepViews,
            _: &mut KvCache,
            _: LogitsOut,
            _: Option<&mut dyn Observer>,
            _: &mut StepContext,
            ex: &mut Exec,
        ) -> candle_core::Result<()> {
            let mut ranks = [1f32];
            self.world.all_reduce(ViewMut::new(&mut ranks, &[1])?, ReduceOp::Sum, ex)?;
            assert_eq!(ranks, [3.0]);
            self.rows.lock().unwrap().push(step.num_tokens());
            Ok(())
        }
    }

    /// The error of the next step of rank 0, if its only peer gives this answer.
    fn error_after(answer: impl Fn(Messages) + Send + 'static) -> String {
        let mut world = SocketComm::loopback(2, Duration::from_secs(20)).unwrap();
        let second = world.pop().unwrap();
        let first = world.pop().unwrap();
        let thread = std::thread::spawn(move || {
            let messages = second.messages();
            messages.recv(0).unwrap();
            messages.send(0, &encode(&Reply::Started(64)).unwrap()).unwrap();
            // These messages are the limit and the request.
            (0..2).for_each(|_| drop(messages.recv(0)));
            answer(messages.clone());
            // Waits until rank 0 has noticed the failure.
            let _ = messages.recv(0);
        });
        let messages = first.messages();
        let world = Arc::new(first) as Arc<dyn Communicator>;
        let model = Meeting { info: small_model(64), world: world.clone(), rows: Mutex::default() };
        let config = EngineConfig { kv_cache_memory: Some(1 << 16), ..EngineConfig::default() };
        let first = (&model as &dyn CausalLm, Exec::cpu(), world);
        let mut engine = DpEngine::over_processes(first, (messages, vec![1]), None, &config).unwrap();
        // Rank 0 gets the first request, which ends before the step.
        let ids = [1, 2].map(|token| engine.add(Request::new(vec![token])).unwrap());
        engine.cancel(ids[0]).unwrap();
        let error = (0..50).find_map(|_| engine.step().err()).unwrap();
        drop(engine);
        thread.join().unwrap();
        format!("{error:#}")
    }

    #[test]
    fn a_rank_that_answers_what_cannot_be_is_named() {
        let stepped = |output: Output| {
            Reply::Stepped(Stepped { outputs: vec![output], loads: Vec::new(), idle: false })
        };
        let output = |request: u8| Output {
            request: decode(&[request]).unwrap(),
            choice: 0,
            token_id: Some(1),
            text: String::new(),
            logprobs: None,
            prompt_logprobs: None,
            finish: None,
            routed_experts: None,
            num_cached_tokens: 0,
        };
        let send = |reply: Reply| {
            let reply = encode(&reply).unwrap();
            error_after(move |messages| messages.send(0, &reply).unwrap())
        };
        // The cases: a request of rank 0's own, a request that does not exist, a token that does not exist, an answer
        // to another question.
        for reply in [
            stepped(output(0)),
            stepped(output(7)),
            stepped(Output { token_id: Some(100), ..output(1) }),
            stepped(Output { choice: 1, ..output(1) }),
        ] {
            let error = send(reply);
            assert!(error.contains("rank 1 tells what cannot be"), "{error}");
        }
        assert!(send(Reply::Ended).contains("rank 1 answers another question"));
        let error = error_after(|messages| messages.send(0, &[0xff; 9]).unwrap());
        assert!(error.contains("rank 1") && error.contains("cannot be read"), "{error}");
    }

    #[test]
    fn ranks_in_lockstep_run_their_largest_step_at_once_before_they_have_engines() {
        let info = small_model(64);
        let worlds = ThreadComm::world(3).into_iter().map(|comm| Arc::new(comm) as Arc<dyn Communicator>);
        let models: Vec<_> = worlds
            .map(|world| Arc::new(Meeting { info: info.clone(), world, rows: Mutex::default() }))
            .collect();
        let replica = |rank: usize| {
            let model = models[rank].clone();
            let world = models[rank].world.clone();
            Replica { model, ex: Exec::cpu().with_threads(1).unwrap(), world }
        };
        let peers = Peers::threads(vec![replica(1), replica(2)], None, None).unwrap();
        let config = EngineConfig { lockstep: true, max_num_batched_tokens: 24, ..EngineConfig::default() };
        let own = || step_memory::measure(models[0].as_ref(), &config, &mut Exec::cpu());
        peers.measure(&config, own).unwrap();
        for model in &models {
            assert_eq!(*model.rows.lock().unwrap(), [24]);
        }
        let config = EngineConfig { kv_cache_memory: Some(1 << 16), ..config };
        assert_eq!(peers.start(&config, false, 1000).unwrap(), 64);
    }
}
