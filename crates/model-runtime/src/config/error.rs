//! What can be wrong with a config.

/// Why a config cannot be used: the file, the key, what was expected and what was found.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ConfigError(pub(super) String);

impl From<ConfigError> for candle_core::Error {
    fn from(e: ConfigError) -> Self {
        Self::msg(e)
    }
}
