//! The errors of parallel settings, and of the environment that a launcher leaves.

/// Why parallel settings, or a model's sizes under them, are refused: what was asked for, and what to
/// change. `?` turns one into a candle error.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct GeometryError(pub(crate) String);

/// Why an environment describes no launch: which variables are wrong, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct LaunchError(pub(crate) String);

impl From<GeometryError> for candle_core::Error {
    fn from(e: GeometryError) -> Self {
        candle_core::Error::msg(e)
    }
}

impl From<LaunchError> for candle_core::Error {
    fn from(e: LaunchError) -> Self {
        candle_core::Error::msg(e)
    }
}

/// Returns an error of the given type with a formatted message.
macro_rules! refuse {
    ($error:ident, $($message:tt)*) => {
        return Err($crate::error::$error(format!($($message)*)))
    };
}
pub(crate) use refuse;
