//! Offline generation for Mixture-of-Experts models: tokenizer, command line, generate, chat,
//! batch, parity, bench.
#![doc = include_str!("../README.md")]

pub mod batch;
pub mod bench;
pub mod chat;
pub mod chat_command;
pub mod cli;
mod device;
pub mod engine;
mod error;
pub mod family;
pub mod generate;
pub mod heat;
pub mod hub;
mod interrupt;
pub mod options;
pub mod parallel;
pub mod parity;
pub mod profile;
mod prompt;
mod roofline;
pub mod routing;
pub mod session;
pub mod tokenizer;
mod worker;

use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;

use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, fmt};

use cli::{Cli, Command, ParityArgs, RunArgs};
pub use family::{Embedded, LoadOptions, LoadedModel, ModelFamily};
pub use model_runtime::HugePages;
use profile::Profile;
pub use session::Session;

/// A mistake in how the program was called: exit code 2, like clap's own.
#[derive(Debug)]
struct Usage(String);

impl std::fmt::Display for Usage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

fn usage(message: impl Into<String>) -> anyhow::Error {
    anyhow::Error::new(Usage(message.into()))
}

/// The whole program of a model family: parses the command line, runs it, reports errors on
/// stderr. Exit code 0: done; 1: it failed; 2: it was called wrongly.
pub fn main<F: ModelFamily>() -> ExitCode {
    bench::mark_start();
    let cli = Cli::parse();
    match run::<F>(&cli) {
        Ok(code) => code,
        Err(e) => {
            eprintln!("error: {}", error::describe(&e));
            ExitCode::from(if e.downcast_ref::<Usage>().is_some() { 2 } else { 1 })
        }
    }
}

fn run<F: ModelFamily>(cli: &Cli) -> Result<ExitCode> {
    let args = match &cli.command {
        None => &cli.generate.run,
        Some(Command::Generate(args)) => &args.run,
        Some(Command::Chat(args)) => &args.run,
        Some(Command::Batch(args)) => &args.run,
        Some(Command::Parity(args)) => &args.run,
        Some(Command::Bench(args)) => &args.run,
        Some(Command::RenderChatTemplates) => return chat::serve().map(|()| ExitCode::SUCCESS),
    };
    if let parallel::Placement::Launched(launch) = parallel::placement(args)?
        && launch.rank > 0
    {
        start_log(&RunArgs { profile: None, log: worker::log(&args.log), ..args.clone() })?;
        return worker::run::<F>(cli, args).map(|()| ExitCode::SUCCESS);
    }
    let profile = start_log(args)?;
    let code = run_command::<F>(cli)?;
    profile.map_or(Ok(()), Profile::finish)?;
    Ok(code)
}

fn run_command<F: ModelFamily>(cli: &Cli) -> Result<ExitCode> {
    match &cli.command {
        None => generate::run::<F>(&cli.generate)?,
        Some(Command::Generate(args)) => generate::run::<F>(args)?,
        Some(Command::Chat(args)) => chat_command::run::<F>(args)?,
        Some(Command::Batch(args)) => return batch::run::<F>(args),
        Some(Command::Parity(args)) => return run_parity::<F>(args),
        Some(Command::Bench(args)) => bench::run::<F>(args)?,
        Some(Command::RenderChatTemplates) => chat::serve()?,
    }
    Ok(ExitCode::SUCCESS)
}

fn run_parity<F: ModelFamily>(args: &ParityArgs) -> Result<ExitCode> {
    if args.run.parallel.dp > 1 {
        return Err(usage("parity runs the reference's tokens on one data-parallel group; use --dp 1"));
    }
    let mut session = Session::open::<F>(Some(args.model.as_str()), &args.run, false)?;
    let report = parity::compare(session.model.as_ref(), &args.reference, &mut session.ex)?;
    session.finish()?;
    write_json(args.json.as_deref(), &report)?;
    for failure in &report.failures {
        eprintln!("parity: {failure}");
    }
    Ok(ExitCode::from(u8::from(!report.passed)))
}

/// Writes a result as JSON to a file, or to stdout.
fn write_json(path: Option<&std::path::Path>, value: &impl serde::Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value)? + "\n";
    match path {
        Some(path) => std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display())),
        None => write_stdout(&text),
    }
}

/// Writes to stdout and flushes. A reader that has seen enough (`head`) is no failure of ours.
fn write_stdout(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => Err(e).context("cannot write to stdout"),
        _ => Ok(()),
    }
}

/// Starts the log on stderr and, if asked for, the profile.
fn start_log(args: &RunArgs) -> Result<Option<Profile>> {
    let filter = EnvFilter::try_new(&args.log).map_err(|e| {
        usage(format!("--log {}: {e}; expected a level such as info, or target=level", args.log))
    })?;
    let profile = args.profile.as_deref().map(Profile::create).transpose()?;
    let colours = std::io::stderr().is_terminal();
    let log = fmt::layer().without_time().with_target(false).with_ansi(colours).with_writer(std::io::stderr);
    // The log's level says nothing about the profile, which wants every span and no message.
    let spans = profile.as_ref().map(|p| p.layer().with_filter(filter_fn(profile::wants)));
    // A second call in one process (tests) keeps the first log.
    let _ = tracing_subscriber::registry().with(log.with_filter(filter)).with(spans).try_init();
    Ok(profile)
}
