//! Multi-head latent attention (DeepSeek-V2) over the paged KV cache, in two forms.
//!
//! One latent row per token stands for the keys and values of all heads. The naive form expands it to every head before
//! caching. The absorbed form caches the row itself and attends in latent space, with the up-projections applied to the
//! query before and to the sum after. A run uses one form for prefill and decode alike, so that a token's bits do not
//! depend on how its prompt was chunked.

mod attend;
mod config;
mod forward;
mod layer;
mod plan;
mod projections;

pub use config::{MlaConfig, MlaForm};
pub use layer::MlaAttention;
