//! Cuts the tokens of a Mixture-of-Experts layer into chunks. This crate only computes the numbers.
#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod plan;
mod settings;
mod size;

pub use plan::{ChunkPlan, PlanError, num_chunks};
pub use settings::{ChunkedMoe, DEFAULT_CHUNKED_MOE_SIZE};
pub use size::{BudgetError, ridge_tokens, size_for_budget};
