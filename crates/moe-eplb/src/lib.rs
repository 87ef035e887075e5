//! Expert-parallel load balancing: heat in, placement and migration plan out. Plain data and no tensors,
//! so that it also runs offline on recorded traces.
#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod bound;
mod certificate;
pub mod control;
pub mod dropin;
mod error;
mod exact;
pub mod heat;
#[cfg(feature = "serde")]
pub mod json;
mod loads;
mod matching;
pub mod migrate;
mod pack;
mod placement;
pub mod policy;
mod score;
mod search;
pub mod select;
pub mod stats;
mod topology;

pub use certificate::{Certificate, Proof};
pub use error::{Error, Result};
pub use heat::Heat;
pub use loads::Loads;
pub use migrate::{Migration, check_migration, plan_migration};
pub use placement::Placement;
pub use policy::{Joint, Plan, Policy};
pub use score::{Objective, layer_par, par};
pub use topology::Topology;
