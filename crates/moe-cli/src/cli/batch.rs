//! The flags of `batch`.

use std::path::PathBuf;

use clap::Args;

use super::AnswerArgs;

/// Flags of `batch`. What the body of a request says wins over these, these win over
/// generation_config.json, and that over vLLM's defaults.
#[derive(Args, Debug, Clone)]
pub struct BatchArgs {
    /// Requests, one JSON object per line: custom_id, method, url, body; - reads stdin.
    #[arg(long, value_name = "FILE")]
    pub input: PathBuf,
    /// Answers are appended here as they finish, and lines that it answers already are skipped;
    /// - writes to stdout.
    #[arg(long, value_name = "FILE")]
    pub output: PathBuf,
    /// Answer lines again whose record in the output is an error; the old record is taken out.
    #[arg(long, conflicts_with = "overwrite")]
    pub retry_errors: bool,
    /// Start the output afresh: records of earlier runs are thrown away.
    #[arg(long)]
    pub overwrite: bool,
    /// Exit with code 1 if any record of the output is an error, whichever run wrote it.
    #[arg(long)]
    pub fail_on_error: bool,
    /// Answer requests whose body names another model too; otherwise each is an error (404).
    #[arg(long)]
    pub any_model: bool,
    /// Who answers, and how.
    #[command(flatten)]
    pub answer: AnswerArgs,
}
