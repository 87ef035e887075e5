//! DeepSeek-V2 on the runtime of this workspace: the config, the tensors, and the decoder with
//! multi-head latent attention, on the per-expert loop or the fused experts.

mod config;
mod family;
mod model;
#[cfg(test)]
mod tests;

pub use config::DeepseekV2Config;
pub use family::FAMILY;
pub use model::{DeepseekV2, load};
