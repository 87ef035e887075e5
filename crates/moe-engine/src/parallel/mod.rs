//! Several ranks: processes, loading, and the ranks of a step.
//!
//! A rank has a thread pool, a slice of the model and a KV cache of its own, and is a thread of one
//! process or a process; on GPUs it is a process with one GPU. Each data-parallel group has a scheduler; its first rank samples, the others
//! follow. Of processes, rank 0's is the driver: it runs the command, and the others run the
//! steps that they are sent.

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
mod step_message;
pub(crate) mod wire;

pub use launch::{Placement, placement};
pub use load::{Replica, Source, load, load_over};
pub use messages::{MessageKind, check_message};
pub use processes::started_by_rank_0;
pub(crate) use processes::{Processes, Ranks};
pub(crate) use ranks::AbortOnPanic;
pub use ranks::{LocalRanks, Rank};
