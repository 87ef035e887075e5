//! Qwen3-MoE on the runtime of this workspace: the config, the tensors and the attention.

mod config;
mod family;
mod model;

pub use config::Qwen3MoeConfig;
pub use family::FAMILY;
pub use model::{Qwen3Moe, load};
