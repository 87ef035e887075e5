//! The flags of `batch`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};

use super::answer_args::AnswerArgs;

/// What a line of the input is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum InputFormat {
    /// A request as a JSON object.
    #[default]
    Jsonl,
    /// A prompt.
    Text,
}

/// Flags of `batch`. What the body of a request says wins over these, these win over
/// generation_config.json, and that over vLLM's defaults.
#[derive(Args, Debug, Clone)]
pub struct BatchArgs {
    /// Requests, one JSON object per line: custom_id, method, url, body; perhaps in gzip or zstd; - reads stdin.
    /// Or a Parquet file, in a program that was built with the feature parquet.
    #[arg(short, long, visible_alias = "input-file", value_name = "FILE")]
    pub input: PathBuf,
    /// jsonl: each line is a request. text: each line that is not empty is a prompt, and its custom_id is line-N.
    #[arg(long, value_name = "FORMAT", default_value = "jsonl")]
    pub input_format: InputFormat,
    /// Lines of text, or the prompts of a Parquet file, are questions to an instruct model: they go through its chat
    /// template.
    #[arg(long, help_heading = "Chat")]
    pub chat: bool,
    /// Answers are appended here as they finish, and lines that it answers already are skipped;
    /// - writes to stdout. NAME.parquet is written at the end, from NAME.parquet.jsonl.
    #[arg(short, long, visible_alias = "output-file", value_name = "FILE")]
    pub output: PathBuf,
    /// Answer lines again whose record in the output is an error; the old record is taken out.
    #[arg(long, conflicts_with = "overwrite")]
    pub retry_errors: bool,
    /// Start the output afresh: records of earlier runs are thrown away.
    #[arg(long)]
    pub overwrite: bool,
    /// Exit with code 3 if a record of the output is an error, whichever run wrote it (1 if all are, in any case).
    #[arg(long)]
    pub fail_on_error: bool,
    /// Answer requests whose body names another model too; otherwise each is an error (404).
    #[arg(long)]
    pub any_model: bool,
    /// Answer with the experts of every token, unless the body's return_routed_experts says no.
    #[arg(long, help_heading = "Routing")]
    pub enable_return_routed_experts: bool,
    /// Run without a tokenizer: requests whose prompt is token ids are answered with token ids.
    #[arg(long, visible_alias = "skip-tokenizer", conflicts_with = "chat", help_heading = "Engine")]
    pub skip_tokenizer_init: bool,
    /// Price of a million tokens of prompts; the summary then says what the run cost.
    #[arg(long, value_name = "PRICE", value_parser = crate::values::parse_price)]
    pub price_input: Option<f64>,
    /// Price of a million new tokens.
    #[arg(long, value_name = "PRICE", value_parser = crate::values::parse_price)]
    pub price_output: Option<f64>,
    /// Append a line of JSON with counters of lines, tokens and the KV cache every --progress-interval, and at the end.
    #[arg(long, value_name = "FILE")]
    pub metrics: Option<PathBuf>,
    /// Seconds between two lines about the progress, where stderr is no terminal, and between two of --metrics.
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = crate::values::parse_seconds,
        help_heading = "Engine")]
    pub progress_interval: Duration,
    /// Who answers, and how.
    #[command(flatten)]
    pub answer: AnswerArgs,
}
