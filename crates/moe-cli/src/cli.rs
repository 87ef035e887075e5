//! The command line that every model binary shares.

mod arrange;
mod batch;
mod bench;
mod chat;
mod dtype;
mod help;
mod model_args;
mod numbers;
mod sampling;
mod settle;
mod shell;
mod structured;
#[cfg(test)]
mod tests;
pub mod version;

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::builder::UnknownArgumentValueParser;
use clap::error::ErrorKind;
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use model_runtime::{CpuIsa, MlaForm};
use moe_engine::DeviceChoice;
use moe_layer::{Fp8Activations, MoePath, SharedExpertsStream};

use crate::parallel::ParallelArgs;
use crate::session::Model;
use dtype::DtypeChoice;

pub use batch::{BatchArgs, InputFormat};
pub use bench::BenchArgs;
pub use chat::{ChatArgs, ReasoningParser, TemplateArgs, ToolCallParser};
pub use help::About;
pub use model_args::{DownloadArgs, InspectArgs};
pub use sampling::SamplingArgs;
pub use shell::{CompletionsArgs, ManArgs};
pub use structured::StructuredArgs;

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
    Parity(Box<ParityArgs>),
    /// Time prefill and decode, or a file of requests.
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
    /// As [`Self::command_of`].
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

/// Where and how the model runs.
#[derive(Args, Debug, Clone)]
pub struct RunArgs {
    /// Device: cpu, cuda or cuda:N. With several ranks: cuda, a GPU for each.
    #[arg(long, default_value = "cpu", help_heading = "Device")]
    pub device: DeviceChoice,
    /// Dtype of weights and KV cache; auto is the checkpoint's.
    #[arg(long, default_value = "auto", help_heading = "Device")]
    pub dtype: DtypeChoice,
    /// CPU threads (default: all cores).
    #[arg(short = 't', long, visible_alias = "threads", value_name = "N", help_heading = "Device")]
    pub num_threads: Option<usize>,
    /// CPU instruction set: scalar, avx2, avx2-vnni, avx512, avx512-bf16 or amx-bf16 (default: the fastest
    /// supported).
    #[arg(long, value_parser = crate::options::parse_cpu_isa, help_heading = "Device")]
    pub cpu_isa: Option<CpuIsa>,
    /// Expert backend (default: the first that supports the configuration).
    #[arg(long, help_heading = "MoE")]
    pub moe_backend: Option<String>,
    /// How experts run: fused (packed weights, grouped kernels) or legacy (one expert after the
    /// other) (default: fused; DeepSeek-V2 on the CPU: legacy).
    #[arg(long, value_name = "PATH", help_heading = "MoE")]
    pub moe_path: Option<MoePath>,
    /// Form of multi-head latent attention: absorbed (latent KV cache) or naive (keys and values of
    /// every head) (default: absorbed; DeepSeek-V2 only).
    #[arg(long, value_name = "FORM", help_heading = "MoE")]
    pub mla: Option<MlaForm>,
    /// Shared experts on a GPU: on (a second stream, beside the routed experts), off (after them) or auto (as slots of the
    /// routed experts where kernels take them so, else a second stream where it pays) (default: auto).
    #[arg(long, value_name = "WHERE", help_heading = "MoE")]
    pub shared_experts_stream: Option<SharedExpertsStream>,
    /// Shows which kernels run for how many rows and why not faster ones: a table on stderr, or JSON in FILE.
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true, help_heading = "MoE")]
    pub explain_backends: Option<Option<PathBuf>>,
    /// Give a row the same bits whatever rows are computed beside it, with slower kernels (on the CPU always so).
    #[arg(long, help_heading = "MoE")]
    pub batch_invariant: bool,
    /// Whether products of many rows quantise activations beside FP8 weights (W8A8) on a GPU: on, off or auto (blocks of 128)
    /// (default: auto).
    #[arg(long, value_name = "WHEN", help_heading = "MoE")]
    pub fp8_activations: Option<Fp8Activations>,
    /// Experts in page-locked host memory beside the GPU of each rank, in GiB of all layers together (or a size such as 512MiB);
    /// they come to the GPU when a step needs them. Tokens stay the same.
    #[arg(long, value_name = "GIB", value_parser = crate::options::parse_gib, help_heading = "MoE")]
    pub expert_offload: Option<usize>,
    /// Load a model also where its weights and KV cache seem to need more memory than is free.
    #[arg(long, help_heading = "Engine")]
    pub skip_memory_check: bool,
    /// Ranks and chunks.
    #[command(flatten)]
    pub parallel: ParallelArgs,
    /// Branch, tag or commit of a model on the hub, as by ORG/NAME@REVISION.
    #[arg(long)]
    pub revision: Option<String>,
    /// Say nothing on stderr but errors and what other flags ask for.
    #[arg(short, long, help_heading = "Engine")]
    pub quiet: bool,
    /// Log filter, such as info or moe_engine=debug (default: RUST_LOG, else info).
    #[arg(long, value_name = "FILTER", help_heading = "Engine")]
    pub log: Option<String>,
    /// Write the log here instead of to stderr.
    #[arg(long, value_name = "FILE", help_heading = "Engine")]
    pub log_file: Option<PathBuf>,
    /// Write the time of every step and layer here, as a Chrome trace.
    #[arg(long, help_heading = "Engine")]
    pub profile: Option<PathBuf>,
}

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
    /// Force the experts of such a recording, position by position.
    #[arg(long, value_name = "FILE", help_heading = "Routing")]
    pub replay_routed_experts: Option<PathBuf>,
    /// Device and backend.
    #[command(flatten)]
    pub run: RunArgs,
}

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

/// In which order waiting requests start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SchedulingPolicy {
    /// First come, first served.
    Fcfs,
    /// Those with the smallest max_tokens last, so that no long one is left to run alone at the end.
    LongestFirst,
}

/// Scheduler and KV cache; names are vLLM's.
#[derive(Args, Debug, Clone)]
pub struct EngineArgs {
    /// Sequences that run at once, at most (default: 64, on a GPU 256).
    #[arg(long, help_heading = "Engine")]
    pub max_num_seqs: Option<usize>,
    /// Tokens of one forward pass, at most; longer prompts are computed in chunks (default: 512, on a
    /// GPU 8192, or 16384 with a latent KV cache).
    #[arg(long, help_heading = "Engine")]
    pub max_num_batched_tokens: Option<usize>,
    /// Which waiting request starts next; tokens on the CPU do not depend on it (default: fcfs; batch: longest-first).
    #[arg(long, value_enum, help_heading = "Engine")]
    pub scheduling_policy: Option<SchedulingPolicy>,
    /// Longest sequence, prompt and output, which the KV cache must hold (default: the model's context,
    /// or as much of it as the KV cache holds).
    #[arg(short = 'c', long, visible_alias = "ctx-size", help_heading = "Engine")]
    pub max_model_len: Option<usize>,
    /// Tokens per KV-cache block.
    #[arg(long, default_value_t = 16, help_heading = "Engine")]
    pub block_size: usize,
    /// Memory of the KV cache of each rank, such as 512MiB or 4GiB, taken at the start (default: 4GiB,
    /// all ranks together at most half of what is free; on a GPU nine tenths of what is free there, less
    /// where the largest step, which is run first, needs more); never more than the sequences can use.
    #[arg(long, value_name = "BYTES", value_parser = crate::options::parse_bytes, help_heading = "Engine")]
    pub kv_cache_memory: Option<usize>,
    /// Memory of each GPU that may be in use, such as 24GB: weights, KV cache and buffers (default: all of it).
    #[arg(long, value_name = "BYTES", value_parser = crate::options::parse_bytes, help_heading = "Engine")]
    pub gpu_memory: Option<usize>,
    /// As --gpu-memory, as a share of the smallest visible GPU: above 0, at most 1.
    #[arg(long, value_name = "SHARE", value_parser = crate::options::parse_share, conflicts_with = "gpu_memory",
        help_heading = "Engine")]
    pub gpu_memory_utilization: Option<f64>,
    /// Launch decode steps on a GPU one by one instead of as a captured CUDA graph.
    #[arg(long, help_heading = "Engine")]
    pub enforce_eager: bool,
    /// Share the KV cache of common prefixes.
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set, num_args = 0..=1,
        default_missing_value = "true", value_name = "BOOL", help_heading = "Engine")]
    pub enable_prefix_caching: bool,
    /// As --enable-prefix-caching false.
    #[arg(long, overrides_with = "enable_prefix_caching", help_heading = "Engine")]
    pub no_enable_prefix_caching: bool,
    /// Print counters, times, and how evenly experts were chosen, to stderr at the end.
    #[arg(long, help_heading = "Engine")]
    pub stats: bool,
    /// Write how many tokens each expert gets, step by step, as a heat trace.
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
