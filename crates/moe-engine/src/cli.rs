//! The command line that every model binary shares.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

/// Command line of a model binary. Without a subcommand it generates.
#[derive(Parser, Debug)]
#[command(version, args_conflicts_with_subcommands = true)]
pub struct Cli {
    /// What to do; `generate` if left out.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// Flags of `generate`.
    #[command(flatten)]
    pub generate: GenerateArgs,
}

/// Subcommands of a model binary.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Continue a prompt; the continuation goes to stdout.
    Generate(Box<GenerateArgs>),
    /// Compare with a reference recorded from Hugging Face transformers.
    Parity(ParityArgs),
    /// Time prefill and decode.
    Bench(BenchArgs),
}

/// Where and how the model runs.
#[derive(Args, Debug, Clone)]
pub struct RunArgs {
    /// Device: cpu.
    #[arg(long, default_value = "cpu", help_heading = "Device")]
    pub device: String,
    /// f32, bf16 or f16 (default: the checkpoint's).
    #[arg(long, help_heading = "Device")]
    pub dtype: Option<String>,
    /// CPU threads (default: all cores).
    #[arg(long, help_heading = "Device")]
    pub num_threads: Option<usize>,
    /// CPU instruction set: scalar, avx2, avx512, avx512-bf16 or amx-bf16 (default: the fastest
    /// supported).
    #[arg(long, help_heading = "Device")]
    pub cpu_isa: Option<String>,
    /// Expert backend (default: the first that supports the configuration).
    #[arg(long, help_heading = "MoE")]
    pub moe_backend: Option<String>,
    /// Print the chosen expert backend and why the others were rejected, as JSON on stderr.
    #[arg(long, help_heading = "MoE")]
    pub explain_backends: bool,
    /// Log filter, such as info or moe_engine=debug.
    #[arg(long, default_value = "info", help_heading = "Engine")]
    pub log: String,
}

/// Flags of `generate`.
#[derive(Args, Debug, Clone)]
pub struct GenerateArgs {
    /// Checkpoint folder (default: the embedded checkpoint, where the binary has one).
    #[arg(long)]
    pub model: Option<PathBuf>,
    /// Prompt text.
    #[arg(long, conflicts_with = "prompt_file")]
    pub prompt: Option<String>,
    /// File with the prompt; - reads stdin.
    #[arg(long)]
    pub prompt_file: Option<PathBuf>,
    /// - reads the prompt from stdin.
    #[arg(value_parser = ["-"], conflicts_with_all = ["prompt", "prompt_file"])]
    pub stdin: Option<String>,
    /// Sampling.
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// Longest sequence, prompt and output (default: the model's context).
    #[arg(long, help_heading = "Engine")]
    pub max_model_len: Option<usize>,
    /// Positions per KV-cache block.
    #[arg(long, default_value_t = 16, help_heading = "Engine")]
    pub block_size: usize,
    /// Report every weight that is NaN or infinite before running.
    #[arg(long, help_heading = "Engine")]
    pub check_weights: bool,
    /// Print timing to stderr at the end.
    #[arg(long, help_heading = "Engine")]
    pub stats: bool,
    /// Device and backend.
    #[command(flatten)]
    pub run: RunArgs,
}

/// vLLM's sampling parameters. What is left out comes from generation_config.json.
#[derive(Args, Debug, Clone, Default)]
pub struct SamplingArgs {
    /// Tokens to generate at most.
    #[arg(long, default_value_t = 128, help_heading = "Sampling")]
    pub max_new_tokens: usize,
    /// 0 is greedy (default: generation_config.json, else 0).
    #[arg(long, allow_negative_numbers = true, help_heading = "Sampling")]
    pub temperature: Option<f32>,
    /// Keep the k likeliest tokens; 0 or -1 keeps all.
    #[arg(long, allow_negative_numbers = true, help_heading = "Sampling")]
    pub top_k: Option<i64>,
    /// Keep the likeliest tokens whose probabilities add up to this.
    #[arg(long, allow_negative_numbers = true, help_heading = "Sampling")]
    pub top_p: Option<f32>,
    /// Keep tokens at least this likely relative to the likeliest.
    #[arg(long, allow_negative_numbers = true, help_heading = "Sampling")]
    pub min_p: Option<f32>,
    /// Seed of the request.
    #[arg(long, default_value_t = 0, help_heading = "Sampling")]
    pub seed: u64,
    /// Do not stop at the end-of-sequence token.
    #[arg(long, help_heading = "Sampling")]
    pub ignore_eos: bool,
}

/// Flags of `parity`.
#[derive(Args, Debug, Clone)]
pub struct ParityArgs {
    /// Checkpoint folder.
    #[arg(long)]
    pub model: PathBuf,
    /// reference.safetensors of that checkpoint.
    #[arg(long)]
    pub reference: PathBuf,
    /// Write the result here as JSON (default: stdout).
    #[arg(long)]
    pub json: Option<PathBuf>,
    /// Device and backend.
    #[command(flatten)]
    pub run: RunArgs,
}

/// Flags of `bench`.
#[derive(Args, Debug, Clone)]
pub struct BenchArgs {
    /// config.json of the model.
    #[arg(long, required_unless_present = "model")]
    pub config: Option<PathBuf>,
    /// Random weights instead of a checkpoint; needed with --config.
    #[arg(long, requires = "config")]
    pub dummy_weights: bool,
    /// Checkpoint folder, instead of --config.
    #[arg(long, conflicts_with = "config")]
    pub model: Option<PathBuf>,
    /// Batch sizes of the decode rows.
    #[arg(long, value_delimiter = ',', default_value = "1,8")]
    pub batches: Vec<usize>,
    /// Prompt tokens of the decode rows.
    #[arg(long, default_value_t = 128)]
    pub prompt: usize,
    /// New tokens of the decode rows.
    #[arg(long, default_value_t = 256)]
    pub output: usize,
    /// Prompt lengths of the prefill rows.
    #[arg(long, value_delimiter = ',', default_value = "2048")]
    pub lengths: Vec<usize>,
    /// Context of the long decode row; 0 leaves it out.
    #[arg(long, default_value_t = 0)]
    pub long_context: usize,
    /// Runs per row; the median counts.
    #[arg(long, default_value_t = 3)]
    pub repeat: usize,
    /// Write the result here as JSON (default: stdout).
    #[arg(long)]
    pub json: Option<PathBuf>,
    /// Device and backend.
    #[command(flatten)]
    pub run: RunArgs,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn generate_is_the_default() {
        let cli = Cli::try_parse_from(["m", "--prompt", "x", "--top-k", "-1"]).unwrap();
        assert!(cli.command.is_none());
        assert_eq!((cli.generate.prompt.as_deref(), cli.generate.sampling.top_k), (Some("x"), Some(-1)));
        let cli = Cli::try_parse_from(["m", "generate", "-"]).unwrap();
        assert!(matches!(cli.command, Some(Command::Generate(g)) if g.stdin.as_deref() == Some("-")));
        assert!(Cli::try_parse_from(["m", "--prompt", "x", "--prompt-file", "y"]).is_err());
        assert!(Cli::try_parse_from(["m", "bench"]).is_err());
    }
}
