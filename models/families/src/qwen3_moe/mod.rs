//! Qwen3-MoE on the runtime of this workspace: the config, the tensors, the attention, and a
//! small trained checkpoint that is part of its program.

mod config;
mod family;
mod model;

pub use config::Qwen3MoeConfig;
pub use family::Qwen3MoeFamily;
pub use model::{Qwen3Moe, load};
