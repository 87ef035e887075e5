//! What can be wrong with a config.

/// Why a config cannot be used: the file, the key, what was expected and what was found.
/// [`cause`](crate::cause) finds it in a candle error.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A file that cannot be read, or that is no JSON object.
    #[error("{0}")]
    File(String),
    /// A key that must be there.
    #[error("{file}: `{keys}` is missing; expected {expected}")]
    Missing {
        /// The file.
        file: String,
        /// The key with its path, or all its spellings.
        keys: String,
        /// What was expected.
        expected: String,
    },
    /// A value that the key cannot have.
    #[error("{file}: `{key}`: expected {expected}, got {got}")]
    Value {
        /// The file.
        file: String,
        /// The key with its path.
        key: String,
        /// What was expected.
        expected: String,
        /// What was found.
        got: String,
    },
    /// A feature of the model that is not supported.
    #[error("{file}: {what} is not supported{advice}")]
    Unsupported {
        /// The file.
        file: String,
        /// The feature.
        what: String,
        /// What to do, as the end of the sentence.
        advice: String,
    },
    /// Values that contradict each other, or that another part refuses.
    #[error("{file}: {problem}")]
    Refused {
        /// The file.
        file: String,
        /// What is wrong, and what to do.
        problem: String,
    },
}

impl From<ConfigError> for candle_core::Error {
    fn from(error: ConfigError) -> Self {
        moe_kernels::into_candle(error)
    }
}
