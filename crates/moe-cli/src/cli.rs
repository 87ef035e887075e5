//! The command line that every model binary shares.

mod model_args;
mod sampling;

use std::path::PathBuf;

use candle_core::DType;
use clap::{Args, Parser, Subcommand};
use model_runtime::{CpuIsa, MlaForm};
use moe_engine::DeviceChoice;
use moe_layer::MoePath;

use crate::parallel::ParallelArgs;
use crate::session::Model;

pub use model_args::{DownloadArgs, InspectArgs};
pub use sampling::SamplingArgs;

/// Command line of a model binary. Without a subcommand it generates.
#[derive(Parser, Debug)]
// `--version` names the engine, whichever crate the flags are in.
#[command(name = "moe-engine", version, args_conflicts_with_subcommands = true)]
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
    /// Talk with the model.
    Chat(Box<ChatArgs>),
    /// Answer a file of requests in OpenAI's batch format; a rerun continues.
    Batch(Box<BatchArgs>),
    /// Compare with a reference recorded from Hugging Face transformers.
    Parity(ParityArgs),
    /// Time prefill and decode.
    Bench(BenchArgs),
    /// Fetch a checkpoint into the hub's cache and print its folder, or check what is there.
    Download(DownloadArgs),
    /// Tell what a checkpoint is, and whether it fits this machine's memory, without reading its weights.
    Inspect(InspectArgs),
    /// List the devices of this machine.
    ListDevices,
    /// Render chat templates for the program that starts this one.
    #[command(name = moe_engine::chat::RENDER_COMMAND, hide = true)]
    RenderChatTemplates,
}

impl Cli {
    /// What to do.
    pub fn into_command(self) -> Command {
        self.command.unwrap_or_else(|| Command::Generate(Box::new(self.generate)))
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
            Self::Download(_) | Self::Inspect(_) | Self::ListDevices | Self::RenderChatTemplates => None,
        }
    }

    /// The model that the command runs, and whether its weights are checked.
    pub(crate) fn model(&self) -> (Model<'_>, bool) {
        let name = match self {
            Self::Generate(args) => return (Model::Checkpoint(args.model.as_deref()), args.check_weights),
            Self::Bench(BenchArgs { config: Some(config), .. }) => return (Model::Random(config), false),
            Self::Bench(args) => args.model.as_deref(),
            Self::Chat(args) => args.answer.model.as_deref(),
            Self::Batch(args) => args.answer.model.as_deref(),
            Self::Parity(args) => Some(args.model.as_str()),
            Self::Download(_) | Self::Inspect(_) | Self::ListDevices | Self::RenderChatTemplates => None,
        };
        (Model::Checkpoint(name), false)
    }
}

/// Where and how the model runs.
#[derive(Args, Debug, Clone)]
pub struct RunArgs {
    /// Device: cpu, cuda or cuda:N. With several ranks: cuda, a GPU for each.
    #[arg(long, default_value = "cpu", help_heading = "Device")]
    pub device: DeviceChoice,
    /// f32, bf16 or f16 (default: the checkpoint's).
    #[arg(long, value_parser = crate::options::parse_dtype, help_heading = "Device")]
    pub dtype: Option<DType>,
    /// CPU threads (default: all cores).
    #[arg(long, help_heading = "Device")]
    pub num_threads: Option<usize>,
    /// CPU instruction set: scalar, avx2, avx512, avx512-bf16 or amx-bf16 (default: the fastest
    /// supported).
    #[arg(long, value_parser = CpuIsa::from_name, help_heading = "Device")]
    pub cpu_isa: Option<CpuIsa>,
    /// Expert backend (default: the first that supports the configuration).
    #[arg(long, help_heading = "MoE")]
    pub moe_backend: Option<String>,
    /// How experts run: fused (packed weights, grouped kernels) or legacy (one expert after the
    /// other) (default: fused; DeepSeek-V2: legacy).
    #[arg(long, value_name = "PATH", help_heading = "MoE")]
    pub moe_path: Option<MoePath>,
    /// Form of multi-head latent attention: absorbed (latent KV cache) or naive (keys and values of
    /// every head) (default: absorbed; DeepSeek-V2 only).
    #[arg(long, value_name = "FORM", help_heading = "MoE")]
    pub mla: Option<MlaForm>,
    /// Shows which kernels run for how many rows and why not faster ones: a table on stderr, or JSON in FILE.
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true, help_heading = "MoE")]
    pub explain_backends: Option<Option<PathBuf>>,
    /// Give a row the same bits whatever rows are computed beside it, with slower kernels (on the CPU it is always
    /// so).
    #[arg(long, help_heading = "MoE")]
    pub batch_invariant: bool,
    /// Ranks and chunks.
    #[command(flatten)]
    pub parallel: ParallelArgs,
    /// Log filter, such as info or moe_engine=debug.
    #[arg(long, default_value = "info", help_heading = "Engine")]
    pub log: String,
    /// Write the time of every step and layer here, as a Chrome trace.
    #[arg(long, help_heading = "Engine")]
    pub profile: Option<PathBuf>,
}

/// Flags of `generate`.
#[derive(Args, Debug, Clone)]
pub struct GenerateArgs {
    /// Checkpoint folder, or ORG/NAME or ORG/NAME@REVISION on the hub (default: the embedded checkpoint, where
    /// the binary has one).
    #[arg(long)]
    pub model: Option<String>,
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
    /// Independent continuations of the prompt.
    #[arg(short, long, default_value_t = 1, help_heading = "Sampling")]
    pub n: usize,
    /// Print the log-probability of each new token and of this many of the likeliest to stderr, as
    /// JSON lines.
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
    /// Force the experts of such a recording, position by position.
    #[arg(long, value_name = "FILE", help_heading = "Routing")]
    pub replay_routed_experts: Option<PathBuf>,
    /// Device and backend.
    #[command(flatten)]
    pub run: RunArgs,
}

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
    /// Who answers, and how.
    #[command(flatten)]
    pub answer: AnswerArgs,
}

/// Flags of `chat`.
#[derive(Args, Debug, Clone)]
pub struct ChatArgs {
    /// What the model is told beforehand.
    #[arg(long, value_name = "TEXT", help_heading = "Chat")]
    pub system: Option<String>,
    /// Who answers, and how.
    #[command(flatten)]
    pub answer: AnswerArgs,
}

/// What `batch` and `chat` have in common: who answers conversations, and how.
#[derive(Args, Debug, Clone)]
pub struct AnswerArgs {
    /// Checkpoint folder, or ORG/NAME or ORG/NAME@REVISION on the hub (default: the embedded checkpoint,
    /// where the binary has one).
    #[arg(long)]
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

/// How conversations become prompts.
#[derive(Args, Debug, Clone)]
pub struct TemplateArgs {
    /// Jinja file to use instead of the checkpoint's chat template.
    #[arg(long, value_name = "FILE", help_heading = "Chat")]
    pub chat_template: Option<PathBuf>,
    /// Variables for the chat template, such as '{"enable_thinking": false}'.
    #[arg(long, value_name = "JSON", value_parser = crate::options::parse_object, help_heading = "Chat")]
    pub chat_template_kwargs: Option<serde_json::Map<String, serde_json::Value>>,
}

/// Scheduler and KV cache; names are vLLM's.
#[derive(Args, Debug, Clone)]
pub struct EngineArgs {
    /// Sequences that run at once, at most (default: 64, on a GPU 256).
    #[arg(long, help_heading = "Engine")]
    pub max_num_seqs: Option<usize>,
    /// Tokens of one forward pass, at most; longer prompts are computed in chunks (default: 512, on a
    /// GPU 8192).
    #[arg(long, help_heading = "Engine")]
    pub max_num_batched_tokens: Option<usize>,
    /// Longest sequence, prompt and output, which the KV cache must hold (default: the model's context,
    /// or as much of it as the KV cache holds).
    #[arg(long, help_heading = "Engine")]
    pub max_model_len: Option<usize>,
    /// Tokens per KV-cache block.
    #[arg(long, default_value_t = 16, help_heading = "Engine")]
    pub block_size: usize,
    /// Memory of the KV cache of each rank, such as 512MiB or 4GiB, taken at the start (default: 4GiB,
    /// all ranks together at most half of what is free; on a GPU nine tenths of what is free there); never
    /// more than the sequences can use.
    #[arg(long, value_name = "BYTES", value_parser = crate::options::parse_bytes, help_heading = "Engine")]
    pub kv_cache_memory: Option<usize>,
    /// Launch decode steps on a GPU one by one instead of as a captured CUDA graph.
    #[arg(long, help_heading = "Engine")]
    pub enforce_eager: bool,
    /// Share the KV cache of common prefixes.
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set, num_args = 0..=1,
        default_missing_value = "true", value_name = "BOOL", help_heading = "Engine")]
    pub enable_prefix_caching: bool,
    /// Print counters and times to stderr at the end; on the CPU with how evenly experts were chosen.
    #[arg(long, help_heading = "Engine")]
    pub stats: bool,
    /// Write how many tokens each expert gets, step by step, as a heat trace. On a GPU, steps then run without CUDA
    /// graphs.
    #[arg(long, value_name = "FILE", help_heading = "Routing")]
    pub expert_heat: Option<PathBuf>,
    /// Spread tokens evenly over the experts, whatever the router says: for profiling only.
    #[arg(long, help_heading = "Routing")]
    pub force_balance: bool,
}

/// Flags of `parity`.
#[derive(Args, Debug, Clone)]
pub struct ParityArgs {
    /// Checkpoint folder, or ORG/NAME or ORG/NAME@REVISION on the hub.
    #[arg(long)]
    pub model: String,
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
    /// Checkpoint folder or ORG/NAME or ORG/NAME@REVISION on the hub, instead of --config.
    #[arg(long, conflicts_with = "config")]
    pub model: Option<String>,
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
    /// Tokens of one forward pass, at most (default: 512, on a GPU 8192).
    #[arg(long)]
    pub max_num_batched_tokens: Option<usize>,
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
        let cli = Cli::try_parse_from(["m", "--batch-invariant"]).unwrap();
        assert!(cli.generate.run.batch_invariant);
        assert!(Cli::try_parse_from(["m", "--prompt", "x", "--prompt-file", "y"]).is_err());
        assert!(Cli::try_parse_from(["m", "bench"]).is_err());
    }
}
