//! The engines of all data-parallel ranks as one: requests are spread by the work that they can
//! come to, and what a request gives does not depend on where it runs.
//!
//! Each rank has a scheduler, a prefix cache and a KV cache of its own. A call of
//! [`DpEngine::step`] runs one step of each, side by side. With expert parallelism they meet in
//! every layer, so a rank without requests runs steps without rows until all have finished.

use std::any::Any;
use std::collections::HashMap;
use std::sync::Arc;
use std::thread::ScopedJoinHandle;

use anyhow::{Result, anyhow, bail};
use model_runtime::{CausalLm, Exec};
use moe_comm::Communicator;

use super::remote::{Question, Reply};
use super::{Engine, EngineConfig, Output, RemoteEngine, Request, RequestError, RequestId, Stats, StepLoad};
use crate::eplb::Balancer;
use crate::heat::{HeatWriter, Stage};
use crate::parallel::{AbortOnPanic, panic_text};
use crate::structured::Grammars;
use crate::tokenizer::Tokenizer;

/// Runs requests on the replicas of a model.
pub struct DpEngine<'m> {
    pub(super) ranks: Vec<Rank<'m>>,
    lockstep: bool,
    next_id: u64,
    /// Where a request runs.
    placed: HashMap<RequestId, (usize, RequestId)>,
    /// Steps of all ranks side by side whose experts were counted.
    steps: u64,
    step_load: Option<StepLoad>,
    trace: Option<HeatWriter>,
    pub(super) balancer: Option<Balancer>,
}

pub(super) struct Rank<'m> {
    pub(super) engine: Member<'m>,
    /// What fails all ranks, under this one's name.
    pub(super) world: Arc<dyn Communicator>,
    max_model_len: usize,
    idle: bool,
    unfinished: usize,
    /// What the next step reports.
    failure: Option<anyhow::Error>,
    /// Tokens that its unfinished choices can come to.
    work: usize,
    requests: HashMap<RequestId, Placed>,
}

/// The engine of one data-parallel rank.
pub(super) enum Member<'m> {
    /// In this process.
    Here(Box<Engine<'m>>),
    /// In the process of the rank.
    There(RemoteEngine),
}

/// A request under the name that its rank gave it.
struct Placed {
    id: RequestId,
    unfinished: usize,
    /// Tokens that each choice can come to.
    work: usize,
}

impl<'m> DpEngine<'m> {
    /// An engine per replica: a model, where it runs, and its place among all ranks. Without a tokenizer outputs have no text, and stop strings and structured output are refused.
    ///
    /// # Errors
    /// Settings that do not fit the model or the machine.
    pub fn new(
        replicas: impl Iterator<Item = (&'m dyn CausalLm, Exec, Arc<dyn Communicator>)>,
        tokenizer: Option<Tokenizer>,
        config: &EngineConfig,
    ) -> Result<Self> {
        Self::with_remotes(replicas, Vec::new(), tokenizer, config)
    }

    /// Like [`new`](Self::new), with further replicas in other processes.
    pub(crate) fn with_remotes(
        replicas: impl Iterator<Item = (&'m dyn CausalLm, Exec, Arc<dyn Communicator>)>,
        remotes: Vec<(RemoteEngine, Arc<dyn Communicator>)>,
        tokenizer: Option<Tokenizer>,
        config: &EngineConfig,
    ) -> Result<Self> {
        let grammars = tokenizer.clone().map(Grammars::new).map(Arc::new);
        let mut ranks = Vec::new();
        for (model, ex, world) in replicas {
            let engine = Engine::with_grammars(model, ex, tokenizer.clone(), grammars.clone(), config)?;
            let max_model_len = engine.max_model_len();
            ranks.push(Rank::new(Member::Here(Box::new(engine)), world, max_model_len));
        }
        let balancer = config.eplb.as_ref().map(|eplb| Self::balancer(&ranks, eplb)).transpose()?;
        for (engine, world) in remotes {
            let max_model_len = engine.start(config, tokenizer.is_some())?;
            ranks.push(Rank::new(Member::There(engine), world, max_model_len));
        }
        Ok(Self {
            ranks,
            lockstep: config.lockstep,
            next_id: 0,
            placed: HashMap::new(),
            steps: 0,
            step_load: None,
            balancer,
            trace: config.expert_heat.as_deref().map(HeatWriter::create).transpose()?,
        })
    }

    /// The longest sequence, prompt and output.
    pub fn max_model_len(&self) -> usize {
        self.ranks.iter().map(|rank| rank.max_model_len).min().unwrap_or(0)
    }

    /// Takes a request to the rank with the least work, or says why not; then nothing has changed.
    pub fn add(&mut self, request: Request) -> Result<RequestId, RequestError> {
        let most = self.max_model_len();
        let work = request.prompt.len().saturating_add(request.max_tokens.unwrap_or(most)).min(most);
        let n = request.n;
        // What is wrong with it is known here as well as in other processes.
        for rank in &self.ranks {
            if let Member::Here(engine) = &rank.engine {
                engine.check(&request)?;
            }
        }
        let Some((place, rank)) = self.ranks.iter_mut().enumerate().min_by_key(|(_, rank)| rank.work) else {
            let (expected, got) = ("at least one".to_string(), "none".to_string());
            return Err(RequestError::Parameter { name: "data-parallel ranks", expected, got });
        };
        let local = rank.add(request)?;
        let id = RequestId(self.next_id);
        self.next_id += 1;
        rank.work = rank.work.saturating_add(work.saturating_mul(n));
        rank.requests.insert(local, Placed { id, unfinished: n, work });
        self.placed.insert(id, (place, local));
        Ok(id)
    }

    /// Ends a request with what it has; its last outputs come with the next step. An unknown or
    /// finished one is left alone.
    pub fn cancel(&mut self, request: RequestId) -> Result<()> {
        let Some(&(place, local)) = self.placed.get(&request) else { return Ok(()) };
        self.ranks.get_mut(place).map_or(Ok(()), |rank| rank.ask(Question::Cancel(local)).map(drop))
    }

    /// Whether nothing is left to run or to report.
    pub fn is_idle(&self) -> bool {
        self.ranks.iter().all(|rank| rank.idle)
    }

    /// Requests' choices that are waiting or running.
    pub fn num_unfinished(&self) -> usize {
        self.ranks.iter().map(|rank| rank.unfinished).sum()
    }

    /// Runs a step of every rank that has something to do, or of all; returns what is new, rank by
    /// rank.
    ///
    /// # Errors
    /// Only what ends all requests: the model cannot run, or a rank died.
    pub fn step(&mut self) -> Result<Vec<Output>> {
        let lockstep = self.lockstep;
        let mut busy: Vec<&mut Rank> = self.ranks.iter_mut().filter(|rank| lockstep || !rank.idle).collect();
        let stepped = side_by_side(&mut busy, Rank::step)?;
        let (outputs, loads): (Vec<_>, Vec<_>) = stepped.into_iter().unzip();
        let outputs = outputs.concat();
        for output in outputs.iter().filter(|output| output.finish.is_some()) {
            let done = self.placed.get(&output.request).is_some_and(|(place, local)| {
                self.ranks.get(*place).is_none_or(|rank| !rank.requests.contains_key(local))
            });
            if done {
                self.placed.remove(&output.request);
            }
        }
        let loads = self.keep_loads(loads.concat())?;
        self.balance(&loads)?;
        Ok(outputs)
    }

    /// Runs until every request has ended, and shows each output to `on_output`.
    pub fn run(&mut self, mut on_output: impl FnMut(Output)) -> Result<()> {
        while !self.is_idle() {
            self.step()?.into_iter().for_each(&mut on_output);
        }
        Ok(())
    }

    /// Counters and times so far, of all ranks; a rank that is gone, which the next step reports, adds nothing.
    pub fn stats(&self) -> Stats {
        let mut total = Stats::default();
        for rank in &self.ranks {
            match &rank.engine {
                Member::Here(engine) => total.absorb(&engine.stats()),
                Member::There(engine) => {
                    if let Ok(Reply::Stats(stats)) = engine.ask(&Question::Stats).map(|answer| answer.reply) {
                        total.absorb(&stats);
                    }
                }
            }
        }
        total
    }

    /// Expert counts of the last collected step, if they are collected.
    pub fn take_step_load(&mut self) -> Option<StepLoad> {
        self.step_load.take()
    }

    /// Writes the trace of expert counts and gives them back; those of steps that ranks ran side by side are one count.
    fn keep_loads(&mut self, mut loads: Vec<StepLoad>) -> Result<Vec<StepLoad>> {
        if self.ranks.len() > 1 {
            let all = loads.into_iter().reduce(|mut all, part| {
                all.decode_rows += part.decode_rows;
                all.prefill_rows += part.prefill_rows;
                all.counts.add(&part.counts);
                all
            });
            loads = all.map(|all| StepLoad { step: self.steps, ..all }).into_iter().collect();
            self.steps += loads.len() as u64;
        }
        for load in &loads {
            if let Some(trace) = &mut self.trace {
                let stage = if load.prefill_rows > 0 { Stage::Prefill } else { Stage::Decode };
                trace.write(load.step, stage, &load.counts)?;
            }
        }
        self.step_load = loads.last().cloned().or(self.step_load.take());
        Ok(loads)
    }
}

/// What `work` gives on each rank, all at once.
pub(super) fn side_by_side<'m, T: Send>(
    ranks: &mut [&mut Rank<'m>],
    work: impl Fn(&mut Rank<'m>) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    if let [rank] = ranks {
        return work(rank).map(|done| vec![done]);
    }
    let work = &work;
    std::thread::scope(|scope| {
        let threads: Vec<_> = ranks.iter_mut().map(|rank| scope.spawn(move || work(rank))).collect();
        let join = |thread: ScopedJoinHandle<Result<T>>| {
            let panicked = |panic: Box<dyn Any + Send>| anyhow!("a rank panicked: {}", panic_text(&*panic));
            thread.join().map_err(panicked)?
        };
        // All are joined, whatever the first one says.
        threads.into_iter().map(join).collect::<Vec<_>>().into_iter().collect()
    })
}

/// What is new after a step of one rank, and the expert counts of what was collected.
type Stepped = (Vec<Output>, Vec<StepLoad>);

impl<'m> Rank<'m> {
    fn new(engine: Member<'m>, world: Arc<dyn Communicator>, max_model_len: usize) -> Self {
        let (failure, requests) = (None, HashMap::new());
        Self { engine, world, max_model_len, idle: true, unfinished: 0, failure, work: 0, requests }
    }

    pub(super) fn ask(&mut self, question: Question) -> Result<Reply> {
        let answer = match &mut self.engine {
            Member::Here(engine) => engine.answer(question)?,
            Member::There(engine) => engine.ask(&question)?,
        };
        (self.idle, self.unfinished) = (answer.idle, answer.unfinished);
        Ok(answer.reply)
    }

    /// A rank that is gone takes any request: nothing is wrong with that, and the next step fails.
    fn add(&mut self, request: Request) -> Result<RequestId, RequestError> {
        let failure = match self.ask(Question::Add(Box::new(request))) {
            Ok(Reply::Added(id)) => return Ok(id),
            Ok(Reply::Refused(why)) => return Err(RequestError::Refused(why)),
            Ok(_) => anyhow!("a rank answers another question"),
            Err(e) => e,
        };
        (self.failure, self.idle) = (Some(failure), false);
        Ok(RequestId(u64::MAX))
    }

    /// A step of this rank; one that fails fails the others, which may be waiting for it.
    fn step(&mut self) -> Result<Stepped> {
        let world = self.world.clone();
        let _guard = AbortOnPanic(world.as_ref());
        let asked = self.failure.take().map_or_else(|| self.ask(Question::Step), Err);
        let (mut outputs, loads) = match asked.inspect_err(|e| world.abort(&format!("{e:#}")))? {
            Reply::Stepped(outputs, loads) => (outputs, loads),
            _ => bail!("a rank answers another question"),
        };
        for output in &mut outputs {
            let Some(placed) = self.requests.get_mut(&output.request) else { continue };
            let local = std::mem::replace(&mut output.request, placed.id);
            if output.finish.is_some() {
                placed.unfinished -= 1;
                self.work = self.work.saturating_sub(placed.work);
                if placed.unfinished == 0 {
                    self.requests.remove(&local);
                }
            }
        }
        Ok((outputs, loads))
    }
}
