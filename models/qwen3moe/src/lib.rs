//! Qwen3-MoE on the runtime of this workspace: the config, the tensors, the attention, and a
//! small trained checkpoint that is part of the program.
#![doc = include_str!("../README.md")]

mod config;
mod family;
mod model;

pub use config::Qwen3MoeConfig;
pub use family::Qwen3MoeFamily;
pub use model::{Qwen3Moe, load};
