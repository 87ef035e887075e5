//! The largest sizes that a config may ask for: well above the largest model in use, so that what
//! exceeds them is a damaged config.

use std::ops::RangeInclusive;

use super::error::ConfigError;
use super::value::Config;

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

/// The product of sizes that a config asks for, refused on overflow or above `limit` before
/// anybody allocates it. `what` names it in the error: "the number of expert tensors".
///
/// ```
/// use model_runtime::config::{Config, checked_product, limits};
/// let config = Config::parse("{}", "config.json")?;
/// assert_eq!(checked_product(&config, "the number of tensors", &[3, 4], limits::TENSORS)?, 12);
/// assert!(checked_product(&config, "the number of tensors", &[usize::MAX, 4], limits::TENSORS).is_err());
/// # Ok::<(), model_runtime::config::ConfigError>(())
/// ```
pub fn checked_product(
    config: &Config,
    what: &str,
    factors: &[usize],
    limit: usize,
) -> Result<usize, ConfigError> {
    let product = factors.iter().try_fold(1usize, |n, &f| n.checked_mul(f));
    match product {
        Some(n) if n <= limit => Ok(n),
        _ => Err(config.error(format!("{what} of {factors:?} is above the limit of {limit}"))),
    }
}
