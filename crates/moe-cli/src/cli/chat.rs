//! The flags of `chat`.

use std::path::PathBuf;

use clap::Args;

use super::answer_args::AnswerArgs;

/// Flags of `chat`.
#[derive(Args, Debug, Clone)]
pub struct ChatArgs {
    /// What the model is told beforehand.
    #[arg(long, value_name = "TEXT", help_heading = "Chat")]
    pub system: Option<String>,
    /// Record which experts each token of the conversation chose, as safetensors `routed_experts` [T, L_moe, K], after
    /// every answer anew. What was said before is then computed again for each.
    #[arg(long, value_name = "FILE", help_heading = "Routing")]
    pub routed_experts_out: Option<PathBuf>,
    /// Keep no history of what is typed at the terminal.
    #[arg(long, help_heading = "Chat")]
    pub no_history: bool,
    /// Who answers, and how.
    #[command(flatten)]
    pub answer: AnswerArgs,
}
