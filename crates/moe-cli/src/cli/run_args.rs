//! Flags of every command that runs a model.

use std::path::PathBuf;

use clap::Args;
use model_runtime::{CpuIsa, MlaForm};
use moe_engine::DeviceChoice;
use moe_layer::{Fp8Activations, MoePath, SharedExpertsStream};

use super::dtype::DtypeChoice;
use crate::parallel::ParallelArgs;

/// Where and how the model runs.
#[derive(Args, Debug, Clone)]
pub struct RunArgs {
    /// Device: cpu, cuda or cuda:N. With several ranks: cuda, a GPU for each.
    #[arg(long, default_value = "cpu", help_heading = "Device")]
    pub device: DeviceChoice,
    /// Dtype of weights and KV cache; auto is the checkpoint's.
    #[arg(long, default_value = "auto", help_heading = "Device")]
    pub dtype: DtypeChoice,
    /// Load quantised weights as floats of this dtype: they take more memory, and run where no kernel reads their
    /// format.
    #[arg(long, help_heading = "Device")]
    pub dequantise: bool,
    /// CPU threads (default: all cores).
    #[arg(short = 't', long, visible_alias = "threads", value_name = "N", help_heading = "Device")]
    pub num_threads: Option<usize>,
    /// CPU instruction set: scalar, avx2, avx2-vnni, avx512, avx512-bf16 or amx-bf16 (default: the fastest
    /// supported).
    #[arg(long, value_parser = crate::values::parse_cpu_isa, help_heading = "Device")]
    pub cpu_isa: Option<CpuIsa>,
    /// Expert backend (default: the first that supports the configuration).
    #[arg(long, help_heading = "MoE")]
    pub moe_backend: Option<String>,
    /// How experts run: fused (packed weights, grouped kernels) or legacy (one expert after the
    /// other) (default: fused).
    #[arg(long, value_name = "PATH", help_heading = "MoE")]
    pub moe_path: Option<MoePath>,
    /// Form of multi-head latent attention: absorbed (latent KV cache) or naive (keys and values of
    /// every head) (default: absorbed; DeepSeek-V2 only).
    #[arg(long, value_name = "FORM", help_heading = "MoE")]
    pub mla: Option<MlaForm>,
    /// Shared experts on a GPU: on (a second stream, at the same time as the routed experts), off (after them) or auto
    /// (as slots of the routed experts where kernels take them so, else a second stream where it pays) (default: auto).
    #[arg(long, value_name = "WHERE", help_heading = "MoE")]
    pub shared_experts_stream: Option<SharedExpertsStream>,
    /// Shows which kernels run for how many rows and why not faster ones: a table on stderr, or JSON in FILE.
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true, help_heading = "MoE")]
    pub explain_backends: Option<Option<PathBuf>>,
    /// Give a row the same bits whatever other rows are in its step, with slower kernels (on the CPU always so).
    #[arg(long, help_heading = "MoE")]
    pub batch_invariant: bool,
    /// Whether products of many rows quantise activations if the weights are FP8 (W8A8) on a GPU: on, off or auto
    /// (blocks of 128) (default: auto).
    #[arg(long, value_name = "WHEN", help_heading = "MoE")]
    pub fp8_activations: Option<Fp8Activations>,
    /// Experts in page-locked host memory, for the GPU of each rank, in GiB of all layers together (or a size such as
    /// 512MiB); they come to the GPU when a step needs them. Tokens stay the same.
    #[arg(long, value_name = "GIB", value_parser = crate::values::parse_gib, help_heading = "MoE")]
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
