//! The flags of parallelism and of chunked MoE.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::Args;
use moe_comm::{DeepEpMode, EpBackendChoice, ExpertPlacement, ParallelConfig, ReplicaChoice};
use moe_engine::{ExecutorBackend, PlacementConfig};
use moe_layer::{ChunkedMoe, DEFAULT_CHUNKED_MOE_SIZE};

/// How the model is spread over ranks, and how MoE layers cut their tokens.
#[derive(Args, Debug, Clone)]
pub struct ParallelArgs {
    /// Tensor-parallel size: ranks that split attention, dense layers and vocabulary.
    #[arg(
        long,
        visible_alias = "tensor-parallel-size",
        default_value_t = 1,
        value_name = "N",
        help_heading = "Parallel"
    )]
    pub tp: usize,
    /// Data-parallel size: groups of ranks with requests of their own.
    #[arg(
        long,
        visible_alias = "data-parallel-size",
        default_value_t = 1,
        value_name = "N",
        help_heading = "Parallel"
    )]
    pub dp: usize,
    /// Spread whole experts over all ranks instead of a slice of each.
    #[arg(long, help_heading = "Parallel")]
    pub enable_expert_parallel: bool,
    /// How rows reach the experts' ranks: auto, disabled, local_allreduce, allgather_reducescatter or
    /// deepep.
    #[arg(long, default_value = "auto", value_name = "NAME", help_heading = "Parallel")]
    pub moe_ep_backend: EpBackendChoice,
    /// Form of deepep: auto (by step), high_throughput or low_latency.
    #[arg(long, default_value = "auto", value_name = "NAME", help_heading = "Parallel")]
    pub deepep_mode: DeepEpMode,
    /// Which rank has which experts: linear or round_robin.
    #[arg(long, default_value = "linear", value_name = "NAME", help_heading = "Parallel")]
    pub expert_placement_strategy: ExpertPlacement,
    /// Where ranks run: auto, mp (a process per rank), threads, or external_launcher (processes of
    /// torchrun, srun, mpirun or a Kubernetes job).
    #[arg(long, default_value = "auto", value_name = "NAME", help_heading = "Parallel")]
    pub distributed_executor_backend: ExecutorBackend,
    /// Where experts are, and copies of them.
    #[command(flatten)]
    pub placements: PlacementArgs,
    /// Compute MoE layers in chunks of tokens: less memory, the same results.
    #[arg(long, help_heading = "MoE")]
    pub enable_chunked_moe: bool,
    /// Tokens of a chunk, at most (default: 256).
    #[arg(long, value_name = "N", requires = "enable_chunked_moe", help_heading = "MoE")]
    pub chunked_moe_size: Option<NonZeroUsize>,
    /// Workspace of a MoE layer, such as 64MiB: decides the size of chunks.
    #[arg(long, value_name = "BYTES", value_parser = crate::options::parse_bytes,
        requires = "enable_chunked_moe", conflicts_with = "chunked_moe_size", help_heading = "MoE")]
    pub moe_memory_budget: Option<usize>,
}

/// Which experts each rank holds. Names are vLLM's where it has one.
#[derive(Args, Debug, Clone)]
pub struct PlacementArgs {
    /// The experts of each rank, from a file that `cargo xtask eplb plan` writes.
    #[arg(long, value_name = "FILE", help_heading = "Parallel")]
    pub expert_map: Option<PathBuf>,
    /// Slots for further copies of experts, all ranks together.
    #[arg(long, default_value_t = 0, value_name = "N", help_heading = "Parallel")]
    pub num_redundant_experts: usize,
    /// Which copy of an expert computes a row: round_robin (in turns), hash, or local_first (that of the row's rank).
    #[arg(long, default_value = "round_robin", value_name = "NAME", help_heading = "Parallel")]
    pub expert_replicas: ReplicaChoice,
}

impl PlacementArgs {
    /// The settings.
    pub fn config(&self) -> PlacementConfig {
        PlacementConfig {
            expert_map: self.expert_map.clone(),
            num_redundant_experts: self.num_redundant_experts,
            replicas: self.expert_replicas,
        }
    }
}

impl ParallelArgs {
    /// The parallel settings.
    pub fn config(&self) -> ParallelConfig {
        ParallelConfig {
            tp: self.tp,
            dp: self.dp,
            enable_expert_parallel: self.enable_expert_parallel,
            backend: self.moe_ep_backend,
            placement: self.expert_placement_strategy,
            deepep_mode: self.deepep_mode,
        }
    }

    /// Whether and how MoE layers cut their tokens.
    pub fn chunked_moe(&self) -> ChunkedMoe {
        ChunkedMoe {
            enable_chunked_moe: self.enable_chunked_moe,
            chunked_moe_size: self.chunked_moe_size.unwrap_or(DEFAULT_CHUNKED_MOE_SIZE),
            moe_memory_budget: self.moe_memory_budget,
        }
    }
}
