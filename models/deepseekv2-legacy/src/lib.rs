//! DeepSeek-V2 on the runtime of this workspace: the config, the tensor names, and the decoder with
//! multi-head latent attention, on the per-expert loop or the fused experts.

mod config;
mod family;
mod model;
mod tensors;

pub use config::DeepseekV2Config;
pub use family::DeepseekV2Family;
pub use model::DeepseekV2;
