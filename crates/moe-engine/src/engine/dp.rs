//! The engines of all data-parallel ranks as one engine. Requests are distributed by the work that they can reach, and
//! the output of a request does not depend on its rank.
//!
//! Each rank has its own scheduler, prefix cache and KV cache. The steps of the first rank run on the caller's thread,
//! in [`DpEngine::step`]. The other ranks are [`Peers`], on threads or in processes.
//!
//! - With expert parallelism ranks step in lockstep: one without requests runs steps without rows until all are done.
//! - Without it no rank waits for another. Peers run their steps by themselves as long as they have requests, and a
//!   call returns their new outputs together with the outputs of the first rank's step. A world of processes may then
//!   go on without a rank that is lost ([`lost`](super::lost)).

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use model_runtime::{CausalLm, Exec};
use moe_comm::{Communicator, Messages};
use moe_layer::ExpertTraffic;

use super::dispatch::{Assigned, Dispatcher};
use super::peers::{Heard, Peers};
use super::serve::{Question, Reply, Stepped};
use super::{Engine, EngineConfig, Output, Request, RequestError, RequestId, Stats, StepLoad, Texts};
use super::{replies, step_memory};
use crate::eplb::Balancer;
use crate::error::{Context, Result, bail, failed};
use crate::heat::HeatWriter;
use crate::panic_text;
use crate::parallel::{AbortOnPanic, Replica};
use crate::structured::{Grammars, Precompiler};
use crate::tokenizer::Tokenizer;

/// A model, the context in which it runs, and the communicator of all ranks.
type First<'m> = (&'m dyn CausalLm, Exec, Arc<dyn Communicator>);

/// Runs requests on the replicas of a model.
pub struct DpEngine<'m> {
    /// The first rank's engine.
    pub(super) engine: Engine<'m>,
    /// The communicator by which all ranks fail together.
    world: Arc<dyn Communicator>,
    pub(super) peers: Peers,
    pub(super) lockstep: bool,
    pub(super) dispatcher: Dispatcher,
    /// What has arrived from each rank: first the first rank, then the peers.
    pub(super) arrived: Vec<Arrived>,
    /// Why the engine has stopped.
    failure: Option<String>,
    /// Choices whose rank was lost, since they were last taken.
    pub(super) restarted: Vec<(RequestId, usize)>,
    /// Steps of several ranks whose experts were counted.
    pub(super) steps: u64,
    pub(super) step_loads: Vec<StepLoad>,
    pub(super) trace: Option<HeatWriter>,
    pub(super) balancer: Option<Balancer>,
}

/// The data that has arrived from a rank and was not returned yet.
#[derive(Default)]
pub(super) struct Arrived {
    pub outputs: Vec<Output>,
    pub loads: Vec<StepLoad>,
    /// Whether nothing else will come, unless the rank gets a request.
    pub last: bool,
}

impl<'m> DpEngine<'m> {
    /// An engine for one replica and one for each of the `others`, which run on threads. Without a tokenizer outputs
    /// have no text, and stop strings and structured output are refused.
    ///
    /// # Errors
    /// Settings that do not fit the model or the machine.
    pub fn new(
        first: First<'m>,
        others: Vec<Replica>,
        tokenizer: Option<Tokenizer>,
        config: &EngineConfig,
    ) -> Result<Self> {
        let grammars = tokenizer.clone().map(Grammars::new).map(Arc::new);
        let peers = Peers::threads(others, tokenizer.as_ref(), grammars.as_ref())?;
        Self::with_peers(first, peers, (tokenizer, grammars), config)
    }

    /// [`new`](Self::new) where the other replicas are processes, `ranks` of the world.
    pub(crate) fn over_processes(
        first: First<'m>,
        (messages, ranks): (Messages, Vec<usize>),
        tokenizer: Option<Tokenizer>,
        config: &EngineConfig,
    ) -> Result<Self> {
        let grammars = tokenizer.clone().map(Grammars::new).map(Arc::new);
        Self::with_peers(first, Peers::processes(messages, ranks), (tokenizer, grammars), config)
    }

    fn with_peers(
        (model, mut ex, world): First<'m>,
        peers: Peers,
        texts: Texts,
        config: &EngineConfig,
    ) -> Result<Self> {
        let text = texts.0.is_some();
        let budget = match config.lockstep {
            false => step_memory::budget(model, config, &mut ex)?,
            true if step_memory::is_tight(model, config, &ex)? => {
                let _guard = AbortOnPanic(world.as_ref());
                let measured = peers.measure(config, || step_memory::measure(model, config, &mut ex));
                // If this rank fails, the others would wait for it in the middle of the step.
                Some(measured.inspect_err(|e| world.abort(&format!("{e:#}")))?)
            }
            true => None,
        };
        let mut engine = Engine::with_budget(model, ex, texts, config, budget)?;
        let balancer = config.eplb.as_ref().map(|eplb| Balancer::new(model, eplb)).transpose()?;
        let max_model_len = peers.start(config, text, engine.max_model_len())?;
        // A request has the same limits on every rank.
        engine.limit(max_model_len);
        let ranks = 1 + peers.len();
        let idle = || Arrived { last: true, ..Arrived::default() };
        Ok(Self {
            engine,
            world,
            peers,
            lockstep: config.lockstep,
            dispatcher: Dispatcher::new(config.scheduling_policy, ranks, config.max_num_seqs, max_model_len),
            arrived: std::iter::repeat_with(idle).take(ranks).collect(),
            failure: None,
            restarted: Vec::new(),
            steps: 0,
            step_loads: Vec::new(),
            balancer,
            trace: config.expert_heat.as_deref().map(HeatWriter::create).transpose()?,
        })
    }

    /// The largest length of a sequence (prompt and output) that every rank can run.
    pub fn max_model_len(&self) -> usize {
        self.dispatcher.max_model_len()
    }

    /// Compiles grammars of structured output ahead of this engine, on a thread of the caller. `program` compiles them
    /// first in a separate process: it is the program of this library, as [`crate::chat::this_program`] returns it, and
    /// calls [`crate::structured::serve`]. `None` without a tokenizer.
    pub fn precompiler(&self, program: PathBuf) -> Option<Precompiler> {
        let (grammars, tokenizer) = self.engine.grammars.clone().zip(self.engine.tokenizer.clone())?;
        Some(Precompiler::new(grammars, tokenizer, program))
    }

    /// Adds a request, or returns why it is refused; then nothing has changed. The request goes to the rank with the
    /// least work as soon as a rank has room.
    pub fn add(&mut self, request: Request) -> Result<RequestId, RequestError> {
        self.engine.check(&request)?;
        Ok(self.dispatcher.add(request))
    }

    /// Ends a request with the output that it has. Its last outputs come with a later step. An unknown or finished
    /// request is ignored.
    pub fn cancel(&mut self, request: RequestId) -> Result<()> {
        self.or_fail(|ranks| ranks.cancel_now(request))
    }

    pub(super) fn cancel_now(&mut self, request: RequestId) -> Result<()> {
        if let Some(assigned) = self.dispatcher.hurry(request) {
            self.give(assigned)?;
        }
        self.dispatcher.cancelled(request);
        match self.dispatcher.rank_of(request) {
            None => Ok(()),
            Some(0) => self.engine.cancel(request),
            Some(rank) => self.peers.tell(rank - 1, Question::Cancel(request)),
        }
    }

    /// Whether a step has failed, so that every further one fails, too.
    pub fn has_failed(&self) -> bool {
        self.failure.is_some()
    }

    /// Whether there is nothing left to run or to report.
    pub fn is_idle(&self) -> bool {
        let told = |rank: &Arrived| rank.last && rank.outputs.is_empty() && rank.loads.is_empty();
        self.dispatcher.is_empty() && self.engine.is_idle() && self.arrived.iter().all(told)
    }

    /// Requests' choices that are waiting or running.
    pub fn num_unfinished(&self) -> usize {
        self.dispatcher.num_unfinished()
    }

    /// Runs a step, and returns the new outputs, rank by rank. In lockstep every rank runs a step. Otherwise the first
    /// rank runs one, if it has requests, and the outputs that the other ranks have finished are returned with it. If
    /// the first rank has nothing to do, the call waits until another rank has finished a step.
    ///
    /// # Errors
    /// Only errors that end all requests: the model cannot run, or a rank died.
    pub fn step(&mut self) -> Result<Vec<Output>> {
        self.or_fail(Self::run_step)
    }

    fn run_step(&mut self) -> Result<Vec<Output>> {
        if !self.lockstep {
            // A rank that has finished a request has room again.
            self.receive(false)?;
        }
        while let Some(assigned) = self.dispatcher.next(Instant::now()) {
            self.give(assigned)?;
        }
        if self.lockstep { self.step_together() } else { self.step_freely() }?;
        let loads = self.keep_loads()?;
        self.balance(&loads)?;
        self.step_loads = loads;
        Ok(self.arrived.iter_mut().flat_map(|rank| std::mem::take(&mut rank.outputs)).collect())
    }

    fn step_together(&mut self) -> Result<()> {
        (0..self.peers.len()).try_for_each(|peer| self.peers.tell(peer, Question::Step))?;
        let stepped = self.run_here(Engine::stepped)?;
        self.arrive(stepped);
        for _ in 0..self.peers.len() {
            match self.hear(true)? {
                Some((peer, Heard::Reply(Reply::Stepped(stepped)))) => self.arrive_from(peer, stepped)?,
                Some((_, Heard::Lost(why))) => bail!("{why}"),
                other => return Err(self.peers.unasked(other.map_or(0, |(peer, _)| peer))),
            }
        }
        Ok(())
    }

    fn step_freely(&mut self) -> Result<()> {
        let has_work = !self.engine.is_idle();
        if has_work {
            let stepped = self.run_here(Engine::stepped)?;
            self.arrive(stepped);
        }
        let others_run = !self.arrived.iter().all(|rank| rank.last);
        let nothing_came = self.arrived.iter().all(|rank| rank.outputs.is_empty());
        self.receive(!has_work && others_run && nothing_came)
    }

    /// Runs this process's part of work that all ranks share. If other ranks take part, a panic ends the run, with the
    /// name of this rank.
    pub(super) fn run_here<T>(&mut self, work: impl FnOnce(&mut Engine<'m>) -> Result<T>) -> Result<T> {
        let guarded = || {
            let _guard = AbortOnPanic(self.world.as_ref());
            work(&mut self.engine)
        };
        if self.peers.is_empty() {
            return guarded();
        }
        let panicked = |panic: Box<dyn Any + Send>| {
            Err(failed!("rank {} panicked: {}", self.world.rank(), panic_text(&*panic)))
        };
        catch_unwind(AssertUnwindSafe(guarded)).unwrap_or_else(panicked)
    }

    /// Runs work in which all ranks take part. An error ends the run permanently on all of them.
    pub(super) fn or_fail<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        if let Some(failure) = &self.failure {
            bail!("{failure}");
        }
        work(self).inspect_err(|e| {
            let text = format!("{e:#}");
            self.world.abort(&text);
            self.failure = Some(text);
        })
    }

    /// Gives a request to its rank.
    fn give(&mut self, Assigned { rank, id, waited, request }: Assigned) -> Result<()> {
        match rank.checked_sub(1) {
            None => self.engine.take(id, waited, *request),
            Some(peer) => {
                self.arrived[rank].last = false;
                self.peers.tell(peer, Question::Add(id, waited, request))?;
            }
        }
        Ok(())
    }

    /// Adds the results of the first rank's step.
    fn arrive(&mut self, mut stepped: Stepped) {
        stepped.outputs.retain(|output| self.dispatcher.report(output));
        self.keep(0, stepped);
    }

    /// Adds a report of a peer.
    ///
    /// # Errors
    /// The report is invalid.
    fn arrive_from(&mut self, peer: usize, mut stepped: Stepped) -> Result<()> {
        let (info, who) =
            (self.engine.info, || format!("rank {} tells what cannot be", self.peers.rank(peer)));
        let mut outputs = Vec::with_capacity(stepped.outputs.len());
        for output in std::mem::take(&mut stepped.outputs) {
            let prompt = self.dispatcher.prompt_of(1 + peer, output.request, output.choice);
            replies::check_output(&output, prompt, info).with_context(who)?;
            outputs.extend(self.dispatcher.report(&output).then_some(output));
        }
        stepped.outputs = outputs;
        stepped.loads.iter().try_for_each(|load| replies::check_load(load, info)).with_context(who)?;
        self.keep(1 + peer, stepped);
        Ok(())
    }

    fn keep(&mut self, rank: usize, stepped: Stepped) {
        let arrived = &mut self.arrived[rank];
        arrived.outputs.extend(stepped.outputs);
        arrived.loads.extend(stepped.loads);
        // The peer may not have seen its latest requests when it sent this.
        arrived.last = stepped.idle && !self.dispatcher.is_busy(rank);
    }

    /// Adds the outputs that peers have finished. With `wait` it waits for the first one, or until a peer is lost.
    fn receive(&mut self, mut wait: bool) -> Result<()> {
        while let Some((peer, heard)) = self.hear(wait)? {
            match heard {
                Heard::Reply(Reply::Stepped(stepped)) => self.arrive_from(peer, stepped)?,
                Heard::Reply(_) => return Err(self.peers.unasked(peer)),
                Heard::Lost(why) => self.lose(peer, &why)?,
            }
            wait = false;
        }
        Ok(())
    }

    /// Asks all peers, and returns their answers with their numbers. Outputs of their steps that arrive in between are
    /// kept. Peers that are lost do not answer.
    pub(super) fn ask_all(&mut self, question: impl Fn() -> Question) -> Result<Vec<(usize, Reply)>> {
        let mut asked = self.peers.live();
        asked.iter().try_for_each(|&peer| self.peers.tell(peer, question()))?;
        self.answers(&mut asked)
    }

    /// The answers of the peers in `asked`, which is empty afterwards.
    pub(super) fn answers(&mut self, asked: &mut Vec<usize>) -> Result<Vec<(usize, Reply)>> {
        let mut answers = Vec::with_capacity(asked.len());
        while !asked.is_empty()
            && let Some((peer, heard)) = self.hear(true)?
        {
            match heard {
                Heard::Reply(Reply::Stepped(stepped)) => {
                    self.arrive_from(peer, stepped)?;
                    continue;
                }
                Heard::Reply(answer) => answers.push((peer, answer)),
                Heard::Lost(why) => self.lose(peer, &why)?,
            }
            asked.retain(|&other| other != peer);
        }
        Ok(answers)
    }

    /// What comes next from a peer. The failure of a peer is reported as the world reports it, with the rank's number.
    fn hear(&self, wait: bool) -> Result<Option<(usize, Heard)>> {
        self.peers.hear(wait).map_err(|e| self.world.check().err().map_or(e, Into::into))
    }

    /// Runs until every request has ended, and passes each output to `on_output`.
    pub fn run(&mut self, mut on_output: impl FnMut(Output)) -> Result<()> {
        while !self.is_idle() {
            self.step()?.into_iter().for_each(&mut on_output);
        }
        Ok(())
    }

    /// Counters and times of all ranks so far, each after the step that it is running. A lost rank takes its counters
    /// with it. If the run has failed, they are the first rank's only, and the next step reports the error.
    pub fn stats(&mut self) -> Stats {
        let mut total = self.engine.stats();
        let answers = self.or_fail(|ranks| {
            ranks
                .ask_all(|| Question::Stats)?
                .into_iter()
                .map(|(peer, answer)| ranks.stats_in(peer, answer))
                .collect::<Result<Vec<_>>>()
        });
        answers.unwrap_or_default().iter().for_each(|stats| total.absorb(stats));
        total
    }

    fn stats_in(&self, peer: usize, answer: Reply) -> Result<Box<Stats>> {
        let Reply::Stats(stats) = answer else { return Err(self.peers.unasked(peer)) };
        replies::check_stats(&stats, self.engine.info)
            .with_context(|| format!("rank {} tells what cannot be", self.peers.rank(peer)))?;
        Ok(stats)
    }

    /// The cost of experts in host memory so far; `None` if all experts are on the device. It waits for the device.
    ///
    /// # Errors
    /// Any error of the device.
    pub fn expert_traffic(&self) -> Result<Option<ExpertTraffic>> {
        Ok(self.engine.runner.model.expert_traffic()?)
    }
}
