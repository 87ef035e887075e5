//! Communicators and parallel geometry for Mixture-of-Experts inference on candle.
#![doc = include_str!("../README.md")]
#![cfg_attr(not(feature = "nccl"), forbid(unsafe_code))]
#![cfg_attr(feature = "nccl", deny(unsafe_code))]

mod by_parts;
mod bytes;
mod call;
mod check;
mod collective;
mod collectives;
mod communicator;
mod config;
mod env;
mod ep_backends;
mod error;
mod expert_map;
mod geometry;
mod hostlist;
mod launch;
mod launcher;
mod local;
mod lock;
mod names;
#[cfg(feature = "nccl")]
mod nccl;
#[cfg(any(test, feature = "nccl"))]
mod overdue;
#[cfg(any(test, feature = "nccl"))]
mod parts;
#[cfg(any(test, feature = "nccl"))]
mod peer;
mod placement;
mod reduce;
mod round;
mod row_parallel;
mod run;
mod shard;
mod socket;
mod supervised;
mod thread;
mod window;

pub use bytes::{all_gather_bytes, broadcast_bytes};
pub use collective::{AddNorm, Collective, FusedCollective, ReduceOp, RowNeeds};
pub use collectives::Collectives;
pub use communicator::{Communicator, FusedCollectives};
pub use config::{MAX_WORLD_SIZE, ParallelConfig};
pub use ep_backends::{EP_BACKENDS, EpBackend, EpBackendChoice, EpBackendRow};
pub use error::{CommError, GeometryError, LaunchError};
pub use expert_map::{ExpertMap, SlotTransfer};
pub use geometry::{Geometry, ParallelGroups};
pub use launch::{DEFAULT_MASTER_PORT, Launch, launch_from_env};
pub use launcher::Launcher;
pub use local::SelfComm;
pub use names::{DeepEpMode, ExpertPlacement, ReplicaChoice};
#[cfg(feature = "nccl")]
pub use nccl::{NcclComm, NcclWindow};
#[cfg(feature = "nccl")]
pub use peer::{PeerAllReduce, PeerWindow};
pub use placement::{ExpertLayout, partition};
pub use round::wait::DEFAULT_TIMEOUT;
pub use row_parallel::{RowParallel, reduce_segments_into, shares};
pub use run::{run_ranks, run_ranks_with};
pub use shard::{HeadShard, RowShard};
pub use socket::{
    Join, Messages, News, SocketComm, SocketTimeouts, WORLD_SECRET, Watch, WorldSecret, check_formed,
    check_frames,
};
pub use supervised::{Supervised, Supervisor};
pub use thread::ThreadComm;
pub use window::{Transfer, TransferSource, Window};

pub use moe_kernels::{Buffer, Exec, PreNorm, SlotRouting, SlotRows, View, ViewMut, candle, cause};
