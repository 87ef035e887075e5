//! Communicators and parallel geometry for Mixture-of-Experts inference on candle.
#![doc = include_str!("../README.md")]
#![cfg_attr(not(feature = "nccl"), forbid(unsafe_code))]
#![cfg_attr(feature = "nccl", deny(unsafe_code))]

mod call;
mod check;
mod communicator;
mod config;
mod dtype;
mod env;
mod error;
mod geometry;
mod hostlist;
mod launch;
mod local;
mod names;
#[cfg(feature = "nccl")]
mod nccl;
#[cfg(any(test, feature = "nccl"))]
mod overdue;
#[cfg(any(test, feature = "nccl"))]
mod parts;
mod placement;
mod reduce;
mod row_parallel;
mod shard;
mod thread;

pub use communicator::{Communicator, ReduceOp};
pub use config::{MAX_WORLD_SIZE, ParallelConfig};
pub use error::GeometryError;
pub use geometry::{Geometry, ParallelGroups};
pub use launch::{DEFAULT_MASTER_PORT, Launch, LaunchError, Launcher, launch_from_env};
pub use local::SelfComm;
pub use names::{DeepEpMode, EpBackend, EpBackendChoice, ExpertPlacement};
#[cfg(feature = "nccl")]
pub use nccl::NcclComm;
pub use placement::{ExpertLayout, partition};
pub use row_parallel::{RowParallel, reduce_segments_into, shares};
pub use shard::{HeadShard, RowShard};
pub use thread::{DEFAULT_TIMEOUT, ThreadComm, run_ranks, run_ranks_with};

pub use moe_kernels::{Buffer, Exec, View, ViewMut, candle};
