//! What cannot be dispatched.

/// Why tokens cannot be sent to their experts and back. [`cause`](crate::cause) finds it in a candle error; wrong dims
/// and dtypes of tensors are an [`ArgumentError`](crate::ArgumentError).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DispatchError {
    /// A prepare side and experts that do not fit each other: the text names both and what to choose.
    #[error("{0}")]
    Composition(String),
    /// Ranks that do not fit a geometry, or that disagree about a step.
    #[error("{0}")]
    Ranks(String),
    /// A map of experts that sends an expert where there is none.
    #[error("{0}")]
    ExpertMap(String),
}

impl From<DispatchError> for candle_core::Error {
    fn from(error: DispatchError) -> Self {
        moe_kernels::into_candle(error)
    }
}

/// Returns a [`DispatchError`] of a variant that holds a text, with a formatted message.
macro_rules! refuse {
    ($variant:ident, $($message:tt)*) => {
        return Err($crate::error::DispatchError::$variant(format!($($message)*)).into())
    };
}
pub(crate) use refuse;
