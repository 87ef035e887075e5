//! Qwen3-MoE on the runtime of this workspace: the config, the tensor names, the decoder, and a
//! small trained checkpoint that is part of the program.

mod config;
mod embedded;
mod model;
mod slices;

pub use config::Qwen3MoeConfig;
pub use embedded::Qwen3MoeFamily;
pub use model::Qwen3Moe;
