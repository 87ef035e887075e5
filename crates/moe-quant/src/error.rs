//! The errors of quantised checkpoints.

/// Why a quantised checkpoint, or one matrix of it, cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum QuantError {
    /// A value of the header in config.json is not valid.
    #[error("`{key}`: expected {expected}, got {got}")]
    Value {
        /// The key with its path, such as `quantization_config.bits`.
        key: String,
        /// The values that are valid.
        expected: String,
        /// The value in the header.
        got: String,
    },
    /// A format or an option that this crate cannot read.
    #[error("{what} is not supported; {works}")]
    Unsupported {
        /// The format or option.
        what: String,
        /// The formats or options that can be used instead.
        works: String,
    },
    /// The tensors of a matrix do not fit its format.
    #[error("{name}: {problem}")]
    Matrix {
        /// Name of the module or tensor.
        name: String,
        /// What is wrong, what was expected, and what to do.
        problem: String,
    },
}

impl QuantError {
    /// Returns the error for the matrix or tensor with this name.
    pub fn matrix(name: &str, problem: impl Into<String>) -> Self {
        Self::Matrix { name: name.to_string(), problem: problem.into() }
    }

    pub(crate) fn unsupported(what: impl Into<String>, works: impl Into<String>) -> Self {
        Self::Unsupported { what: what.into(), works: works.into() }
    }
}

impl From<QuantError> for candle_core::Error {
    fn from(error: QuantError) -> Self {
        moe_kernels::into_candle(error)
    }
}
