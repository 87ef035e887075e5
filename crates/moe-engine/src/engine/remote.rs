//! The engine of a data-parallel rank, here or in another process: what [`DpEngine`](super::DpEngine) asks it, and the
//! loop that answers in the other process.
//!
//! One question is asked at a time; an answer carries what is to be known without asking. Whoever fails fails the
//! world, so nobody waits for an answer that never comes.

use std::sync::Arc;

use anyhow::{Context, Result, bail};
use model_runtime::{CausalLm, Exec};
use moe_comm::{Communicator, Messages};
use moe_layer::{MoveRound, MoveStatus};
use serde::{Deserialize, Serialize};

use super::{Engine, EngineConfig, Output, Request, RequestId, Stats, StepLoad};
use crate::parallel::wire::{decode, encode};
use crate::tokenizer::Tokenizer;

/// What an engine is asked.
#[derive(Serialize, Deserialize)]
pub(super) enum Question {
    /// A new engine in the other process, with or without text.
    Start(Box<EngineConfig>, bool),
    Add(Box<Request>),
    Cancel(RequestId),
    Step,
    /// One round of moving experts.
    Move(MoveRound),
    Stats,
}

#[derive(Serialize, Deserialize)]
pub(super) enum Reply {
    /// The longest sequence of the new engine.
    Started(usize),
    Added(RequestId),
    Cancelled,
    /// What is new, and the expert counts of the steps that were collected.
    Stepped(Vec<Output>, Vec<StepLoad>),
    Moved(MoveStatus),
    Stats(Box<Stats>),
    /// What was asked for cannot be; nothing has changed.
    Refused(String),
}

#[derive(Serialize, Deserialize)]
pub(super) struct Answer {
    pub reply: Reply,
    pub idle: bool,
    pub unfinished: usize,
}

impl Engine<'_> {
    /// # Errors
    /// What ends all requests.
    pub(super) fn answer(&mut self, question: Question) -> Result<Answer> {
        let reply = match question {
            Question::Start(..) => bail!("an engine that runs cannot start"),
            Question::Add(request) => match self.add(*request) {
                Ok(id) => Reply::Added(id),
                Err(e) => Reply::Refused(e.to_string()),
            },
            Question::Cancel(id) => {
                self.cancel(id)?;
                Reply::Cancelled
            }
            Question::Step => Reply::Stepped(self.step()?, std::mem::take(&mut self.step_loads)),
            Question::Move(round) => Reply::Moved(self.move_experts(&round)?),
            Question::Stats => Reply::Stats(Box::new(self.stats())),
        };
        Ok(Answer { reply, idle: self.is_idle(), unfinished: self.num_unfinished() })
    }
}

/// The engine of this rank of the world; it does nothing until it is started.
pub(crate) struct RemoteEngine {
    pub messages: Messages,
    pub rank: usize,
}

impl RemoteEngine {
    pub(super) fn ask(&self, question: &Question) -> Result<Answer> {
        self.messages.send(self.rank, &encode(question)?)?;
        let answer = self.messages.recv(self.rank)?;
        decode(&answer.with_context(|| format!("rank {} has left", self.rank))?)
    }

    /// Replaces the engine there by one with these settings; its longest sequence.
    ///
    /// # Errors
    /// Settings that do not fit the model or that rank's machine.
    pub(super) fn start(&self, config: &EngineConfig, text: bool) -> Result<usize> {
        match self.ask(&Question::Start(Box::new(config.clone()), text))?.reply {
            Reply::Started(max_model_len) => Ok(max_model_len),
            Reply::Refused(why) => bail!("rank {}: {why}", self.rank),
            _ => bail!("rank {} answers another question", self.rank),
        }
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
        let answer = match (decode(&message)?, &mut engine) {
            (Question::Start(config, text), engine) => {
                // The old cache goes before the new one is allocated.
                *engine = None;
                let reply = match Engine::new(model, ex.clone(), tokenizer.filter(|_| text).cloned(), &config)
                {
                    Ok(new) => Reply::Started(engine.insert(new).max_model_len()),
                    Err(e) => Reply::Refused(format!("{e:#}")),
                };
                Answer { reply, idle: true, unfinished: 0 }
            }
            (_, None) => bail!("rank 0 asks an engine that it has not started"),
            (question, Some(engine)) => {
                engine.answer(question).inspect_err(|e| world.abort(&format!("{e:#}")))?
            }
        };
        messages.send(0, &encode(&answer)?)?;
    }
}
