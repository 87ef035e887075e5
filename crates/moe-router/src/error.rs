//! What can be wrong with a router's configuration.

/// Why a configuration cannot be honoured: what was set, and what it must be. Nothing is ever replaced by a
/// fallback.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct RouterError(pub(crate) String);

impl From<RouterError> for candle_core::Error {
    fn from(e: RouterError) -> Self {
        candle_core::Error::wrap(e)
    }
}

/// Returns a [`RouterError`] with a formatted message.
macro_rules! refuse {
    ($($message:tt)*) => {
        return Err($crate::error::RouterError(format!($($message)*)).into())
    };
}
pub(crate) use refuse;
