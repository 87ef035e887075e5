//! A process of a rank that is not the driver: it loads its part of the model and runs what it is
//! sent. It writes nothing to stdout.

use std::path::Path;

use anyhow::Result;

use crate::cli::{Cli, Command, RunArgs};
use crate::engine;
use crate::family::ModelFamily;
use crate::interrupt;
use crate::parallel::Replica;
use crate::session::{Part, Ranks};

/// Runs this process's rank of the command until the driver ends it.
///
/// # Errors
/// Whatever fails this rank or another one.
pub fn run<F: ModelFamily>(cli: &Cli, args: &RunArgs) -> Result<()> {
    interrupt::ignore()?;
    let mut part = match model(cli) {
        Model::Checkpoint(model, check_weights) => Part::open::<F>(model, args, check_weights)?,
        Model::Dummy(config) => Part::dummy::<F>(config, args)?,
    };
    let tokenizer = part.tokenizer();
    let Some(processes) = part.processes.take() else {
        anyhow::bail!("this process is a rank of its own and has no driver")
    };
    match &mut part.ranks {
        #[cfg(feature = "cuda")]
        Ranks::DeviceFollower(follower) => follower.serve(processes.messages())?,
        Ranks::Follower(follower) => follower.serve(processes.messages())?,
        Ranks::Replicas(replicas) => {
            for Replica { model, ex, world } in replicas {
                engine::serve(model.as_ref(), ex, tokenizer.as_ref(), world, processes.messages())?;
            }
        }
    }
    processes.finish()
}

/// What a rank logs: the driver speaks for all of them, unless something special is asked for.
pub fn log(filter: &str) -> String {
    if filter == "info" { "error".to_string() } else { filter.to_string() }
}

enum Model<'a> {
    /// Name, and whether its weights are checked.
    Checkpoint(Option<&'a str>, bool),
    /// A config.
    Dummy(&'a Path),
}

/// The model that the command runs.
fn model(cli: &Cli) -> Model<'_> {
    match &cli.command {
        None => Model::Checkpoint(cli.generate.model.as_deref(), cli.generate.check_weights),
        Some(Command::Generate(args)) => Model::Checkpoint(args.model.as_deref(), args.check_weights),
        Some(Command::Chat(args)) => Model::Checkpoint(args.model.as_deref(), false),
        Some(Command::Batch(args)) => Model::Checkpoint(args.model.as_deref(), false),
        Some(Command::Parity(args)) => Model::Checkpoint(Some(&args.model), false),
        Some(Command::Bench(args)) => match &args.config {
            Some(config) => Model::Dummy(config),
            None => Model::Checkpoint(args.model.as_deref(), false),
        },
        Some(Command::RenderChatTemplates) => Model::Checkpoint(None, false),
    }
}
