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

use anyhow::{Result, anyhow};
use model_runtime::{CausalLm, Exec};
use moe_comm::Communicator;

use super::stats::Counters;
use super::{
    Engine, EngineConfig, Output, RemoteEngine, Request, RequestError, RequestId, StepHeat, Summary,
};
use crate::heat::{HeatWriter, Stage};
use crate::parallel::{AbortOnPanic, panic_text};
use crate::tokenizer::Tokenizer;

/// Runs requests on the replicas of a model.
pub struct DpEngine<'m> {
    ranks: Vec<Rank<'m>>,
    lockstep: bool,
    next_id: u64,
    /// Where a request runs.
    placed: HashMap<RequestId, (usize, RequestId)>,
    steps: u64,
    step_heat: Option<StepHeat>,
    heat_trace: Option<HeatWriter>,
}

struct Rank<'m> {
    engine: Member<'m>,
    /// What fails all ranks, under this one's name.
    world: Arc<dyn Communicator>,
    /// Tokens that its unfinished choices can come to.
    work: usize,
    requests: HashMap<RequestId, Placed>,
}

/// The engine of one data-parallel rank.
enum Member<'m> {
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
    /// An engine per replica: a model, where it runs, and its place among all ranks. Without a tokenizer outputs have no text and stop strings are refused.
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
        let replicas: Vec<_> = replicas.collect();
        let alone = replicas.len() + remotes.len() == 1;
        // One trace for all ranks, a line per step of all.
        let each = EngineConfig {
            expert_counts: config.counted(),
            expert_heat: config.expert_heat.clone().filter(|_| alone),
            ..config.clone()
        };
        let rank = |engine, world| Rank { engine, world, work: 0, requests: HashMap::new() };
        let mut ranks = Vec::new();
        for (model, ex, world) in replicas {
            let engine = Engine::new(model, ex, tokenizer.clone(), if alone { config } else { &each })?;
            ranks.push(rank(Member::Here(Box::new(engine)), world));
        }
        for (mut engine, world) in remotes {
            engine.start(&each, tokenizer.is_some())?;
            ranks.push(rank(Member::There(engine), world));
        }
        let trace = config.expert_heat.as_deref().filter(|_| !alone);
        Ok(Self {
            ranks,
            lockstep: config.lockstep,
            next_id: 0,
            placed: HashMap::new(),
            steps: 0,
            step_heat: None,
            heat_trace: trace.map(HeatWriter::create).transpose()?,
        })
    }

    /// The longest sequence, prompt and output.
    pub fn max_model_len(&self) -> usize {
        self.ranks.iter().map(|rank| rank.engine.max_model_len()).min().unwrap_or(0)
    }

    /// Takes a request to the rank with the least work, or says why not; then nothing has changed.
    ///
    /// # Errors
    /// A request that cannot run.
    pub fn add(&mut self, request: Request) -> Result<RequestId, RequestError> {
        let most = self.max_model_len();
        let work = request.prompt.len().saturating_add(request.max_tokens.unwrap_or(most)).min(most);
        let n = request.n;
        // What is wrong with it is known here as well as there.
        if let Some(Rank { engine: Member::Here(engine), .. }) = self.ranks.first() {
            engine.check(&request)?;
        }
        let least = (0..self.ranks.len()).min_by_key(|&rank| self.ranks.get(rank).map(|rank| rank.work));
        let Some((place, rank)) = least.and_then(|place| Some((place, self.ranks.get_mut(place)?))) else {
            let (expected, got) = ("at least one".to_string(), "none".to_string());
            return Err(RequestError::Parameter { name: "data-parallel ranks", expected, got });
        };
        let local = rank.engine.add(request)?;
        let id = RequestId(self.next_id);
        self.next_id += 1;
        rank.work = rank.work.saturating_add(work.saturating_mul(n));
        rank.requests.insert(local, Placed { id, unfinished: n, work });
        self.placed.insert(id, (place, local));
        Ok(id)
    }

    /// Ends a request with what it has; its last outputs come with the next step. An unknown or
    /// finished one is left alone.
    ///
    /// # Errors
    /// Only what ends all requests.
    pub fn cancel(&mut self, request: RequestId) -> Result<()> {
        let Some(&(place, local)) = self.placed.get(&request) else { return Ok(()) };
        self.ranks.get_mut(place).map_or(Ok(()), |rank| rank.engine.cancel(local))
    }

    /// Whether nothing is left to run or to report.
    pub fn is_idle(&self) -> bool {
        self.ranks.iter().all(|rank| rank.engine.is_idle())
    }

    /// Requests' choices that are waiting or running.
    pub fn num_unfinished(&self) -> usize {
        self.ranks.iter().map(|rank| rank.engine.num_unfinished()).sum()
    }

    /// Runs a step of every rank that has something to do, or of all; returns what is new, rank by
    /// rank.
    ///
    /// # Errors
    /// Only what ends all requests: the model cannot run, or a rank died.
    pub fn step(&mut self) -> Result<Vec<Output>> {
        let lockstep = self.lockstep;
        let busy = self.ranks.iter_mut().filter(|rank| lockstep || !rank.engine.is_idle());
        let mut busy: Vec<&mut Rank> = busy.collect();
        let outputs: Result<Vec<Vec<Output>>> = match busy.as_mut_slice() {
            [rank] => rank.step().map(|outputs| vec![outputs]),
            ranks => std::thread::scope(|scope| {
                let threads: Vec<_> = ranks.iter_mut().map(|rank| scope.spawn(|| rank.step())).collect();
                let join = |thread: ScopedJoinHandle<Result<Vec<Output>>>| {
                    let panicked =
                        |panic: Box<dyn Any + Send>| anyhow!("a rank panicked: {}", panic_text(&*panic));
                    thread.join().map_err(panicked)?
                };
                // All are joined, whatever the first one says.
                threads.into_iter().map(join).collect::<Vec<_>>().into_iter().collect()
            }),
        };
        let outputs = outputs?.concat();
        for output in outputs.iter().filter(|output| output.finish.is_some()) {
            let done = self.placed.get(&output.request).is_some_and(|(place, local)| {
                self.ranks.get(*place).is_none_or(|rank| !rank.requests.contains_key(local))
            });
            if done {
                self.placed.remove(&output.request);
            }
        }
        self.collect_heat()?;
        Ok(outputs)
    }

    /// Runs until every request has ended, and shows each output to `on_output`.
    ///
    /// # Errors
    /// As [`step`](Self::step).
    pub fn run(&mut self, mut on_output: impl FnMut(Output)) -> Result<()> {
        while !self.is_idle() {
            self.step()?.into_iter().for_each(&mut on_output);
        }
        Ok(())
    }

    /// Counters and times so far, of all ranks.
    pub fn stats(&self) -> Summary {
        let mut ranks = self.ranks.iter().map(|rank| rank.engine.counters());
        let mut total = ranks.next().unwrap_or_default();
        ranks.for_each(|counters| total.absorb(&counters));
        total.summary()
    }

    /// Expert counts of the last collected step, if they are collected.
    pub fn take_step_heat(&mut self) -> Option<StepHeat> {
        match self.ranks.as_mut_slice() {
            [rank] => rank.engine.take_step_heat(),
            _ => self.step_heat.take(),
        }
    }

    /// One count for the steps that the ranks ran side by side.
    fn collect_heat(&mut self) -> Result<()> {
        if self.ranks.len() == 1 {
            return Ok(());
        }
        let parts = self.ranks.iter_mut().filter_map(|rank| rank.engine.take_step_heat());
        let all = parts.reduce(|mut all, part| {
            all.decode_rows += part.decode_rows;
            all.prefill_rows += part.prefill_rows;
            all.heat.add(&part.heat);
            all
        });
        let Some(heat) = all.map(|all| StepHeat { step: self.steps, ..all }) else { return Ok(()) };
        self.steps += 1;
        if let Some(trace) = &mut self.heat_trace {
            let stage = if heat.prefill_rows > 0 { Stage::Prefill } else { Stage::Decode };
            trace.write(heat.step, stage, &heat.heat)?;
        }
        self.step_heat = Some(heat);
        Ok(())
    }
}

impl Member<'_> {
    fn max_model_len(&self) -> usize {
        match self {
            Self::Here(engine) => engine.max_model_len(),
            Self::There(engine) => engine.max_model_len(),
        }
    }

    fn add(&mut self, request: Request) -> Result<RequestId, RequestError> {
        match self {
            Self::Here(engine) => engine.add(request),
            Self::There(engine) => engine.add(request),
        }
    }

    fn cancel(&mut self, request: RequestId) -> Result<()> {
        match self {
            Self::Here(engine) => engine.cancel(request),
            Self::There(engine) => engine.cancel(request),
        }
    }

    fn is_idle(&self) -> bool {
        match self {
            Self::Here(engine) => engine.is_idle(),
            Self::There(engine) => engine.is_idle(),
        }
    }

    fn num_unfinished(&self) -> usize {
        match self {
            Self::Here(engine) => engine.num_unfinished(),
            Self::There(engine) => engine.num_unfinished(),
        }
    }

    fn step(&mut self) -> Result<Vec<Output>> {
        match self {
            Self::Here(engine) => engine.step(),
            Self::There(engine) => engine.step(),
        }
    }

    fn take_step_heat(&mut self) -> Option<StepHeat> {
        match self {
            Self::Here(engine) => engine.take_step_heat(),
            Self::There(engine) => engine.take_step_heat(),
        }
    }

    fn counters(&self) -> Counters {
        match self {
            Self::Here(engine) => engine.counters(),
            Self::There(engine) => engine.counters(),
        }
    }
}

impl Rank<'_> {
    /// A step of this rank; one that fails fails the others, which may be waiting for it.
    fn step(&mut self) -> Result<Vec<Output>> {
        let _guard = AbortOnPanic(self.world.as_ref());
        let mut outputs = self.engine.step().inspect_err(|e| self.world.abort(&format!("{e:#}")))?;
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
        Ok(outputs)
    }
}
