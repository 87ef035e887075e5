//! Running a model on several ranks: their processes, loading, and the part of each rank in a step.
//!
//! A rank has a thread pool, a slice of the model and a KV cache of its own. On the CPU it is a thread or a process; on
//! GPUs it is a process with one GPU. Each data-parallel group has a scheduler. The first rank of the group samples,
//! and the other ranks follow it. If the ranks are processes, rank 0 is the driver: it runs the command, and the others
//! run the steps that they receive.

mod agree;
mod follow;
mod followers;
mod launch;
mod load;
mod messages;
#[cfg(feature = "nccl")]
mod nccl;
mod processes;
mod ranks;
mod regroup;
mod step_message;
pub(crate) mod wire;

pub use launch::{Placement, placement};
pub use load::{Replica, Source, load, load_over};
pub use messages::{MessageKind, check_message};
pub use processes::started_by_rank_0;
pub(crate) use processes::{Processes, Ranks};
pub(crate) use ranks::AbortOnPanic;
pub use ranks::{LocalRanks, Rank};
pub(crate) use regroup::Hosts;
