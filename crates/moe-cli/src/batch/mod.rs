//! `batch`: answers a file of requests in OpenAI's batch format, as vLLM's `run_batch` does.
//!
//! ```text
//! input ─► lines ─► entries (thread: parse, tokenize) ─► window ─► engine ─► records ─► output
//!                     ▲ known: what is answered ◄──────────────────── read at the start ──┘
//! ```
//!
//! Only the window and the engine's requests are in memory. A record is written as soon as its line is answered, in any
//! order. A rerun reads the output first and answers the remaining lines. With the feature `parquet` a table can be the
//! input, whose rows become lines, and the output, which is made of the records when all are there.

mod answer;
mod api;
mod body;
mod compiling;
mod completion;
mod encoding;
mod entries;
mod exact;
mod fields;
mod fingerprint;
mod held;
mod input;
mod job;
mod journal;
mod known;
mod logprobs;
mod metrics;
mod parser;
mod prices;
mod progress;
mod prompts;
mod reasons;
mod records;
mod repeats;
mod replace;
mod running;
mod served;
mod settings;
mod source;
mod structured;
#[cfg(feature = "parquet")]
mod tables;
#[cfg(not(feature = "parquet"))]
#[path = "no_tables.rs"]
mod tables;
mod target;
#[cfg(test)]
mod tests;
mod tools;
mod unsupported;
mod untouched;
mod window;

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use moe_engine::Session;
use moe_engine::chat::{AnswerForm, ChatTemplate, this_program};
use moe_engine::engine::{EngineConfig, Request, SchedulingPolicy};
use moe_engine::terminal::{hint, note, note_error};
use moe_engine::tokenizer::Tokenizer;
use tracing::info;

use crate::Program;
use crate::cli::{BatchArgs, InputFormat};
use crate::error::usage;
use crate::interrupt::Interrupt;
use crate::model::Model;
use crate::options;
use crate::preflight::Asks;
use crate::session;

use compiling::read_ahead;
use entries::{Entries, Format};
use journal::{Earlier, Journal};
use known::Known;
use metrics::Metrics;
use parser::Parser;
use prices::Prices;
use running::Batch;
use served::Served;
use settings::Settings;
use source::Input;
use target::Target;
use window::Window;

pub(crate) use fields::short;
pub(crate) use input::Total;
pub(crate) use progress::Progress;

/// Number of choices in the window for each one that can run; the engine has half as many more. The engine starts the
/// longest of them first.
const WINDOW: usize = 8;
/// Number of grammars that are compiled at the same time.
const COMPILERS: usize = 2;
/// The exit code if some lines have no answer and the flags ask for it. If the run itself fails, it is 1.
const SOME_FAILED: u8 = 3;

/// Runs the command.
pub fn run(program: &Program, args: &BatchArgs) -> Result<ExitCode> {
    let input = Input::open(&args.input, args.chat)?;
    let format = format(args, input.rows.is_some())?;
    let mut known = Known::with_lines(input.rows.or(input.guess).unwrap_or(0));
    let target = Target::of(&args.output, &args.input)?;
    let mut journal = Journal::open(&target.journal, &args.input, earlier(args), &mut known)?;
    let metrics = Metrics::open(args)?;
    let interrupt = Interrupt::install()?;
    let model = Model::Checkpoint(args.answer.model.as_deref());
    let asks = Asks::of_batch(args);
    let mut session = session::open(program, model, &args.answer.run, false, &asks)?;
    let tokenizer = (!args.skip_tokenizer_init).then(|| session.tokenizer()).transpose()?;
    // No user waits for a single request here.
    let default =
        EngineConfig { scheduling_policy: SchedulingPolicy::LongestFirst, ..session.engine_defaults() };
    let config = options::engine_config(&args.answer.engine, default);
    let mut engine = session.engine(tokenizer.clone(), &config).map_err(|e| usage(format!("{e:#}")))?;
    let chat = options::chat_files(&args.answer.chat, &session)?;
    let answer = args.answer.chat.answer_form(chat.as_ref(), false)?;
    let parser = parser(args, &session, tokenizer.clone(), answer, engine.max_model_len())?;
    let dtype = session.model.info().dtype.as_str();
    journal.begin(&Settings::new(&parser, chat.as_ref(), dtype)?)?;
    if journal.records > 0 {
        info!("{} holds {} records; what they answer is skipped", args.output.display(), journal.records);
    }
    let total = input.rows.map_or_else(|| Total::count(&args.input), Total::of);
    let mut progress = Progress::new(total, args.progress_interval);
    progress.prices = Prices { input: args.price_input, output: args.price_output };
    let program = this_program().context("cannot find this program, which compiles grammars")?;
    let compilers = (0..COMPILERS).filter_map(|_| engine.precompiler(program.clone())).collect();
    let entries = read_ahead(Entries { format, lines: input.lines, known, parser }, compilers)?;
    let dp = args.answer.run.parallel.dp;
    let window = window(&config, dp);
    let step_tokens = config.max_num_batched_tokens.saturating_mul(dp);
    let mut batch = Batch::new(tokenizer.clone(), journal, window, step_tokens, progress, metrics);
    interrupt.begin_run()?;
    let result = loop {
        match batch.run(&mut engine, &entries, &interrupt) {
            Err(_) if engine.has_failed() && session.may_go_on() => {}
            result => break result,
        }
        let unfinished = engine.leave();
        let config = unfinished.config(&config);
        let mut loss;
        (session, loss) = session.go_on().inspect_err(|_| batch.fail())?;
        engine = loop {
            match session.engine(tokenizer.clone(), &config) {
                Err(_) if session.may_go_on() => {}
                engine => break engine.inspect_err(|_| batch.fail())?,
            }
            // Another rank was lost before the first step.
            let later;
            (session, later) = session.go_on().inspect_err(|_| batch.fail())?;
            loss = loss.and(later);
        };
        engine.take_over(unfinished, &loss);
    };
    batch.progress.finish();
    batch.progress.earlier_errors = batch.journal.earlier_errors();
    let errors = batch.progress.all_errors();
    let answers = batch.journal.answers + batch.progress.answered - batch.progress.errors;
    let has_answers = errors == 0 || answers > 0;
    let state = match &result {
        Ok(true) if has_answers => "finished",
        Ok(false) => "stopped",
        _ => "failed",
    };
    batch.write_metrics(state, &engine.stats());
    hint(&batch.progress);
    hint(&batch.reasons);
    if args.answer.engine.stats {
        note(format_args!("{}{}", engine.stats(), crate::parallel::experts_report(&engine)));
    }
    let finished = result?;
    let how_to_continue = batch.journal.how_to_continue();
    batch.journal.finish()?;
    drop(engine);
    session.finish()?;
    if !finished {
        note(format_args!("stopped; {how_to_continue}{}", target.unfinished()));
        return Ok(ExitCode::from(Interrupt::EXIT_CODE));
    }
    target.finish()?;
    if !has_answers {
        note_error("no line has an answer: every record of the output is an error");
        return Ok(ExitCode::FAILURE);
    }
    Ok(ExitCode::from(if args.fail_on_error && errors > 0 { SOME_FAILED } else { 0 }))
}

/// The window of a run with these settings. With `fcfs` lines start in the order of the input.
fn window(config: &EngineConfig, dp: usize) -> Window {
    let capacity = config.max_num_seqs.saturating_mul(WINDOW).saturating_mul(dp);
    let groups = config.enable_prefix_caching && config.scheduling_policy == SchedulingPolicy::LongestFirst;
    Window::new(capacity, groups.then_some(config.block_size))
}

fn format(args: &BatchArgs, is_table: bool) -> Result<Format> {
    match (args.input_format, args.chat) {
        (InputFormat::Jsonl, _) if is_table => Ok(Format::Request),
        (_, _) if is_table => Err(usage("--input-format text is for lines, and the input is a Parquet file")),
        (InputFormat::Jsonl, false) => Ok(Format::Request),
        (InputFormat::Jsonl, true) => Err(usage(
            "--chat is for --input-format text and for Parquet files: the url of a JSON line says what it asks for",
        )),
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

/// Checks a line of an input as [`run`] would, for a model with this tokenizer and chat template, compiles its
/// structured output, and returns the number of its prompts.
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

/// Reads an output file as a continuing run would, removes an incomplete last line, and returns the number of records.
///
/// # Errors
/// It cannot be read, or contains something other than records; then it is not changed.
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
