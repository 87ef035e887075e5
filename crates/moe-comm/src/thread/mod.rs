//! In-process ranks: one thread per rank, meeting at a board in shared memory.
//!
//! In each round at the group's [`board`] every rank posts what it says about the call and a copy
//! of its data, and reads what it needs of the others'. Data is posted in scratch of the poster's
//! workspace and goes back to it when the last reader is done, so a steady state allocates no
//! payload.
//!
//! Failures are the [`world`]'s: the first one is kept, wakes every waiting rank of every group,
//! and is what each later call reports.

mod board;
mod comm;
mod world;

pub use comm::ThreadComm;
