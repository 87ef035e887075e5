//! The ops. Each checks its arguments, then runs the kernel of the device.
//!
//! Each op is an `_into` function over views and an [`Exec`](crate::Exec). It checks dtypes and
//! dims once and then dispatches on the device.

mod activation;
mod attention;
mod combine;
mod copy_states;
mod delta;
mod elementwise;
mod embedding;
mod experts;
mod fused_linear;
mod heads_norm;
mod linear;
mod mla;
mod mla_prompt;
mod mla_rows;
mod qk_norm_rope;
mod scaled;
mod segments;
mod state_rows;

pub use crate::cpu::attention::ATTENTION_BLOCK;
pub use activation::{gated_activation_into, gated_rows_into, sigmoid_gate_into};
pub use attention::paged_attention_into;
pub use combine::weighted_sum_into;
pub use copy_states::copy_states_into;
pub use delta::{causal_conv_into, gated_delta_into, gated_rms_norm_into};
pub use elementwise::{add_into, add_rms_norm_into, rms_norm_into, softmax_into};
pub use embedding::embedding_into;
pub use experts::{grouped_down_into, grouped_gate_up_into};
pub use fused_linear::{linear_add_into, norm_linear_into};
pub use heads_norm::{head_squares_into, heads_norm_into};
pub use linear::{linear_into, linear_row_parallel_into, row_parallel_segments};
pub use mla::{mla_attention_into, mla_cache_into, mla_latent_into, mla_query_into, mla_value_into};
pub use mla_prompt::mla_prompt_into;
pub use mla_rows::mla_rows_into;
pub use qk_norm_rope::{qk_norm_rope_cache_into, rope_attention_into};
pub use scaled::{add_scaled_into, one_group_into, sigmoid_into};
pub use segments::{Segment, grouped_down_segment_into, linear_segment_into};
