//! The engine of a data-parallel rank in another process: what the driver sends and gets, and the
//! loop that answers.
//!
//! The driver asks, one question at a time; an answer carries what the driver wants to know without
//! asking. Whoever fails fails the world, so nobody waits for an answer that never comes.

use std::sync::Arc;

use anyhow::{Context, Result, bail};
use model_runtime::{CausalLm, Exec};
use moe_comm::{Communicator, Messages};
use serde::{Deserialize, Serialize};

use super::stats::Counters;
use super::{Engine, EngineConfig, Output, Request, RequestError, RequestId, StepHeat};
use crate::parallel::wire::{decode, encode};
use crate::tokenizer::Tokenizer;

/// What the driver asks.
#[derive(Serialize, Deserialize)]
enum Question {
    /// A new engine, with or without text.
    Start(Box<EngineConfig>, bool),
    Add(Box<Request>),
    Cancel(RequestId),
    Step,
    Counters,
}

#[derive(Serialize, Deserialize)]
enum Reply {
    /// The longest sequence of the new engine.
    Started(usize),
    Added(RequestId),
    Cancelled,
    Stepped(Vec<Output>, Option<StepHeat>),
    Counters(Box<Counters>),
    /// What was asked for cannot be; nothing has changed.
    Refused(String),
}

#[derive(Serialize, Deserialize)]
struct Answer {
    reply: Reply,
    idle: bool,
    unfinished: usize,
}

/// The driver's side.
pub(crate) struct RemoteEngine {
    messages: Messages,
    rank: usize,
    max_model_len: usize,
    idle: bool,
    unfinished: usize,
    step_heat: Option<StepHeat>,
    /// What the next step reports.
    failure: Option<anyhow::Error>,
}

impl RemoteEngine {
    /// The engine of this rank of the world; it does nothing until it is started.
    pub fn new(messages: Messages, rank: usize) -> Self {
        let (step_heat, failure) = (None, None);
        Self { messages, rank, max_model_len: 0, idle: true, unfinished: 0, step_heat, failure }
    }

    /// Replaces the engine there by one with these settings.
    ///
    /// # Errors
    /// Settings that do not fit the model or that rank's machine.
    pub fn start(&mut self, config: &EngineConfig, text: bool) -> Result<()> {
        match self.ask(&Question::Start(Box::new(config.clone()), text))? {
            Reply::Started(max_model_len) => self.max_model_len = max_model_len,
            Reply::Refused(why) => bail!("rank {}: {why}", self.rank),
            _ => return self.confused(),
        }
        Ok(())
    }

    pub fn max_model_len(&self) -> usize {
        self.max_model_len
    }

    pub fn is_idle(&self) -> bool {
        self.idle
    }

    pub fn num_unfinished(&self) -> usize {
        self.unfinished
    }

    /// A rank that is gone takes any request: nothing is wrong with that, and the next step fails.
    pub fn add(&mut self, request: Request) -> Result<RequestId, RequestError> {
        let reply = self.ask(&Question::Add(Box::new(request)));
        let failure = match reply {
            Ok(Reply::Added(id)) => return Ok(id),
            Ok(Reply::Refused(why)) => return Err(RequestError::Refused(why)),
            Ok(_) => self.confused::<()>().err(),
            Err(e) => Some(e),
        };
        (self.failure, self.idle) = (failure, false);
        Ok(RequestId(u64::MAX))
    }

    pub fn cancel(&mut self, request: RequestId) -> Result<()> {
        match self.ask(&Question::Cancel(request))? {
            Reply::Cancelled => Ok(()),
            _ => self.confused(),
        }
    }

    pub fn step(&mut self) -> Result<Vec<Output>> {
        if let Some(failure) = self.failure.take() {
            return Err(failure);
        }
        match self.ask(&Question::Step)? {
            Reply::Stepped(outputs, heat) => {
                self.step_heat = heat;
                Ok(outputs)
            }
            _ => self.confused(),
        }
    }

    pub fn take_step_heat(&mut self) -> Option<StepHeat> {
        self.step_heat.take()
    }

    /// What the rank has counted; nothing if it is gone, which the next step reports.
    pub(super) fn counters(&self) -> Counters {
        match self.exchange(&Question::Counters) {
            Ok(Answer { reply: Reply::Counters(counters), .. }) => *counters,
            _ => Counters::default(),
        }
    }

    fn ask(&mut self, question: &Question) -> Result<Reply> {
        let answer = self.exchange(question)?;
        (self.idle, self.unfinished) = (answer.idle, answer.unfinished);
        Ok(answer.reply)
    }

    fn exchange(&self, question: &Question) -> Result<Answer> {
        self.messages.send(self.rank, &encode(question)?)?;
        let answer = self.messages.recv(self.rank)?;
        decode(&answer.with_context(|| format!("rank {} has left", self.rank))?)
    }

    fn confused<T>(&self) -> Result<T> {
        bail!("rank {} answers another question", self.rank)
    }
}

/// Runs the engine of a data-parallel rank for the driver, rank 0, until that says stop (an empty
/// message).
///
/// # Errors
/// What ends all requests, here or elsewhere.
pub(crate) fn serve(
    model: &dyn CausalLm,
    ex: &Exec,
    tokenizer: Option<&Tokenizer>,
    world: &Arc<dyn Communicator>,
    messages: &Messages,
) -> Result<()> {
    let mut engine: Option<Engine> = None;
    loop {
        let message = messages.recv(0)?.context("rank 0 has left without a word")?;
        if message.is_empty() {
            return Ok(());
        }
        let reply = match (decode(&message)?, &mut engine) {
            (Question::Start(config, text), engine) => {
                // The old cache goes before the new one is allocated.
                *engine = None;
                let tokenizer = tokenizer.filter(|_| text).cloned();
                match Engine::new(model, ex.clone(), tokenizer, &config) {
                    Ok(new) => Reply::Started(engine.insert(new).max_model_len()),
                    Err(e) => Reply::Refused(format!("{e:#}")),
                }
            }
            (_, None) => bail!("rank 0 asks an engine that it has not started"),
            (Question::Add(request), Some(engine)) => match engine.add(*request) {
                Ok(id) => Reply::Added(id),
                Err(e) => Reply::Refused(e.to_string()),
            },
            (Question::Cancel(id), Some(engine)) => {
                engine.cancel(id)?;
                Reply::Cancelled
            }
            (Question::Step, Some(engine)) => {
                let outputs = engine.step().inspect_err(|e| world.abort(&format!("{e:#}")))?;
                Reply::Stepped(outputs, engine.take_step_heat())
            }
            (Question::Counters, Some(engine)) => Reply::Counters(Box::new(engine.counters())),
        };
        let (idle, unfinished) =
            engine.as_ref().map_or((true, 0), |engine| (engine.is_idle(), engine.num_unfinished()));
        messages.send(0, &encode(&Answer { reply, idle, unfinished })?)?;
    }
}
