//! The questions that the process of the first data-parallel rank sends to another rank's engine, and the loop that
//! answers them, on a thread of that process or in another process.
//!
//! In lockstep a rank runs a step when it is asked. Otherwise it runs steps as long as it has requests, and reports new
//! outputs after each; a question then waits until the running step has ended. Questions are answered in order. A rank
//! that fails makes the world fail, so no rank waits forever for an answer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use model_runtime::{CausalLm, Exec};
use moe_comm::{Communicator, Messages, News};
use moe_layer::{MoveRound, MoveStatus};
use serde::{Deserialize, Serialize};

use super::{Engine, EngineConfig, Output, Request, RequestId, Stats, StepLoad, Texts, step_memory};
use crate::error::{Context, Result, bail, ensure};
use crate::parallel::wire::{decode, encode};
use crate::structured::Grammars;
use crate::tokenizer::Tokenizer;

/// A question to an engine. `Limit`, `Add` and `Cancel` affect later steps and have no reply.
#[derive(Serialize, Deserialize)]
pub(super) enum Question {
    /// Run the largest step, which all ranks run at the same time, before there is an engine. The result is the size
    /// that a KV cache may have.
    Measure(Box<EngineConfig>),
    /// Replace the engine by a new one, with or without text.
    Start(Box<EngineConfig>, bool),
    /// Limit the length of sequences, because the KV cache of another rank holds no more.
    Limit(usize),
    /// Add a request; the duration is how long it has waited.
    Add(RequestId, Duration, Box<Request>),
    Cancel(RequestId),
    /// Run a step, in lockstep.
    Step,
    /// Run one round of moving experts.
    Move(MoveRound),
    Stats,
    /// The engine is no longer needed.
    End,
}

#[derive(Serialize, Deserialize)]
pub(super) enum Reply {
    Measured,
    /// The length of the longest sequence of the new engine.
    Started(usize),
    /// There is no engine with these settings.
    Refused(String),
    Stepped(Stepped),
    Moved(MoveStatus),
    Stats(Box<Stats>),
    Ended,
}

/// The new outputs after a step.
#[derive(Serialize, Deserialize)]
pub(super) struct Stepped {
    pub outputs: Vec<Output>,
    /// The expert counts of the steps that were collected.
    pub loads: Vec<StepLoad>,
    /// Whether there is nothing left to run or to report.
    pub idle: bool,
}

/// What the loop must do next.
pub(super) enum Next {
    Answer(Question),
    /// There is no question now.
    Nothing,
    /// There will be no more questions.
    Stop,
}

impl Engine<'_> {
    /// # Errors
    /// Errors that end all requests.
    pub(super) fn answer(&mut self, question: Question) -> Result<Option<Reply>> {
        Ok(match question {
            Question::Measure(..) | Question::Start(..) | Question::End => {
                bail!("an engine cannot replace itself")
            }
            Question::Limit(max_model_len) => {
                let most = self.max_model_len;
                ensure!(
                    (1..=most).contains(&max_model_len),
                    "a limit of {max_model_len} tokens, expected 1 to {most}"
                );
                self.limit(max_model_len);
                None
            }
            Question::Add(id, waited, request) => {
                ensure!(!self.scheduler.knows(id.0), "request {} for the second time", id.0);
                self.take(id, waited, *request);
                None
            }
            Question::Cancel(id) => {
                self.cancel(id)?;
                None
            }
            Question::Step => Some(Reply::Stepped(self.stepped()?)),
            Question::Move(round) => Some(Reply::Moved(self.move_experts(&round)?)),
            Question::Stats => Some(Reply::Stats(Box::new(self.stats()))),
        })
    }

    /// Limits the length of sequences.
    pub(super) fn limit(&mut self, max_model_len: usize) {
        self.max_model_len = self.max_model_len.min(max_model_len);
    }

    /// Adds a request that has waited. If this engine cannot run it, it ends with the next step.
    pub(super) fn take(&mut self, id: RequestId, waited: Duration, request: Request) {
        let now = Instant::now();
        let added = now.checked_sub(waited).unwrap_or(now);
        match self.check(&request) {
            Ok(checked) => self.enter(id, request, checked, added),
            Err(e) => self.end_refused(id, request.n, &e),
        }
    }

    /// Runs a step.
    pub(super) fn stepped(&mut self) -> Result<Stepped> {
        let outputs = self.step()?;
        Ok(Stepped { outputs, loads: std::mem::take(&mut self.step_loads), idle: self.is_idle() })
    }

    fn runs_by_itself(&self) -> bool {
        !self.lockstep && !self.is_idle()
    }
}

/// Answers the questions of `next` until there are no more, with an engine of the model. `next` waits for a question if
/// it is told to. Engines may be with or without `texts`.
///
/// # Errors
/// Errors that end all requests.
pub(super) fn answer_all(
    (model, ex): (&dyn CausalLm, &Exec),
    texts: impl Fn(bool) -> Result<Texts>,
    mut next: impl FnMut(bool) -> Result<Next>,
    mut reply: impl FnMut(Reply) -> Result<()>,
) -> Result<()> {
    let (mut engine, mut budget): (Option<Engine>, _) = (None, None);
    loop {
        let wait = !engine.as_ref().is_some_and(Engine::runs_by_itself);
        let answer = match (next(wait)?, &mut engine) {
            (Next::Stop, _) => return Ok(()),
            (Next::Answer(Question::Measure(config)), engine) => {
                // The old cache is freed before the free memory is measured.
                *engine = None;
                budget = Some(step_memory::measure(model, &config, &mut ex.clone())?);
                Some(Reply::Measured)
            }
            (Next::Answer(Question::Start(config, text)), engine) => {
                // The old cache is freed before the new one is allocated.
                *engine = None;
                let budget = match config.lockstep {
                    true => Ok(budget.take()),
                    false => step_memory::budget(model, &config, &mut ex.clone()),
                };
                let new = |budget| Engine::with_budget(model, ex.clone(), texts(text)?, &config, budget);
                Some(match budget.and_then(new) {
                    Ok(new) => Reply::Started(engine.insert(new).max_model_len()),
                    Err(e) => Reply::Refused(format!("{e:#}")),
                })
            }
            (Next::Answer(Question::End), engine) => {
                (*engine, budget) = (None, None);
                Some(Reply::Ended)
            }
            (_, None) => bail!("rank 0 asks an engine that it has not started"),
            (Next::Answer(question), Some(engine)) => engine.answer(question)?,
            (Next::Nothing, Some(engine)) => Some(Reply::Stepped(engine.stepped()?)),
        };
        answer.map_or(Ok(()), &mut reply)?;
    }
}

/// The tokenizer and grammars for an engine with or without text.
///
/// # Errors
/// An engine with text, but no tokenizer.
fn texts_of(tokenizer: &Result<Tokenizer>, text: bool) -> Result<Texts> {
    match (text, tokenizer) {
        (false, _) => Ok((None, None)),
        (true, Ok(tokenizer)) => {
            Ok((Some(tokenizer.clone()), Some(Arc::new(Grammars::new(tokenizer.clone())))))
        }
        (true, Err(e)) => bail!("it has no tokenizer to make text with: {e:#}"),
    }
}

/// Runs the engine of a data-parallel rank in this process for the driver, rank 0, until the driver says stop (an empty
/// message). Without a `tokenizer` it refuses engines with text, with the reason why there is none.
///
/// # Errors
/// Errors that end all requests, on this rank or another one.
pub(crate) fn serve(
    model: &dyn CausalLm,
    ex: &Exec,
    tokenizer: &Result<Tokenizer>,
    world: &Arc<dyn Communicator>,
    messages: &Messages,
) -> Result<()> {
    let texts = |text: bool| texts_of(tokenizer, text);
    let next = |wait: bool| {
        let news = match wait {
            true => Some(messages.recv_any(&[0])?),
            false => messages.try_recv_any(&[0])?,
        };
        let message = match news {
            Some((_, News::Message(message))) => message,
            Some((_, News::Left)) => bail!("rank 0 has left without a word"),
            Some((_, News::Lost(why))) => bail!("{why}"),
            None => return Ok(Next::Nothing),
        };
        Ok(if message.is_empty() { Next::Stop } else { Next::Answer(decode(&message).context("rank 0")?) })
    };
    let reply = |reply: Reply| Ok(messages.send(0, &encode(&reply)?)?);
    answer_all((model, ex), texts, next, reply).inspect_err(|e| world.abort(&format!("{e:#}")))
}

/// Reads a question of rank 0, up to the point where an engine would check it further and act on it.
///
/// # Errors
/// The bytes are no question.
pub(crate) fn check_question(message: &[u8]) -> Result<()> {
    decode::<Question>(message).map(drop)
}

/// One question of each kind, for tests with altered questions.
#[cfg(test)]
pub(crate) fn examples_of_questions() -> Vec<Vec<u8>> {
    tests::questions().iter().map(|question| encode(question).unwrap_or_default()).collect()
}

#[cfg(test)]
mod tests {
    use crate::error::failed;
    use model_runtime::{KvCache, LogitsOut, ModelInfo, Observer, StepContext, StepViews};

    use super::*;
    use crate::testing::small_model;

    /// A model that never runs.
    struct Idle(ModelInfo);

    impl CausalLm for Idle {
        fn info(&self) -> &ModelInfo {
            &self.0
        }

        fn forward(
            &self,
            _: &StepViews,
            _: &mut KvCache,
            _: LogitsOut,
            _: Option<&mut dyn Observer>,
            _: &mut StepContext,
            _: &mut Exec,
        ) -> candle_core::Result<()> {
            candle_core::bail!("no step was asked for")
        }
    }

    pub(super) fn questions() -> Vec<Question> {
        let config = || Box::new(EngineConfig { kv_cache_memory: Some(1 << 14), ..EngineConfig::default() });
        let request = Request { max_tokens: Some(5), ..Request::new(vec![1, 2, 3]) };
        let limit = Duration::from_secs(1);
        let round = MoveRound { layer: 0, phy2log: vec![0], sole: vec![0], bytes: 1, limit };
        vec![
            Question::Start(config(), false),
            Question::Limit(60),
            Question::Add(RequestId(1), Duration::from_millis(5), Box::new(request)),
            Question::Move(round),
        ]
    }

    /// Whatever bit of a question flips, an engine answers it, refuses it or ends with an error.
    #[test]
    fn altered_questions_never_panic() {
        let model = Idle(small_model(64));
        for question in questions() {
            let bytes = encode(&question).unwrap();
            for bit in 0..8 * bytes.len() {
                let mut altered = bytes.clone();
                altered[bit / 8] ^= 1 << (bit % 8);
                let Ok(altered) = decode::<Question>(&altered) else { continue };
                let start = questions().swap_remove(0);
                // A step of the idle model fails, so what is there after it was taken in.
                let mut asked = vec![Question::Step, Question::Stats, altered, start];
                let next = |_| Ok(asked.pop().map_or(Next::Stop, Next::Answer));
                let _ = answer_all((&model, &Exec::cpu()), |_| Ok((None, None)), next, |_| Ok(()));
            }
        }
    }

    #[test]
    fn questions_that_no_driver_asks_are_errors() {
        let ask = |last: fn() -> Vec<Question>| {
            let mut asked = last();
            asked.push(questions().swap_remove(0));
            let next = |_| Ok(asked.pop().map_or(Next::Stop, Next::Answer));
            let answered =
                answer_all((&Idle(small_model(64)), &Exec::cpu()), |_| Ok((None, None)), next, |_| Ok(()));
            answered.unwrap_err().to_string()
        };
        assert!(ask(|| vec![Question::Limit(0)]).contains("expected 1 to"));
        assert!(ask(|| vec![Question::Limit(65)]).contains("expected 1 to"));
        assert!(
            ask(|| vec![questions().swap_remove(2), questions().swap_remove(2)])
                .contains("request 1 for the second time")
        );
        assert!(ask(|| vec![Question::Move(MoveRound { layer: 7, ..round() })]).contains("moving experts"));
    }

    fn round() -> MoveRound {
        match questions().pop() {
            Some(Question::Move(round)) => round,
            _ => panic!("the last question moves experts"),
        }
    }

    #[test]
    fn a_rank_without_its_tokenizer_refuses_text_and_says_why() {
        let config = || Box::new(EngineConfig { kv_cache_memory: Some(1 << 16), ..EngineConfig::default() });
        let mut questions = vec![Question::Start(config(), false), Question::Start(config(), true)];
        let next = |_| Ok(questions.pop().map_or(Next::Stop, Next::Answer));
        let tokenizer = Err(failed!("not JSON").context("tokenizer.json"));
        let mut replies = Vec::new();
        let keep = |reply| {
            replies.push(reply);
            Ok(())
        };
        answer_all((&Idle(small_model(64)), &Exec::cpu()), |text| texts_of(&tokenizer, text), next, keep)
            .unwrap();
        let [Reply::Refused(why), Reply::Started(64)] = &replies[..] else {
            panic!("{} replies", replies.len())
        };
        assert!(why.contains("no tokenizer") && why.contains("tokenizer.json: not JSON"), "{why}");
    }
}
