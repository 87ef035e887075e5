//! The decoder that models share: embedding, layers of attention and MLP or experts, norm, projection.
//!
//! One forward for everything: bulk and chunked prefill, decode, parity. The residual stream is
//! f32 whatever the model dtype: it is small beside the weights, and rounding it in every layer is
//! most of what a bf16 run loses. Each norm also adds the block's output to it. A model differs in
//! its attention, its sizes and the names of its tensors.

mod config;
mod explain;
mod forward;
mod gate;
mod grouped_query;
mod layer;
mod layout;
mod load;
mod program;
mod residual;

pub use config::{DecoderConfig, MoeConfig};
pub use gate::router_gate;
pub use grouped_query::GroupedQueryModel;
pub use layer::Decoder;
pub use load::DecoderOptions;
