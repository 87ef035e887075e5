//! Errors of parallel settings and of a launcher's environment, and the text of an error for other ranks.

use moe_kernels::into_candle;

use crate::launcher::Launcher;

/// Parallel settings, or a model's sizes under them, were refused. The text says what was asked for and what to change.
/// `?` converts it into a candle error, in which [`cause`](crate::cause) finds it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GeometryError {
    /// The name of a choice that does not exist.
    #[error("unknown {what} {got:?}; expected one of {}", expected.join(", "))]
    UnknownName {
        /// Which choice.
        what: &'static str,
        /// The name.
        got: String,
        /// The names that exist.
        expected: Vec<String>,
    },
    /// A number of ranks or experts, or the number of a rank, that is out of its range.
    #[error("{0}")]
    Range(String),
    /// Settings that contradict each other.
    #[error("{0}")]
    Contradiction(String),
    /// A size of the model that these ranks cannot divide.
    #[error("{0}")]
    Indivisible(String),
    /// A map of experts that does not fit the experts, the ranks or the slots.
    #[error("{0}")]
    ExpertMap(String),
}

/// An environment describes no valid launch. The text says which variables are wrong, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// A variable whose value cannot be read.
    #[error("the environment variable {name} is {value:?}; expected {expected}")]
    Variable {
        /// The variable.
        name: String,
        /// Its value.
        value: String,
        /// What it must be.
        expected: String,
    },
    /// Only some of the variables of a launcher are set.
    #[error("the environment of {launcher} is incomplete: {present} is set, but {missing} is not; {remedy}")]
    Incomplete {
        /// The launcher.
        launcher: Launcher,
        /// Variables that are set.
        present: String,
        /// Variables that are not.
        missing: String,
        /// What to do.
        remedy: String,
    },
    /// Variables that contradict each other, or a process that is no part of the launch.
    #[error("{0}")]
    Contradiction(String),
    /// A secret that is too short to keep one.
    #[error("{0}")]
    Secret(String),
}

/// The ranks cannot work together any more: one of them failed, left, disagreed or did not answer in time. Every later
/// call of the world fails with the same cause. The text names the rank and the cause.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct CommError(pub(crate) String);

impl From<GeometryError> for candle_core::Error {
    fn from(error: GeometryError) -> Self {
        into_candle(error)
    }
}

impl From<LaunchError> for candle_core::Error {
    fn from(error: LaunchError) -> Self {
        into_candle(error)
    }
}

impl From<CommError> for candle_core::Error {
    fn from(error: CommError) -> Self {
        into_candle(error)
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

/// Returns an error of a variant that holds a text, with a formatted message.
macro_rules! refuse {
    ($error:path, $($message:tt)*) => {
        return Err($error(format!($($message)*)))
    };
}
pub(crate) use refuse;
