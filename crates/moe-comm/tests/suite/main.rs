//! The crate's integration tests, in one binary, so that candle is linked only once.

// Helpers outside of #[test] functions also fail by panicking.
#![allow(clippy::unwrap_used)]

mod collectives;
mod expert_map;
mod faults;
mod flips;
mod foreign;
mod geometry;
mod groups;
mod intruder;
mod launch;
mod misuse;
mod regroup;
mod rendezvous;
mod row_parallel;
mod shared_norm;
mod sockets;
mod strangers;
mod support;
