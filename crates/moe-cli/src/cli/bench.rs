//! Flags of `bench`: rows of a model with prompts of given lengths, or a file of requests.

use std::path::PathBuf;

use clap::Args;

use super::engine_args::SchedulingPolicy;
use super::run_args::RunArgs;

/// Flags of `bench`.
#[derive(Args, Debug, Clone)]
pub struct BenchArgs {
    /// config.json of the model, run with random weights.
    #[arg(long, value_name = "FILE", requires = "dummy_weights")]
    pub config: Option<PathBuf>,
    /// Random weights instead of a checkpoint; needed with --config.
    #[arg(long, requires = "config")]
    pub dummy_weights: bool,
    /// Checkpoint folder or ORG/NAME or ORG/NAME@REVISION on the hub (default: the embedded checkpoint, where the
    /// binary has one).
    #[arg(short, long, visible_alias = "hf-repo", alias = "hf", conflicts_with = "config")]
    pub model: Option<String>,
    /// Run the requests of this JSON file instead, all submitted at once, and report tokens per second.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["batches", "prompt", "output", "lengths", "long_context"])]
    pub workload: Option<PathBuf>,
    /// Requests of the workload that count, from the first on (default: all).
    #[arg(long, value_name = "N", requires = "workload")]
    pub limit: Option<usize>,
    /// Sequences of the workload that run at once, at most (default: 64, on a GPU 256).
    #[arg(long, value_name = "N", requires = "workload")]
    pub max_num_seqs: Option<usize>,
    /// Which waiting request of the workload starts next.
    #[arg(long, value_enum, requires = "workload", default_value = "longest-first")]
    pub scheduling_policy: SchedulingPolicy,
    /// Memory of the KV cache of each rank in a run of a workload, such as 512MiB or 4GiB (default: 4GiB, all ranks
    /// together at most half of what is free; on a GPU nine tenths of what is free there, less where the largest step,
    /// which is run first, needs more).
    #[arg(long, value_name = "BYTES", value_parser = crate::values::parse_bytes, requires = "workload")]
    pub kv_cache_memory: Option<usize>,
    /// Memory of each GPU that may be in use in a run of a workload, such as 24GB (default: all of it).
    #[arg(long, value_name = "BYTES", value_parser = crate::values::parse_bytes, requires = "workload")]
    pub gpu_memory: Option<usize>,
    /// Force the experts of a recording, as `generate --routed-experts-out` writes one, on the workload: request i
    /// begins at row 61 i, and goes round.
    #[arg(long, value_name = "FILE", requires = "workload")]
    pub replay_routed_experts: Option<PathBuf>,
    /// Batch sizes of the decode rows.
    #[arg(long, value_delimiter = ',', default_value = "1,8")]
    pub batches: Vec<usize>,
    /// Prompt tokens of the decode rows (default: 128, or a quarter of a context below 512).
    #[arg(long)]
    pub prompt: Option<usize>,
    /// New tokens of the decode rows (default: 256, or half of a context below 512).
    #[arg(long)]
    pub output: Option<usize>,
    /// Prompt lengths of the prefill rows (default: 2048, or what the context leaves).
    #[arg(long, value_delimiter = ',')]
    pub lengths: Option<Vec<usize>>,
    /// Tokens of one forward pass, at most (default: 512, on a GPU 8192, or 16384 with a latent KV cache).
    #[arg(long)]
    pub max_num_batched_tokens: Option<usize>,
    /// Context of the long decode row; 0 leaves it out.
    #[arg(long, default_value_t = 0)]
    pub long_context: usize,
    /// Runs per row, of which the median counts; with --workload the best.
    #[arg(long, default_value_t = 3)]
    pub repeat: usize,
    /// Write the result as JSON, to stdout (as without this flag) or FILE.
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true)]
    pub json: Option<Option<PathBuf>>,
    /// Device and backend.
    #[command(flatten)]
    pub run: RunArgs,
}
