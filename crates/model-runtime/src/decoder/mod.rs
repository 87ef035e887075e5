//! The decoder that models share: embedding, layers of a mixer and MLP or experts, norm, projection.
//!
//! One forward pass serves bulk and chunked prefill, decode and parity. The residual stream is f32 for every model
//! dtype: it is small compared with the weights, and rounding it in every layer causes most of the error of a bf16 run.
//! Each norm also adds the block's output to it. Models differ in their attention, their sizes and the names of their
//! tensors.

mod config;
mod explain;
mod forward;
mod gate;
mod layer;
mod layout;
mod load;
mod model;
mod mtp;
mod program;
mod residual;

pub use config::{DecoderConfig, MoeConfig};
pub use gate::router_gate;
pub use layer::Decoder;
pub use load::DecoderOptions;
pub use model::{DecoderModel, MixerConfig};
pub use mtp::{MtpConfig, MtpHead, MtpNames, MtpStep};
