//! What can be wrong with a config.

/// Why a config cannot be used. Every variant names the file.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read {file}: {source}")]
    Io {
        /// The file.
        file: String,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// The file is not a JSON object.
    #[error("{file}: {reason}")]
    Json {
        /// The file.
        file: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A required key is absent.
    #[error("{file}: `{key}` is missing; expected {expected}")]
    Missing {
        /// The file.
        file: String,
        /// The key, with its aliases.
        key: String,
        /// What the value should be.
        expected: String,
    },
    /// A value has the wrong type or lies out of bounds.
    #[error("{file}: `{key}`: expected {expected}, got {got}")]
    Invalid {
        /// The file.
        file: String,
        /// The key.
        key: String,
        /// What the value should be.
        expected: String,
        /// The value.
        got: String,
    },
    /// Two aliases of one setting disagree.
    #[error("{file}: `{first}` and `{second}` are the same setting but differ; remove one of them")]
    Contradiction {
        /// The file.
        file: String,
        /// The key that was found first.
        first: String,
        /// The key that differs from it.
        second: String,
    },
    /// Sizes that are each valid, but absurd together.
    #[error("{file}: {what} of {factors:?} is above the limit of {limit}")]
    TooLarge {
        /// The file.
        file: String,
        /// What the product counts.
        what: String,
        /// The factors.
        factors: Vec<usize>,
        /// The largest accepted product.
        limit: usize,
    },
    /// A feature that this program does not have.
    #[error("{file}: {what} is not supported{advice}")]
    Unsupported {
        /// The file.
        file: String,
        /// The feature, by name.
        what: String,
        /// What to do instead.
        advice: String,
    },
}

impl From<ConfigError> for candle_core::Error {
    fn from(e: ConfigError) -> Self {
        Self::msg(e)
    }
}
