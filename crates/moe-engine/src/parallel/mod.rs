//! Several ranks in one process: flags, loading, and the ranks of a step.
//!
//! On the CPU a rank is a thread with a thread pool, a slice of the model and a KV cache of its own.
//! Each data-parallel group has a scheduler; its first rank samples, the others follow.

mod args;
mod load;
mod ranks;

pub use args::ParallelArgs;
pub use load::{Replica, Source, load};
pub(crate) use ranks::{AbortOnPanic, panic_text};
pub use ranks::{LocalRanks, Rank};
