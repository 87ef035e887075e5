//! Offline generation for Mixture-of-Experts models: tokenizer, command line, generate, chat,
//! batch, parity, bench.
#![doc = include_str!("../README.md")]

pub mod batch;
pub mod bench;
pub mod chat;
pub mod chat_command;
pub mod cli;
pub mod engine;
mod error;
pub mod family;
pub mod generate;
mod interrupt;
pub mod options;
pub mod parity;
mod prompt;
pub mod routing;
pub mod session;
pub mod tokenizer;

use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;

use cli::{Cli, Command, ParityArgs};
pub use family::{Embedded, LoadedModel, ModelFamily};
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
    match &cli.command {
        None => {
            start_log(&cli.generate.run.log)?;
            generate::run::<F>(&cli.generate)?;
        }
        Some(Command::Generate(args)) => {
            start_log(&args.run.log)?;
            generate::run::<F>(args)?;
        }
        Some(Command::Chat(args)) => {
            start_log(&args.run.log)?;
            chat_command::run::<F>(args)?;
        }
        Some(Command::Batch(args)) => {
            start_log(&args.run.log)?;
            return batch::run::<F>(args);
        }
        Some(Command::Parity(args)) => {
            start_log(&args.run.log)?;
            return run_parity::<F>(args);
        }
        Some(Command::Bench(args)) => {
            start_log(&args.run.log)?;
            bench::run::<F>(args)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn run_parity<F: ModelFamily>(args: &ParityArgs) -> Result<ExitCode> {
    let mut session = Session::open::<F>(Some(&args.model), &args.run, false)?;
    let report = parity::compare(session.model.as_ref(), &args.reference, &mut session.ex)?;
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

fn start_log(filter: &str) -> Result<()> {
    let filter = tracing_subscriber::EnvFilter::try_new(filter)
        .map_err(|e| usage(format!("--log {filter}: {e}; expected a level such as info, or target=level")))?;
    // A second call in one process (tests) keeps the first log.
    let colours = std::io::stderr().is_terminal();
    let format = tracing_subscriber::fmt().without_time().with_target(false).with_ansi(colours);
    let _ = format.with_env_filter(filter).with_writer(std::io::stderr).try_init();
    Ok(())
}
