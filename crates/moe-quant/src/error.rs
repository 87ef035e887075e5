//! What can be wrong with a quantised checkpoint.

/// Why a quantised checkpoint, or one matrix of it, cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum QuantError {
    /// A value of the header in config.json.
    #[error("`{key}`: expected {expected}, got {got}")]
    Value {
        /// The key with its path, such as `quantization_config.bits`.
        key: String,
        /// What would be accepted.
        expected: String,
        /// What is there.
        got: String,
    },
    /// A format or an option that this crate does not read.
    #[error("{what} is not supported; {works}")]
    Unsupported {
        /// The format or option.
        what: String,
        /// What works in its place.
        works: String,
    },
    /// Tensors of a matrix that do not fit its format.
    #[error("{name}: {problem}")]
    Matrix {
        /// Name of the module or tensor.
        name: String,
        /// What is wrong, what was expected, what to do.
        problem: String,
    },
}

impl QuantError {
    /// What is wrong with the matrix or tensor of this name.
    pub fn matrix(name: &str, problem: impl Into<String>) -> Self {
        Self::Matrix { name: name.to_string(), problem: problem.into() }
    }

    pub(crate) fn unsupported(what: impl Into<String>, works: impl Into<String>) -> Self {
        Self::Unsupported { what: what.into(), works: works.into() }
    }
}

impl From<QuantError> for candle_core::Error {
    fn from(error: QuantError) -> Self {
        candle_core::Error::wrap(error)
    }
}
