//! The command line of a program: generate, chat, batch, parity, bench.
#![doc = include_str!("../README.md")]

pub mod batch;
pub mod bench;
pub mod chat_command;
pub mod cli;
mod devices;
mod download;
mod error;
mod fitting;
mod flag_file;
pub mod generate;
pub mod hub;
mod inspect;
mod interrupt;
mod log;
mod messages;
pub mod model;
pub mod options;
mod output;
pub mod parallel;
pub mod parity;
pub mod preflight;
pub mod profile;
mod program;
mod prompt;
mod prompt_progress;
mod roofline;
pub mod routing;
pub mod session;
mod setting_names;
mod shell;
mod show;
mod token_names;
pub mod values;
mod watch;

use std::process::ExitCode;

use anyhow::Result;
use moe_engine::parallel::{Placement, placement};
use moe_engine::terminal::{self, note};
use moe_engine::{chat, structured};

use crate::error::usage;

use cli::{About, Cli, Command, ParityArgs};
use model::Model;
use output::{check_writable, write_json};
use preflight::{Asks, Known};
use profile::Profile;

pub use model_runtime::HugePages;
pub use program::Program;
pub use {clap, moe_engine};

/// Runs a whole program: it parses the command line, runs the command and reports errors on stderr. The exit code is 0
/// when the command succeeded, 1 when it failed and 2 when the command line was wrong.
pub fn main(program: &Program) -> ExitCode {
    bench::mark_start();
    let parsed = Cli::command_about(std::env::args_os(), About::of(program));
    let mut command = parsed.unwrap_or_else(|e| e.exit());
    command.complete(program);
    if command.run_args().is_some_and(|args| args.quiet) {
        terminal::be_quiet();
    }
    match run(program, &command) {
        Ok(code) => code,
        Err(e) => {
            error::report(&e);
            moe_engine::end_failed(if crate::error::is_usage(&e) { 2 } else { 1 })
        }
    }
}

fn run(program: &Program, command: &Command) -> Result<ExitCode> {
    let Some(args) = command.run_args() else {
        return run_command(program, command);
    };
    if let Placement::Launched(launch) = placement(&args.config())?
        && launch.rank > 0
    {
        log::start_follower(args)?;
        let (model, check_weights) = command.model();
        return session::serve(program, model, args, check_weights, &Asks::of(command))
            .map(|()| ExitCode::SUCCESS);
    }
    let profile = log::start_driver(args)?;
    let code = run_command(program, command)?;
    profile.map_or(Ok(()), Profile::finish)?;
    Ok(code)
}

fn run_command(program: &Program, command: &Command) -> Result<ExitCode> {
    match command {
        Command::Generate(args) => generate::run(program, args)?,
        Command::Chat(args) => chat_command::run(program, args)?,
        Command::Batch(args) => return batch::run(program, args),
        Command::Parity(args) => return run_parity(program, args),
        Command::Bench(args) => bench::run(program, args)?,
        Command::Download(args) => return download::run(program, args),
        Command::Inspect(args) => return inspect::run(program, args),
        Command::ListDevices => devices::run()?,
        Command::Completions(args) => shell::completions(args, About::of(program))?,
        Command::Man(args) => shell::man(args, About::of(program))?,
        Command::RenderChatTemplates => chat::serve()?,
        Command::CompileGrammars => structured::serve()?,
    }
    Ok(ExitCode::SUCCESS)
}

fn run_parity(program: &Program, args: &ParityArgs) -> Result<ExitCode> {
    if args.run.parallel.dp > 1 {
        return Err(usage("parity runs the reference's tokens on one data-parallel group; use --dp 1"));
    }
    let json = args.json.as_ref().and_then(|file| file.as_deref());
    json.map_or(Ok(()), |path| check_writable("--json", path))?;
    let check = |model: &Known| parity::check_reference(&args.reference, model.config);
    let model = Model::Checkpoint(Some(&args.model));
    let asks = Asks::default().with(&check);
    let mut session = session::open(program, model, &args.run, false, &asks)?;
    let report = parity::compare(session.model.as_ref(), &args.reference, &mut session.ex)?;
    session.finish()?;
    write_json(json, &report)?;
    for failure in &report.failures {
        note(format_args!("parity: {failure}"));
    }
    Ok(ExitCode::from(u8::from(!report.passed)))
}
