//! The flags of parallelism and of chunked MoE.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use moe_comm::{DeepEpMode, EpBackendChoice, ExpertPlacement, ParallelConfig, ReplicaChoice};
use moe_engine::engine::DpEngine;
use moe_engine::eplb::{EplbConfig, EplbPolicy};
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
    /// How rows reach the experts' ranks.
    #[arg(long, default_value_t, value_name = "NAME", help_heading = "Parallel",
        help = format!("How rows reach the experts' ranks: {}", EpBackendChoice::listed(|_| true)))]
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
    #[arg(long, value_name = "BYTES", value_parser = crate::values::parse_bytes,
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
    /// Move experts between ranks while the model runs, as their loads change. Tokens stay the same.
    #[arg(long, help_heading = "Parallel")]
    pub enable_eplb: bool,
    /// Steps whose expert counts a plan is made from.
    #[arg(
        long,
        default_value_t = 1000,
        value_name = "STEPS",
        requires = "enable_eplb",
        help_heading = "Parallel"
    )]
    pub eplb_window: usize,
    /// Steps from one plan to the next.
    #[arg(
        long,
        visible_alias = "eplb-step-interval",
        default_value_t = 3000,
        value_name = "STEPS",
        requires = "enable_eplb",
        help_heading = "Parallel"
    )]
    pub eplb_interval: usize,
    /// Steps after which a plan that is not ready is given up.
    #[arg(
        long,
        default_value_t = 100,
        value_name = "STEPS",
        requires = "enable_eplb",
        help_heading = "Parallel"
    )]
    pub eplb_plan_steps: usize,
    /// How placements are found: joint, flashlb, swift or deepseek.
    #[arg(
        long,
        default_value = "joint",
        value_name = "NAME",
        requires = "enable_eplb",
        help_heading = "Parallel"
    )]
    pub eplb_policy: EplbPolicy,
    /// Experts that move for one plan, at most (default: all that are worth it).
    #[arg(long, value_name = "N", requires = "enable_eplb", help_heading = "Parallel")]
    pub eplb_max_moves: Option<usize>,
    /// Bytes of experts that travel between two steps, such as 16MiB, at most.
    #[arg(long, default_value = "64MiB", value_name = "BYTES", value_parser = crate::values::parse_bytes,
        requires = "enable_eplb", help_heading = "Parallel")]
    pub eplb_bytes_per_step: usize,
    /// Seconds that a layer's experts may take to arrive; later they stay where they were.
    #[arg(
        long,
        default_value_t = 600,
        value_name = "SECONDS",
        requires = "enable_eplb",
        help_heading = "Parallel"
    )]
    pub eplb_move_timeout: u64,
    /// What a layer must gain, in its ranks' peak over mean load, to be moved.
    #[arg(
        long,
        default_value_t = 0.02,
        value_name = "SHARE",
        requires = "enable_eplb",
        help_heading = "Parallel"
    )]
    pub eplb_min_gain: f64,
    /// Move a layer also where that costs more time than it saves until the next plan.
    #[arg(long, requires = "enable_eplb", help_heading = "Parallel")]
    pub eplb_any_cost: bool,
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

    /// The settings of load balancing; `None` if experts never move.
    pub fn eplb(&self) -> Option<EplbConfig> {
        let config = EplbConfig {
            window: self.eplb_window,
            interval: self.eplb_interval,
            plan_steps: self.eplb_plan_steps,
            policy: self.eplb_policy,
            max_moves: self.eplb_max_moves,
            bytes_per_step: self.eplb_bytes_per_step,
            move_timeout: Duration::from_secs(self.eplb_move_timeout),
            min_gain: self.eplb_min_gain,
            must_pay: !self.eplb_any_cost,
        };
        self.enable_eplb.then_some(config)
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

/// The report on load balancing and on experts in host memory for the counters at the end; empty without these.
pub fn experts_report(engine: &DpEngine<'_>) -> String {
    let moves = engine.eplb_stats().map_or_else(String::new, |stats| stats.to_string());
    let traffic = match engine.expert_traffic() {
        Ok(traffic) => traffic.map_or_else(String::new, |traffic| traffic.to_string()),
        Err(e) => format!("experts in host memory: {e:#}\n"),
    };
    moves + &traffic
}
