//! The errors of parallel settings, and of the environment that a launcher leaves; what ranks tell each other of an error.

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

/// An error's text without the backtrace of the rank that it happened on.
pub(crate) fn plain(e: &candle_core::Error) -> String {
    match e {
        candle_core::Error::WithBacktrace { inner, .. } => plain(inner),
        candle_core::Error::WithPath { inner, path } => format!("{}: {}", path.display(), plain(inner)),
        candle_core::Error::Context { inner, context } => format!("{context}: {}", plain(inner)),
        other => other.to_string(),
    }
}

/// Returns an error of the given type with a formatted message.
macro_rules! refuse {
    ($error:ident, $($message:tt)*) => {
        return Err($crate::error::$error(format!($($message)*)))
    };
}
pub(crate) use refuse;
