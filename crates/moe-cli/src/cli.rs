//! The command line that every model binary shares.

mod answer_args;
mod arrange;
mod batch;
mod bench;
mod chat;
mod dtype;
mod engine_args;
mod generate_args;
mod help;
mod model_args;
mod numbers;
mod run_args;
mod sampling;
mod settle;
mod shell;
mod structured;
mod template_args;
#[cfg(test)]
mod tests;
pub mod version;

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::error::ErrorKind;
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::model::Model;

pub use answer_args::AnswerArgs;
pub use batch::{BatchArgs, InputFormat};
pub use bench::BenchArgs;
pub use chat::ChatArgs;
pub use engine_args::{EngineArgs, SchedulingPolicy};
pub use generate_args::GenerateArgs;
pub use help::About;
pub use model_args::{DownloadArgs, InspectArgs};
pub use run_args::RunArgs;
pub use sampling::SamplingArgs;
pub use shell::{CompletionsArgs, ManArgs};
pub use structured::StructuredArgs;
pub use template_args::TemplateArgs;

/// Text from Mixture-of-Experts models. Without a command it continues a prompt, as `generate` does.
#[derive(Parser, Debug)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Subcommands of a model binary.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Continue a prompt; the continuation goes to stdout.
    Generate(Box<GenerateArgs>),
    /// Talk with the model.
    Chat(Box<ChatArgs>),
    /// Answer a file of requests in OpenAI's batch format; a rerun continues.
    Batch(Box<BatchArgs>),
    /// Compare with a reference recorded from Hugging Face transformers.
    #[command(hide = true)]
    Parity(Box<ParityArgs>),
    /// Time prefill and decode, or a file of requests.
    #[command(hide = true)]
    Bench(Box<BenchArgs>),
    /// Fetch a checkpoint into the hub's cache and print its folder, or check what is there.
    Download(DownloadArgs),
    /// Tell what a checkpoint is, and whether it fits this machine's memory, without reading its weights.
    Inspect(InspectArgs),
    /// List the devices of this machine.
    ListDevices,
    /// Print a script that completes commands and flags in a shell.
    Completions(CompletionsArgs),
    /// Write man pages of the program and its commands into a folder.
    #[command(hide = true)]
    Man(ManArgs),
    /// Render chat templates for the program that starts this one.
    #[command(name = moe_engine::chat::RENDER_COMMAND, hide = true)]
    RenderChatTemplates,
    /// Compile grammars for the program that starts this one.
    #[command(name = moe_engine::structured::COMPILE_COMMAND, hide = true)]
    CompileGrammars,
}

impl Cli {
    /// The command of a whole command line, the program's name first.
    ///
    /// # Errors
    /// clap's: what is wrong, or the text of `--help` and `--version`.
    pub fn command_of(args: impl IntoIterator<Item = impl Into<OsString>>) -> Result<Command, clap::Error> {
        Self::command_about(args, About::default())
    }

    /// [`Self::command_of`] a program.
    ///
    /// # Errors
    /// The errors of [`Self::command_of`].
    pub fn command_about(
        args: impl IntoIterator<Item = impl Into<OsString>>,
        about: About,
    ) -> Result<Command, clap::Error> {
        let args: Vec<OsString> = args.into_iter().map(Into::into).collect();
        let name = args.first().and_then(|path| Path::new(path).file_stem());
        let name = name.map_or_else(|| "moe".into(), |name| name.to_string_lossy());
        let mut definition = Self::definition(&name, about);
        let matches = definition.try_get_matches_from_mut(arrange::arrange(&Self::command(), args));
        let matches = matches.map_err(numbers::reworded)?;
        let mut command = Self::from_arg_matches(&matches).map_err(|e| e.format(&mut definition))?.command;
        command.settle().map_err(|e| definition.error(ErrorKind::ValueValidation, e))?;
        Ok(command)
    }

    /// clap's definition of the program under a name: every command and flag, with help and examples.
    pub fn definition(name: &str, about: About) -> clap::Command {
        help::definition(Self::command(), name, about)
    }
}

impl Command {
    /// Where and how the model runs, if one does.
    pub fn run_args(&self) -> Option<&RunArgs> {
        match self {
            Self::Generate(args) => Some(&args.run),
            Self::Chat(args) => Some(&args.answer.run),
            Self::Batch(args) => Some(&args.answer.run),
            Self::Parity(args) => Some(&args.run),
            Self::Bench(args) => Some(&args.run),
            _ => None,
        }
    }

    /// The model that the command runs, and whether its weights are checked.
    pub(crate) fn model(&self) -> (Model<'_>, bool) {
        let name = match self {
            Self::Generate(args) => return (Model::Checkpoint(args.model.as_deref()), args.check_weights),
            Self::Bench(args) => match &args.config {
                Some(config) => return (Model::Random(config), false),
                None => args.model.as_deref(),
            },
            Self::Chat(args) => args.answer.model.as_deref(),
            Self::Batch(args) => args.answer.model.as_deref(),
            Self::Parity(args) => Some(args.model.as_str()),
            _ => None,
        };
        (Model::Checkpoint(name), false)
    }
}

/// Flags of `parity`.
#[derive(Args, Debug, Clone)]
pub struct ParityArgs {
    /// Checkpoint folder, or ORG/NAME or ORG/NAME@REVISION on the hub.
    #[arg(short, long, visible_alias = "hf-repo", alias = "hf")]
    pub model: String,
    /// reference.safetensors of that checkpoint.
    #[arg(long)]
    pub reference: PathBuf,
    /// Write the result as JSON, to stdout (as without this flag) or FILE.
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true)]
    pub json: Option<Option<PathBuf>>,
    /// Device and backend.
    #[command(flatten)]
    pub run: RunArgs,
}
