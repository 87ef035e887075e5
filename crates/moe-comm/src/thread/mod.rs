//! In-process ranks: one thread per rank, meeting at a board in shared memory.
//!
//! Each collective is a round at the group's [`board`]: every rank posts what it says about the
//! call and a copy of its data, waits for the others' posts, compares all of them, and reads
//! what it needs. Data is posted in scratch of the poster's workspace and goes back to it when
//! the last reader is done, so a steady state allocates no payload. Once every rank has posted,
//! a round's outcome no longer depends on what the others do: all find the same agreement or
//! disagreement and read the same data in the same order.
//!
//! Failures are the [`world`]'s: the first one is kept, wakes every waiting rank of every group,
//! and is what each later call reports.

mod board;
mod collectives;
mod comm;
mod run;
mod world;

pub use comm::{DEFAULT_TIMEOUT, ThreadComm};
pub use run::{run_ranks, run_ranks_with};
