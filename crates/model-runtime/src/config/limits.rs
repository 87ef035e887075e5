//! The largest sizes that a config may ask for: well above the largest model in use, so that what
//! exceeds them is a damaged config.

use std::ops::RangeInclusive;

/// Smallest and largest accepted size.
pub type Bounds = RangeInclusive<usize>;

/// `hidden_size`, `intermediate_size` and other widths.
pub const WIDTH: Bounds = 1..=1 << 20;
/// `num_hidden_layers`.
pub const LAYERS: Bounds = 1..=1 << 11;
/// `num_attention_heads`, `num_key_value_heads`.
pub const HEADS: Bounds = 1..=1 << 12;
/// `head_dim`.
pub const HEAD_DIM: Bounds = 1..=1 << 13;
/// `num_experts`, `num_experts_per_tok`.
pub const EXPERTS: Bounds = 1..=1 << 14;
/// `vocab_size`.
pub const VOCAB: Bounds = 1..=1 << 24;
/// `top_k`, where 0 means all tokens.
pub const VOCAB_OR_NONE: Bounds = 0..=1 << 24;
/// `max_position_embeddings`, `sliding_window`.
pub const POSITIONS: Bounds = 1..=1 << 31;
/// Number of tensors in a checkpoint.
pub const TENSORS: usize = 1 << 22;
/// Number of weights: 64 Ti elements.
pub const WEIGHTS: usize = 1 << 46;
