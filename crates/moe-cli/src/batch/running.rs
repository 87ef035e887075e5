//! The run itself: lines go from the reader through the window into the engine, and answers into the output.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use anyhow::{Error, Result};
use moe_engine::engine::{DpEngine, Output, RequestId, Stats};
use moe_engine::structured::Precompiled;
use moe_engine::tokenizer::Tokenizer;

use super::answer::{Choice, Record};
use super::completion;
use super::entries::{Entry, Key, Work};
use super::fields::ApiError;
use super::fingerprint::Fingerprint;
use super::job::{Form, Job};
use super::journal::Journal;
use super::metrics::Metrics;
use super::progress::Progress;
use super::reasons::Reasons;
use super::repeats::{Answer, Follower, Repeated, Repeats};
use super::window::{Upcoming, Window};
use crate::interrupt::Interrupt;

/// How often an idle run checks for an interrupt.
const LOOK: Duration = Duration::from_millis(50);

/// A line whose choices are being generated.
struct Line {
    key: Key,
    repeats: Option<u64>,
    form: Form,
    requests: Vec<RequestId>,
    choices: Vec<Choice>,
    unfinished: usize,
    /// Keeps the grammar compiled as long as the line needs it.
    _grammar: Option<Precompiled>,
}

/// A run of a batch.
pub struct Batch {
    tokenizer: Option<Tokenizer>,
    pub journal: Journal,
    pub progress: Progress,
    pub reasons: Reasons,
    metrics: Option<Metrics>,
    /// The lines that wait for the engine.
    window: Window,
    /// Tokens of a step of all ranks, at most.
    step_tokens: usize,
    repeats: Repeats,
    /// The lines in the engine, by number.
    lines: HashMap<u64, Line>,
    /// The line of a request, and the index of its first choice.
    owners: HashMap<RequestId, (u64, usize)>,
    /// Whether there may be more entries.
    more: bool,
    /// Why there are no more, if that is an error.
    fault: Option<Error>,
}

impl Batch {
    /// A run that has not begun.
    pub fn new(
        tokenizer: Option<Tokenizer>,
        journal: Journal,
        window: Window,
        step_tokens: usize,
        progress: Progress,
        metrics: Option<Metrics>,
    ) -> Self {
        Self {
            tokenizer,
            journal,
            progress,
            reasons: Reasons::default(),
            metrics,
            window,
            step_tokens,
            repeats: Repeats::default(),
            lines: HashMap::new(),
            owners: HashMap::new(),
            more: true,
            fault: None,
        }
    }

    /// Answers all entries; false if it was interrupted. After an error of the engine it may be called again, with an
    /// engine that has taken over what the other one left.
    pub fn run(
        &mut self,
        engine: &mut DpEngine,
        entries: &Receiver<Result<Entry>>,
        interrupt: &Interrupt,
    ) -> Result<bool> {
        while self.more || !self.window.is_empty() || !engine.is_idle() {
            if interrupt.requested() {
                return Ok(false);
            }
            while self.more && !interrupt.requested() && self.reads() {
                match self.next(engine, entries) {
                    Ok(Some(Ok(entry))) => self.read(entry)?,
                    // Lines that were read are still answered, and their answers are kept.
                    Ok(Some(Err(e))) => (self.fault, self.more) = (Some(e), false),
                    Ok(None) => break,
                    Err(Closed) => {
                        self.progress.input_ended();
                        self.more = false;
                    }
                }
            }
            self.fill_engine(engine)?;
            let outputs = engine.step()?;
            engine.take_restarted().into_iter().for_each(|(request, index)| self.restart(request, index));
            outputs.into_iter().try_for_each(|output| self.output(output))?;
            self.progress.prompts = engine.prompt_progress();
            self.progress.show();
            if self.metrics.as_ref().is_some_and(Metrics::is_due) {
                self.write_metrics("running", &engine.stats());
            }
        }
        match self.fault.take() {
            Some(e) => Err(e),
            None => Ok(true),
        }
    }

    /// Writes a line of metrics, if they are wanted.
    pub fn write_metrics(&mut self, state: &str, stats: &Stats) {
        if let Some(metrics) = &mut self.metrics {
            metrics.write(state, &self.progress, stats);
        }
    }

    /// Ends the reports of a run that cannot go on without a rank that it lost.
    pub fn fail(&mut self) {
        self.progress.finish();
        self.write_metrics("failed", &Stats::default());
    }

    /// Whether there is room for another line.
    fn reads(&self) -> bool {
        !self.window.is_full() && self.repeats.waiting < self.window.capacity()
    }

    /// The next entry, if there is one now. If there is nothing else to do, it waits briefly for one.
    fn next(
        &self,
        engine: &DpEngine,
        entries: &Receiver<Result<Entry>>,
    ) -> Result<Option<Result<Entry>>, Closed> {
        let is_idle = engine.is_idle() && self.window.is_empty();
        match entries.recv_timeout(if is_idle { LOOK } else { Duration::ZERO }) {
            Ok(entry) => Ok(Some(entry)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(Closed),
        }
    }

    fn read(&mut self, entry: Entry) -> Result<()> {
        self.progress.read += 1;
        self.progress.show();
        let Entry { line: number, key, repeats, work } = entry;
        match (work, repeats) {
            (Work::Done(at), repeats) => {
                self.progress.skipped += 1;
                if let (Some(at), Some(hash)) = (at, repeats) {
                    self.repeats.answered(hash, at);
                }
                Ok(())
            }
            (Work::Refused(error), _) => self.refuse(number, &key, &error),
            (Work::Job(_), Some(hash)) if self.is_repeated(hash, number, &key)? => Ok(()),
            (Work::Job(job), repeats) => {
                self.window.add(Upcoming { number, key, repeats, job });
                Ok(())
            }
        }
    }

    /// Whether a line has the answer of another line, or will have it.
    fn is_repeated(&mut self, hash: u64, number: u64, key: &Key) -> Result<bool> {
        let at = match self.repeats.find(hash, number, key) {
            Answer::Unknown => return Ok(false),
            Answer::Coming => return Ok(true),
            Answer::At(at) => at,
        };
        let record = self.journal.record_at(at)?;
        let Some(repeated) = record.as_deref().and_then(|record| Repeated::of(record, key)) else {
            self.repeats.forget(hash);
            return Ok(self.repeats.find(hash, number, key) == Answer::Coming);
        };
        self.journal.append(key, repeated)?;
        self.progress.repeated += 1;
        self.count(number, None);
        Ok(true)
    }

    /// Gives lines to the engine. From a full window, in which lines find the ones that share their prefix, it gets all
    /// that it has room for. While the window fills, it gets the prompts of a step.
    fn fill_engine(&mut self, engine: &mut DpEngine) -> Result<()> {
        let room = self.window.capacity().div_ceil(2);
        let prompts = self.progress.prompts;
        let mut tokens = prompts.total - prompts.computed;
        while engine.num_unfinished() < room
            && (!self.more || self.window.is_full() || tokens < self.step_tokens)
            && let Some(line) = self.window.take()
        {
            tokens += line.job.form.prompt_tokens() as usize;
            self.generate(engine, line)?;
        }
        Ok(())
    }

    /// Passes the requests of a line to the engine: all of them or none.
    fn generate(&mut self, engine: &mut DpEngine, line: Upcoming) -> Result<()> {
        let Upcoming { number, key, repeats, job } = line;
        let Job { requests: asked, form, grammar } = *job;
        let mut requests = Vec::with_capacity(asked.len());
        for request in asked {
            match engine.add(request) {
                Ok(id) => requests.push(id),
                Err(e) => {
                    let error = form.refused(e);
                    self.refuse(number, &key, &error)?;
                    let mut followers = self.followers(&key, repeats).into_iter();
                    followers.try_for_each(|line| self.refuse(line.number, &line.key, &error))?;
                    return Ok(requests.into_iter().try_for_each(|id| engine.cancel(id))?);
                }
            }
        }
        let n = form.n;
        let owners = requests.iter().enumerate().map(|(i, id)| (*id, (number, i * n)));
        self.owners.extend(owners);
        let unfinished = requests.len() * n;
        let choices = std::iter::repeat_with(Choice::default).take(unfinished).collect();
        let line = Line { key, repeats, form, requests, choices, unfinished, _grammar: grammar };
        self.lines.insert(number, line);
        Ok(())
    }

    /// Forgets what a choice has generated: its rank was lost, and it begins again on another one.
    fn restart(&mut self, request: RequestId, index: usize) {
        let Some(&(number, first)) = self.owners.get(&request) else { return };
        let line = self.lines.get_mut(&number);
        let Some(choice) = line.and_then(|line| line.choices.get_mut(first + index)) else { return };
        self.progress.tokens -= choice.num_tokens as u64;
        *choice = Choice::default();
    }

    fn output(&mut self, output: Output) -> Result<()> {
        let request = output.request;
        let index = output.choice;
        // A cancelled request belongs to no line.
        let Some(&(number, first)) = self.owners.get(&request) else { return Ok(()) };
        let Some(line) = self.lines.get_mut(&number) else { return Ok(()) };
        let Some(choice) = line.choices.get_mut(first + index) else { return Ok(()) };
        self.progress.tokens += u64::from(output.token_id.is_some());
        if !choice.push(output) {
            return Ok(());
        }
        line.unfinished -= 1;
        if line.unfinished > 0 {
            return Ok(());
        }
        let Some(line) = self.lines.remove(&number) else { return Ok(()) };
        for id in &line.requests {
            self.owners.remove(id);
        }
        self.progress.prompt_tokens += line.form.prompt_tokens();
        self.finish(number, line)
    }

    /// Writes the answer of a line, also for the lines that ask the same.
    fn finish(&mut self, number: u64, mut line: Line) -> Result<()> {
        let at = self.answer(number, &line.key, &line.form, &line.choices)?;
        if let (Some(at), Some(hash)) = (at, line.repeats) {
            self.repeats.answered(hash, at);
        }
        for follower in self.followers(&line.key, line.repeats) {
            let key = &follower.key;
            line.form.name = Fingerprint::of(&key.custom_id);
            self.answer(follower.number, key, &line.form, &line.choices)?;
        }
        Ok(())
    }

    /// The lines that wait for the answer of the line with this key, which has come.
    fn followers(&mut self, key: &Key, repeats: Option<u64>) -> Vec<Follower> {
        let followers = repeats.map_or_else(Vec::new, |hash| self.repeats.finished(hash, key));
        self.progress.repeated += followers.len() as u64;
        followers
    }

    /// Writes a record from what was generated. Returns its offset, if it is an answer in an output that can be read
    /// again.
    fn answer(&mut self, number: u64, key: &Key, form: &Form, choices: &[Choice]) -> Result<Option<u64>> {
        let result = completion::body(&key.id, form, choices, self.tokenizer.as_ref());
        let message = result.as_ref().err().map(|error| error.message.clone());
        let at = self.journal.append(key, Record { key, result: &result })?;
        self.count(number, message.as_deref());
        Ok(at.filter(|_| message.is_none()))
    }

    /// Refuses a line.
    fn refuse(&mut self, number: u64, key: &Key, error: &ApiError) -> Result<()> {
        self.count(number, Some(&error.message));
        self.journal.append(key, Record { key, result: &Err::<(), _>(error.clone()) }).map(drop)
    }

    /// Counts a line that has an answer, or this error.
    fn count(&mut self, number: u64, error: Option<&str>) {
        self.progress.answered += 1;
        self.progress.errors += u64::from(error.is_some());
        error.into_iter().for_each(|error| self.reasons.add(number, error));
    }
}

/// The input has ended.
struct Closed;
