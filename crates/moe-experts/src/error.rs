//! The errors of loading and building experts.

/// Why experts cannot be loaded or built. [`cause`](crate::cause) finds this error inside a candle error. It also finds
/// an [`OracleError`](crate::OracleError), and an [`ArgumentError`](crate::ArgumentError) for wrong tensors of a call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ExpertsError {
    /// Sizes, ranks or local experts that do not fit the checkpoint.
    #[error("{0}")]
    Spec(String),
    /// Weights of another shape, dtype or quantisation than the experts have.
    #[error("{0}")]
    Weights(String),
    /// Experts cannot be in host memory with these settings.
    #[error("{0}")]
    Offload(String),
}

impl From<ExpertsError> for candle_core::Error {
    fn from(error: ExpertsError) -> Self {
        moe_kernels::into_candle(error)
    }
}

/// Returns an [`ExpertsError`] of a variant that holds a text, with a formatted message.
macro_rules! refuse {
    ($variant:ident, $($message:tt)*) => {
        return Err($crate::error::ExpertsError::$variant(format!($($message)*)).into())
    };
}
pub(crate) use refuse;
