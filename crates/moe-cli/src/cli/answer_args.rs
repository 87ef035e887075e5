//! Flags of the commands that answer conversations.

use clap::Args;

use super::engine_args::EngineArgs;
use super::run_args::RunArgs;
use super::sampling::SamplingArgs;
use super::template_args::TemplateArgs;

/// What `batch` and `chat` have in common: who answers conversations, and how.
#[derive(Args, Debug, Clone)]
pub struct AnswerArgs {
    /// Checkpoint folder, or ORG/NAME or ORG/NAME@REVISION on the hub (default: the embedded checkpoint,
    /// where the binary has one).
    #[arg(short, long, visible_alias = "hf-repo", alias = "hf")]
    pub model: Option<String>,
    /// Chat template.
    #[command(flatten)]
    pub chat: TemplateArgs,
    /// Sampling.
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// Scheduler and KV cache.
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Device and backend.
    #[command(flatten)]
    pub run: RunArgs,
}
