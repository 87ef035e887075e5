//! Grouped-query attention over the paged KV cache.
//!
//! A forward pass consists of a packed q, k, v product; per-head norm, rotation and KV write in one launch; paged
//! attention; and a row-parallel output product. Prefill, chunked prefill and decode are the same code and give the
//! same bits.

mod check;
mod config;
mod forward;
mod gate;
mod layer;
mod load;
mod partial;
mod ranks;

pub use config::{AttentionConfig, AttentionWeights, QkNorm, RotatedPairs};
pub use layer::Attention;
