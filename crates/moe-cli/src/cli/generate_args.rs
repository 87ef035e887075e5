//! The flags of `generate`.

use std::path::PathBuf;

use clap::Args;
use clap::builder::UnknownArgumentValueParser;

use super::engine_args::EngineArgs;
use super::run_args::RunArgs;
use super::sampling::SamplingArgs;
use super::template_args::TemplateArgs;

/// Flags of `generate`.
#[derive(Args, Debug, Clone)]
pub struct GenerateArgs {
    /// Checkpoint folder, or ORG/NAME or ORG/NAME@REVISION on the hub (default: the embedded checkpoint, where
    /// the binary has one).
    #[arg(short, long, visible_alias = "hf-repo", alias = "hf")]
    pub model: Option<String>,
    /// Prompt text; repeatable (default: stdin, unless that is a terminal).
    #[arg(short, long, value_name = "TEXT", conflicts_with = "prompt_file")]
    pub prompt: Vec<String>,
    /// File with the prompt; - reads stdin; repeatable.
    #[arg(short = 'f', long, visible_alias = "file", value_name = "FILE")]
    pub prompt_file: Vec<PathBuf>,
    /// Prompt text, as by --prompt; - reads it from stdin.
    #[arg(value_name = "PROMPT", conflicts_with_all = ["prompt", "prompt_file"])]
    pub text: Option<String>,
    /// The prompt is a question to an instruct model: it goes through the model's chat template.
    #[arg(long, help_heading = "Chat")]
    pub chat: bool,
    /// What the model is told before the question.
    #[arg(long, value_name = "TEXT", requires = "chat", help_heading = "Chat")]
    pub system: Option<String>,
    /// Chat template.
    #[command(flatten)]
    pub template: TemplateArgs,
    /// Run without a tokenizer: prompts are token ids with commas or white space between them, and so is the output.
    #[arg(long, visible_alias = "skip-tokenizer", conflicts_with = "chat", help_heading = "Engine")]
    pub skip_tokenizer_init: bool,
    /// Write JSON instead of text, to stdout or FILE: an object for each prompt, with texts, token ids, finish reasons,
    /// usage, log-probabilities.
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true)]
    pub json: Option<Option<PathBuf>>,
    /// Sampling.
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// Independent continuations of the prompt.
    #[arg(
        long = "num-sequences",
        alias = "n",
        default_value_t = 1,
        value_name = "N",
        help_heading = "Sampling"
    )]
    pub n: usize,
    /// `-n` means tokens to some and texts to others, so it is nothing here.
    #[arg(short = 'n', hide = true, value_name = "N", value_parser = UnknownArgumentValueParser::suggest_arg("--max-new-tokens")
        .and_suggest("or --num-sequences for several texts"))]
    pub ambiguous: Option<String>,
    /// Give the log-probability of each new token and of this many of the likeliest: as JSON lines on stderr, with
    /// --json on stdout.
    #[arg(long, value_name = "N", help_heading = "Sampling")]
    pub logprobs: Option<usize>,
    /// Report every weight that is NaN or infinite before running.
    #[arg(long, help_heading = "Engine")]
    pub check_weights: bool,
    /// Scheduler and KV cache.
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Record which experts each token chose, as safetensors `routed_experts` [T, L_moe, K].
    #[arg(long, value_name = "FILE", help_heading = "Routing")]
    pub routed_experts_out: Option<PathBuf>,
    /// Force the experts of a recording of --routed-experts-out, position by position.
    #[arg(long, value_name = "FILE", help_heading = "Routing")]
    pub replay_routed_experts: Option<PathBuf>,
    /// Device and backend.
    #[command(flatten)]
    pub run: RunArgs,
}
