//! Ranks in one process: one thread per rank, and a board in shared memory for each group.
//!
//! In each round every rank posts its call and a copy of its data on the group's [`board`], and reads the data of the
//! others that it needs. The copy is in scratch memory of the posting rank's workspace and returns to it when the last
//! reader is done. So after the first rounds no memory is allocated for data.
//!
//! The [`world`] handles failures: it keeps the first one, wakes every waiting rank of every group, and reports that
//! failure to each later call.

mod board;
mod comm;
mod world;

pub use comm::ThreadComm;
