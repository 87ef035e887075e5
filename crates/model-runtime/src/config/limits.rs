//! The largest sizes that a config may ask for: well above the largest model in use, so that what
//! exceeds them is a damaged config.

use super::error::ConfigError;
use super::value::Config;

/// Inclusive bounds of a size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Smallest accepted value.
    pub min: usize,
    /// Largest accepted value.
    pub max: usize,
}

impl Bounds {
    /// From 1 to `max`.
    pub const fn positive(max: usize) -> Self {
        Self { min: 1, max }
    }

    /// From 0 to `max`.
    pub const fn up_to(max: usize) -> Self {
        Self { min: 0, max }
    }
}

/// `hidden_size`, `intermediate_size` and other widths.
pub const WIDTH: Bounds = Bounds::positive(1 << 20);
/// `num_hidden_layers`.
pub const LAYERS: Bounds = Bounds::positive(1 << 11);
/// `num_attention_heads`, `num_key_value_heads`.
pub const HEADS: Bounds = Bounds::positive(1 << 12);
/// `head_dim`.
pub const HEAD_DIM: Bounds = Bounds::positive(1 << 13);
/// `num_experts`, `num_experts_per_tok`.
pub const EXPERTS: Bounds = Bounds::positive(1 << 14);
/// `vocab_size`.
pub const VOCAB: Bounds = Bounds::positive(1 << 24);
/// `top_k`, where 0 means all tokens.
pub const VOCAB_OR_NONE: Bounds = Bounds::up_to(1 << 24);
/// `max_position_embeddings`, `sliding_window`.
pub const POSITIONS: Bounds = Bounds::positive(1 << 31);
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
