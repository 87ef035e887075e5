//! Load balancing of experts in a run: from expert counts to moves.
//!
//! ```text
//! expert counts of every step ─► window ─► planner, on a thread of its own
//!                                                    └─► layers worth their bytes ─► rounds of moves
//! ```
//!
//! Only the engine in the process of rank 0 decides, so all ranks have one plan. Between two steps it asks all ranks
//! for a round of a move (`DpEngine`). The ranks exchange weights and agree (`moe_layer`). Tokens do not depend on any
//! of this.

mod balancer;
mod config;
mod planner;
mod stats;

pub(crate) use balancer::Balancer;
pub use config::{EplbConfig, EplbPolicy};
pub use stats::EplbStats;
