//! Load balancing of experts in a run: counts in, moves out.
//!
//! ```text
//! expert counts of every step ─► window ─► planner, on a thread of its own ─► layers worth their bytes ─► rounds of moves
//! ```
//!
//! The engine of rank 0's process alone decides, so all ranks have one plan. It asks all ranks for a round of a move between two steps
//! (`DpEngine`); the ranks exchange weights and agree (`moe_layer`). Tokens do not depend on any of it.

mod balancer;
mod config;
mod planner;
mod stats;

pub(crate) use balancer::Balancer;
pub use config::{EplbConfig, EplbPolicy};
pub use stats::EplbStats;
