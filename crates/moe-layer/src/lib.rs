//! A sparse Mixture-of-Experts block for candle: router, dispatch, experts, shared experts.
#![doc = include_str!("../README.md")]

mod block;
mod check;
mod checkpoint;
mod chunked;
mod compose;
mod context;
#[cfg(feature = "cuda")]
mod device_landing;
mod error;
mod expert_offload;
mod form;
mod forward;
mod gate;
mod host_landing;
mod id_tables;
mod landing;
mod landings;
mod layer_move;
pub mod legacy;
mod load;
mod mlp;
mod movable;
mod moving;
mod offload;
mod options;
mod pack;
mod path;
mod placed;
mod placement;
mod plan;
mod plan_step;
mod shared;
mod shared_stream;
mod slots;

pub use block::SparseMoeBlock;
pub use checkpoint::{BlockNames, CheckpointBlock, QuantisedVars, SharedSpec, model_types, router_gate};
pub use compose::MAX_STEP_TOKENS;
pub use context::{BlockContext, LOW_LATENCY_TOKENS};
pub use error::BlockError;
pub use expert_offload::ExpertOffload;
pub use form::MoeForm;
pub use load::{load_block, load_block_on};
pub use mlp::GatedMlp;
pub use moving::{MoveRound, MoveStatus};
pub use options::BlockOptions;
pub use pack::{load_packed, load_weight};
pub use path::{MoePath, load_layer_on};
pub use placed::PlacedExperts;
pub use placement::ExpertPlacements;
pub use plan_step::PlanStep;
pub use shared::SharedExperts;
pub use shared_stream::SharedExpertsStream;
pub use slots::shared_fit_slots;

pub use moe_chunking::{ChunkedMoe, DEFAULT_CHUNKED_MOE_SIZE};
pub use moe_comm::{
    CommError, Communicator, ExpertLayout, ExpertMap, Geometry, GeometryError, ParallelConfig,
    ParallelGroups, ReplicaChoice, RowParallel, SelfComm, Window, run_ranks,
};
pub use moe_dispatch::{
    AddNorm, DispatchError, DispatchedTensors, Dispatcher, EpRanks, LocalExperts, NoEp, OverRanks,
    PrepareFinalize, WhoAdds,
};
pub use moe_experts::{
    Backend, ExpertWeights, Experts, ExpertsError, ExpertsShape, FusedExperts, Fusion, LoadSpec, Machine,
    MonolithicCall, MonolithicExperts, MonolithicForm, MonolithicKernels, OracleError, Reason, Rejected,
    Reservation, Selection as BackendSelection, Stage, build as build_experts,
    build_batched as build_batched_experts, select as select_backend,
};
pub use moe_kernels::candle::{self, DType, Device, Tensor};
pub use moe_kernels::names::{CorrectionBiasNames, MlpNames, PackOrder};
pub use moe_kernels::plan::Fp8Activations;
pub use moe_kernels::quant::{QuantPart, QuantRows, QuantSource};
pub use moe_kernels::{
    Activation, ActivationFormat, ArgumentError, Buffer, CpuIsa, Exec, ExpertHeat, ExpertTraffic,
    ExpertsSpec, Gate, NO_EXPERT, PreNorm, RoutedExperts, StepContext, SublayerIo, TensorView, View, ViewMut,
    Workspace, cause, checksum, into_candle,
};
pub use moe_quant::{QuantConfig, QuantError};
pub use moe_router::{
    RouteInput, RouteOutput, Router, RouterConfig, RouterError, RouterParams, Scoring,
    Selection as RouterSelection, hf,
};
