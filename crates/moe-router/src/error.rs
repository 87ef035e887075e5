//! The errors of a router's configuration.

/// Why a configuration is not supported: the setting, and the values that it may have. Nothing is ever replaced by a
/// default. [`cause`](crate::cause) finds this error inside a candle error.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RouterError {
    /// A key is missing, and without it `config.json` does not determine the routing.
    #[error("the model's configuration lacks {}", keys.join(" or "))]
    Missing {
        /// The key, in each of its spellings.
        keys: Vec<&'static str>,
    },
    /// A key of `config.json` has a value of another type.
    #[error("{key} must be {expected}, got {got}")]
    Value {
        /// The key.
        key: String,
        /// The expected value.
        expected: String,
        /// The actual value, as JSON.
        got: String,
    },
    /// An unknown name.
    #[error("unknown {setting} `{got}`; expected one of {expected}")]
    UnknownName {
        /// The setting or key that takes the name.
        setting: &'static str,
        /// The name.
        got: String,
        /// The known names, separated by commas.
        expected: String,
    },
    /// A number out of the range of its setting.
    #[error("{setting} must be {expected}, got {got}")]
    Range {
        /// The setting.
        setting: &'static str,
        /// Its range.
        expected: &'static str,
        /// The number.
        got: String,
    },
    /// Settings contradict each other. The text names them and says what to change.
    #[error("{0}")]
    Contradiction(String),
    /// A method or an option that the router does not support. The text says what it supports.
    #[error("{0}")]
    Unsupported(String),
    /// Parameters of a checkpoint, or of the caller, that the configured method does not use.
    #[error("{0}")]
    Parameters(String),
}

impl RouterError {
    pub(crate) fn unknown(setting: &'static str, got: &str, expected: &str) -> Self {
        Self::UnknownName { setting, got: got.to_string(), expected: expected.to_string() }
    }
}

impl From<RouterError> for candle_core::Error {
    fn from(error: RouterError) -> Self {
        moe_kernels::into_candle(error)
    }
}

/// Returns a [`RouterError`] of a variant that holds a text, with a formatted message.
macro_rules! refuse {
    ($variant:ident, $($message:tt)*) => {
        return Err($crate::error::RouterError::$variant(format!($($message)*)).into())
    };
}
pub(crate) use refuse;
