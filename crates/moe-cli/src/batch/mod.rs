//! `batch`: answers a file of requests in OpenAI's batch format, as vLLM's `run_batch` does.
//!
//! ```text
//! input ─► lines ─► entries (thread: parse, tokenize) ─► engine ─► records ─► output
//!                     ▲ known: what is answered ◄──────────── read at the start ──┘
//! ```
//!
//! Only a window of requests is in memory. A record is written as soon as its line is answered, in
//! any order; a rerun reads the output first and answers what is left.

mod ahead;
mod answer;
mod api;
mod body;
mod compiling;
mod completion;
mod encoding;
mod entries;
mod errors;
mod exact;
mod fields;
mod fingerprint;
mod held;
mod input;
mod job;
mod journal;
mod known;
mod logprobs;
mod parser;
mod progress;
mod prompts;
mod reasons;
mod records;
mod replace;
mod served;
mod settings;
mod structured;
#[cfg(test)]
mod tests;
mod tools;
mod unsupported;
mod untouched;

use std::collections::HashMap;
use std::path::Path;
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use anyhow::{Context, Result};
use moe_engine::chat::{AnswerForm, ChatTemplate, this_program};
use moe_engine::engine::{DpEngine, EngineConfig, Output, Request, RequestId, SchedulingPolicy};
use moe_engine::structured::Precompiled;
use moe_engine::terminal::{hint, note, note_error};
use moe_engine::tokenizer::Tokenizer;
use moe_engine::{Session, usage};
use tracing::info;

use crate::Program;
use crate::cli::{BatchArgs, InputFormat};
use crate::interrupt::Interrupt;
use crate::model::Model;
use crate::options;
use crate::preflight::Asks;
use crate::session;

use ahead::read_ahead;
use answer::{Choice, Record};
use compiling::compile_ahead;
use entries::{Entries, Entry, Format, Key, Work};
use fields::ApiError;
use input::Lines;
use job::{Form, Job};
use journal::{Earlier, Journal};
use known::Known;
use parser::Parser;
use reasons::Reasons;
use served::Served;
use settings::Settings;

pub(crate) use fields::short;
pub(crate) use input::Total;
pub(crate) use progress::Progress;

/// Requests in the engine for each that runs: the longest of them start first.
const WINDOW: usize = 8;
/// Grammars that are compiled at the same time.
const COMPILERS: usize = 2;
/// How often an idle run looks whether it is interrupted.
const LOOK: Duration = Duration::from_millis(50);

/// Runs the command.
pub fn run(program: &Program, args: &BatchArgs) -> Result<ExitCode> {
    let format = format(args)?;
    let (lines, guess) = Lines::open(&args.input)?;
    let mut known = Known::with_lines(guess.unwrap_or(0));
    let mut journal = Journal::open(&args.output, &args.input, earlier(args), &mut known)?;
    let interrupt = Interrupt::install()?;
    let model = Model::Checkpoint(args.answer.model.as_deref());
    let asks = Asks::of_batch(args);
    let mut session = session::open(program, model, &args.answer.run, false, &asks)?;
    let tokenizer = (!args.skip_tokenizer_init).then(|| session.tokenizer()).transpose()?;
    // Nobody waits for a single request here.
    let default =
        EngineConfig { scheduling_policy: SchedulingPolicy::LongestFirst, ..session.engine_defaults() };
    let config = options::engine_config(&args.answer.engine, default);
    let engine = session.engine(tokenizer.clone(), &config).map_err(|e| usage(format!("{e:#}")))?;
    let chat = options::chat_files(&args.answer.chat, &session)?;
    let answer = args.answer.chat.answer_form(chat.as_ref(), false);
    let parser = parser(args, &session, tokenizer.clone(), answer, engine.max_model_len())?;
    let dtype = session.model.info().dtype.as_str();
    journal.begin(&Settings::new(&parser, chat.as_ref(), dtype)?)?;
    if journal.records > 0 {
        info!("{} holds {} records; what they answer is skipped", args.output.display(), journal.records);
    }
    let progress = Progress::new(Total::count(&args.input), args.progress_interval);
    let entries = read_ahead(Entries { format, lines, known, parser })?;
    let program = this_program().context("cannot find this program, which compiles grammars")?;
    let compilers = (0..COMPILERS).filter_map(|_| engine.precompiler(program.clone())).collect();
    let entries = compile_ahead(entries, compilers)?;
    let mut batch = Batch {
        engine,
        tokenizer,
        journal,
        window: config.max_num_seqs.saturating_mul(WINDOW).saturating_mul(args.answer.run.parallel.dp),
        lines: HashMap::new(),
        owners: HashMap::new(),
        progress,
        reasons: Reasons::default(),
    };
    interrupt.begin_run()?;
    let result = batch.run(&entries, &interrupt);
    batch.progress.finish();
    batch.progress.earlier_errors = batch.journal.earlier_errors;
    hint(&batch.progress);
    hint(&batch.reasons);
    if args.answer.engine.stats {
        note(format_args!("{}{}", batch.engine.stats(), crate::parallel::experts_report(&batch.engine)));
    }
    let finished = result?;
    let errors = batch.progress.all_errors();
    let answers = batch.journal.answers + batch.progress.answered - batch.progress.errors;
    let how_to_continue = batch.journal.how_to_continue();
    batch.journal.finish()?;
    drop(batch.engine);
    session.finish()?;
    if !finished {
        note(format_args!("stopped; {how_to_continue}"));
        return Ok(ExitCode::from(Interrupt::EXIT_CODE));
    }
    if errors > 0 && answers == 0 {
        note_error("no line has an answer: every record of the output is an error");
        return Ok(ExitCode::FAILURE);
    }
    Ok(ExitCode::from(u8::from(args.fail_on_error && errors > 0)))
}

fn format(args: &BatchArgs) -> Result<Format> {
    match (args.input_format, args.chat) {
        (InputFormat::Jsonl, false) => Ok(Format::Request),
        (InputFormat::Jsonl, true) => {
            Err(usage("--chat is for --input-format text: the url of a JSON line says what it asks for"))
        }
        (InputFormat::Text, false) => Ok(Format::Prompt),
        (InputFormat::Text, true) => Ok(Format::Question),
    }
}

fn earlier(args: &BatchArgs) -> Earlier {
    match (args.overwrite, args.retry_errors) {
        (true, _) => Earlier::Overwrite,
        (false, true) => Earlier::RetryErrors,
        (false, false) => Earlier::Keep,
    }
}

/// Checks a line of an input as [`run`] would, for a model with this tokenizer and chat template,
/// and compiles its structured output: how many prompts it has.
///
/// # Errors
/// The message of its error record.
pub fn check_line(
    line: &[u8],
    tokenizer: &Tokenizer,
    template: Option<&ChatTemplate>,
    max_model_len: usize,
) -> Result<usize, String> {
    let parser = Parser {
        tokenizer: Some(tokenizer.clone()),
        answer: AnswerForm::default(),
        template: template.cloned(),
        template_kwargs: serde_json::Map::new(),
        defaults: Request::new(Vec::new()),
        seed: 0,
        max_model_len,
        routing_bytes: 0,
        served: Served::new(None, true),
    };
    let job = entries::job(line, &parser).map_err(|e| e.message)?;
    for output in job.requests.iter().filter_map(|request| request.structured_output.as_ref()) {
        output.check(Some(tokenizer)).map_err(|e| e.to_string())?;
    }
    Ok(job.requests.len())
}

/// Reads an output file as a run that continues it would, and cuts off a torn last line: how many records it holds.
///
/// # Errors
/// It cannot be read, or holds something else than records; then it is left as it is.
pub fn check_output(path: &Path) -> Result<u64> {
    let input = Path::new("-");
    Journal::open(path, input, Earlier::Keep, &mut Known::with_lines(0)).map(|journal| journal.records)
}

fn parser(
    args: &BatchArgs,
    session: &Session,
    tokenizer: Option<Tokenizer>,
    answer: AnswerForm,
    max_model_len: usize,
) -> Result<Parser> {
    Ok(Parser {
        tokenizer,
        answer,
        template: options::chat_template(&args.answer.chat, session)?,
        template_kwargs: args.answer.chat.chat_template_kwargs.clone().unwrap_or_default(),
        defaults: Request {
            capture_routing: args.enable_return_routed_experts,
            ..options::api_defaults(&args.answer.sampling, session)?
        },
        seed: args.answer.sampling.seed,
        max_model_len,
        routing_bytes: routing_bytes(session),
        served: Served::new(args.answer.model.as_deref(), args.any_model),
    })
}

/// Bytes of the experts of a token.
fn routing_bytes(session: &Session) -> usize {
    let moe = session.model.info().moe.as_ref();
    moe.map_or(0, |moe| moe.layers.len() * moe.top_k * size_of::<u32>())
}

/// A line whose choices are being generated.
struct Line {
    key: Key,
    form: Form,
    requests: Vec<RequestId>,
    choices: Vec<Choice>,
    unfinished: usize,
    /// It stays compiled as long as the line needs it.
    _grammar: Option<Precompiled>,
}

struct Batch<'m> {
    engine: DpEngine<'m>,
    tokenizer: Option<Tokenizer>,
    journal: Journal,
    /// The most choices in the engine.
    window: usize,
    /// By line number.
    lines: HashMap<u64, Line>,
    /// The line of a request and the place of its first choice.
    owners: HashMap<RequestId, (u64, usize)>,
    progress: Progress,
    reasons: Reasons,
}

impl Batch<'_> {
    /// Answers all entries; false if it was interrupted.
    fn run(&mut self, entries: &Receiver<Result<Entry>>, interrupt: &Interrupt) -> Result<bool> {
        let mut more = true;
        let mut fault = None;
        while more || !self.engine.is_idle() {
            if interrupt.requested() {
                return Ok(false);
            }
            while more && !interrupt.requested() && self.engine.num_unfinished() < self.window {
                match self.next(entries) {
                    Ok(Some(Ok(entry))) => self.start(entry)?,
                    // What is under way still ends, and is kept.
                    Ok(Some(Err(e))) => (fault, more) = (Some(e), false),
                    Ok(None) => break,
                    Err(Closed) => {
                        self.progress.input_ended();
                        more = false;
                    }
                }
            }
            for output in self.engine.step()? {
                self.output(output)?;
            }
            self.progress.prompts = self.engine.prompt_progress();
            self.progress.show();
        }
        match fault {
            Some(e) => Err(e),
            None => Ok(true),
        }
    }

    /// The next entry, if there is one now; waits a moment for it if there is nothing else to do.
    fn next(&self, entries: &Receiver<Result<Entry>>) -> Result<Option<Result<Entry>>, Closed> {
        let wait = if self.engine.is_idle() { LOOK } else { Duration::ZERO };
        match entries.recv_timeout(wait) {
            Ok(entry) => Ok(Some(entry)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(Closed),
        }
    }

    fn start(&mut self, entry: Entry) -> Result<()> {
        self.progress.read += 1;
        self.progress.show();
        match entry.work {
            Work::Done => {
                self.progress.skipped += 1;
                Ok(())
            }
            Work::Refused(error) => self.refuse(entry.line, &entry.key, error),
            Work::Job(job) => self.generate(entry.line, entry.key, *job),
        }
    }

    /// Gives the requests of a line to the engine: all of them or none.
    fn generate(&mut self, number: u64, key: Key, job: Job) -> Result<()> {
        let mut requests = Vec::with_capacity(job.requests.len());
        for request in job.requests {
            match self.engine.add(request) {
                Ok(id) => requests.push(id),
                Err(e) => {
                    requests.into_iter().try_for_each(|id| self.engine.cancel(id))?;
                    return self.refuse(number, &key, job.form.refused(e));
                }
            }
        }
        let n = job.form.n;
        let owners = requests.iter().enumerate().map(|(i, id)| (*id, (number, i * n)));
        self.owners.extend(owners);
        let unfinished = requests.len() * n;
        let choices = std::iter::repeat_with(Choice::default).take(unfinished).collect();
        let line = Line { key, form: job.form, requests, choices, unfinished, _grammar: job.grammar };
        self.lines.insert(number, line);
        Ok(())
    }

    fn output(&mut self, output: Output) -> Result<()> {
        let request = output.request;
        let index = output.choice;
        // Nobody waits for a request that was cancelled.
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
        let Line { key, form, choices, .. } = &line;
        let result = completion::body(&key.id, form, choices, self.tokenizer.as_ref());
        let message = result.as_ref().err().map(|error| error.message.clone());
        self.journal.append(key, message.is_some(), Record { key, result: &result })?;
        self.count(number, message.as_deref());
        Ok(())
    }

    /// Refuses a line.
    fn refuse(&mut self, line: u64, key: &Key, error: ApiError) -> Result<()> {
        self.count(line, Some(&error.message));
        self.journal.append(key, true, Record { key, result: &Err::<(), _>(error) })
    }

    /// Counts a line that has an answer, or this error.
    fn count(&mut self, line: u64, error: Option<&str>) {
        self.progress.answered += 1;
        if let Some(error) = error {
            self.reasons.add(line, error);
        }
        let is_error = error.is_some();
        self.progress.errors += u64::from(is_error);
    }
}

/// The input has ended.
struct Closed;
