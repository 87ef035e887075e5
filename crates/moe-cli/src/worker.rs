//! A process of a rank that is not the driver: it loads its part of the model and runs what it is
//! sent. It writes nothing to stdout.

use anyhow::Result;
use moe_engine::ModelFamily;

use crate::cli::{Command, RunArgs};
use crate::interrupt;
use crate::session::{self, Model};

/// Runs this process's rank of the command until the driver ends it.
///
/// # Errors
/// Whatever fails this rank or another one.
pub fn run<F: ModelFamily>(command: &Command, args: &RunArgs) -> Result<()> {
    interrupt::ignore()?;
    let (model, check_weights) = model(command);
    session::serve::<F>(model, args, check_weights)
}

/// What a rank logs: the driver speaks for all of them, unless something special is asked for.
pub fn log(filter: &str) -> String {
    if filter == "info" { "error".to_string() } else { filter.to_string() }
}

/// The model that the command runs, and whether its weights are checked.
fn model(command: &Command) -> (Model<'_>, bool) {
    let checkpoint = |name| (Model::Checkpoint(name), false);
    match command {
        Command::Generate(args) => (Model::Checkpoint(args.model.as_deref()), args.check_weights),
        Command::Chat(args) => checkpoint(args.model.as_deref()),
        Command::Batch(args) => checkpoint(args.model.as_deref()),
        Command::Parity(args) => checkpoint(Some(&args.model)),
        Command::Bench(args) => match &args.config {
            Some(config) => (Model::Random(config), false),
            None => checkpoint(args.model.as_deref()),
        },
        Command::RenderChatTemplates => checkpoint(None),
    }
}
