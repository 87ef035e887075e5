//! Fused expert MLPs with packed weights for candle.
#![doc = include_str!("../README.md")]

mod build;
mod capability;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "cuda")]
mod device_slot;
mod error;
mod experts;
mod fused;
mod grouped;
mod load;
mod monolithic;
mod offload;
mod oracle;
mod slot;
mod weights;

pub use build::{build, build_batched};
pub use error::ExpertsError;
pub use experts::{Experts, MonolithicExperts, Reservation};
pub use fused::FusedExperts;
pub use grouped::GroupedExperts;
pub use load::LoadSpec;
pub use monolithic::MonolithicKernels;
pub use offload::{Offloaded, build_offloaded};
pub use oracle::{Backend, OracleError, Rejection, Selection, select};
pub use weights::{ExpertWeights, ExpertsShape};

pub use candle_core as candle;
pub use moe_kernels::names::MlpNames;
pub use moe_kernels::plan::{Fusion, Machine, MonolithicCall, MonolithicForm, Reason, Rejected, Stage};
pub use moe_kernels::{
    Activation, ActivationFormat, ArgumentError, Buffer, CpuIsa, Dims, Dispatched, Exec, ExpertTraffic,
    ExpertsSpec, Gate, Lent, NO_EXPERT, PreNorm, QuantScheme, RoutingMethod, Scratch, StepContext,
    SublayerIo, TensorView, View, ViewMut, WeightAndReduce, Workspace, cause, checksum, group_slots_into,
    weighted_sum_into,
};
