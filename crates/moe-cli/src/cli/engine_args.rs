//! Flags of the engine.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

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
    #[arg(long, value_name = "BYTES", value_parser = crate::values::parse_bytes, help_heading = "Engine")]
    pub kv_cache_memory: Option<usize>,
    /// Memory of each GPU that may be in use, such as 24GB: weights, KV cache and buffers (default: all of it).
    #[arg(long, value_name = "BYTES", value_parser = crate::values::parse_bytes, help_heading = "Engine")]
    pub gpu_memory: Option<usize>,
    /// As --gpu-memory, as a share of the smallest visible GPU: above 0, at most 1.
    #[arg(long, value_name = "SHARE", value_parser = crate::values::parse_share, conflicts_with = "gpu_memory",
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
    /// Part of the KV cache's memory, such as 1GiB, in which models with recurrent states save those at the ends of
    /// prefixes; with 0 they save none and share no prefixes (default: a quarter of it).
    #[arg(long, value_name = "BYTES", value_parser = crate::values::parse_bytes_or_none, help_heading = "Engine")]
    pub prefix_state_memory: Option<usize>,
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
