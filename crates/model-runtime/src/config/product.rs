//! Sizes that are each valid but absurd together.

use super::error::ConfigError;
use super::value::Config;

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
