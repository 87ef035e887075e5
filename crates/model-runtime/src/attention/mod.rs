//! Grouped-query attention over the paged KV cache.
//!
//! One pass: packed q, k, v product; per-head norm, rotation and KV write fused; paged attention;
//! row-parallel output product. Prefill, chunked prefill and decode are the same code and give
//! the same bits.

mod config;
mod forward;
mod layer;
mod load;
mod partial;
mod ranks;

pub use config::{AttentionConfig, AttentionWeights, QkNorm, RotatedPairs};
pub use layer::Attention;
