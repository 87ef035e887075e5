//! The engine's error. It tells mistakes of the caller from failures, because a program uses a different exit code for
//! them. Also the text of a panic, and the end of a process that has failed.

use std::any::Any;
use std::error::Error as StdError;
use std::fmt;
use std::io::{self, Write};

use model_runtime::sampling::SamplingError;
use model_runtime::{CheckpointError, ConfigError, GeometryError};
use moe_comm::LaunchError;
use moe_layer::{QuantError, RouterError, into_candle};

/// A result of the engine.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A mistake in the settings of a run: settings that contradict each other, or that this build, machine or model cannot
/// satisfy. The text names each setting as its struct calls it, in backticks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct UsageError(String);

/// Why a call of the engine failed.
///
/// `{}` is the outermost text, `{:#}` is all of them, joined by colons. [`downcast_ref`](Self::downcast_ref) finds
/// the errors of other crates and modules.
///
/// ```
/// use moe_engine::{Error, RunConfig, UsageError};
/// let config = RunConfig { num_threads: Some(1 << 20), ..RunConfig::default() };
/// let started = moe_engine::Run::start(&config, moe_engine::Families { table: &[], only: None }, "/no/model");
/// let error: Error = started.err().expect("a million threads are refused");
/// assert!(error.is_usage());
/// assert!(error.downcast_ref::<UsageError>().is_some_and(|e| e.to_string().contains("`num_threads`")));
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// A mistake in the settings of a run.
    Usage(UsageError),
    /// An error of a tensor, a layer or a communicator.
    Candle(candle_core::Error),
    /// The operating system refused something.
    Io(io::Error),
    /// A file or a message is not the JSON that it must be.
    Json(serde_json::Error),
    /// A typed error of a part: [`Error::downcast_ref`] finds it.
    Part(Box<dyn StdError + Send + Sync>),
    /// What was being done when another error happened.
    Context {
        /// What was being done.
        context: String,
        /// The error.
        source: Box<Error>,
    },
    /// Another failure: what was expected, what happened, and what to do.
    Failed(String),
}

impl Error {
    /// Whether the caller's settings are at fault.
    pub fn is_usage(&self) -> bool {
        self.downcast_ref::<UsageError>().is_some()
    }

    /// The error of type `E` among this one and its causes, also inside candle's error.
    pub fn downcast_ref<E: StdError + 'static>(&self) -> Option<&E> {
        match self {
            Self::Usage(e) => (e as &dyn StdError).downcast_ref(),
            Self::Candle(e) => (e as &dyn StdError).downcast_ref().or_else(|| moe_layer::cause(e)),
            Self::Io(e) => (e as &dyn StdError).downcast_ref(),
            Self::Json(e) => (e as &dyn StdError).downcast_ref(),
            Self::Part(e) => e.downcast_ref(),
            Self::Context { source, .. } => source.downcast_ref(),
            Self::Failed(_) => None,
        }
    }

    /// This error, with what was being done.
    #[must_use]
    pub fn context(self, context: impl fmt::Display) -> Self {
        Self::Context { context: context.to_string(), source: Box::new(self) }
    }

    /// The outermost text, and the error below it.
    fn outermost(&self) -> (&dyn fmt::Display, Option<&(dyn StdError + 'static)>) {
        match self {
            Self::Usage(e) => (e, None),
            Self::Candle(e) => (e, e.source()),
            Self::Io(e) => (e, e.source()),
            Self::Json(e) => (e, e.source()),
            Self::Part(e) => (e, e.source()),
            Self::Context { context, source } => (context, Some(&**source)),
            Self::Failed(text) => (text, None),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (text, mut below) = self.outermost();
        write!(f, "{text}")?;
        while let (true, Some(error)) = (f.alternate(), below) {
            write!(f, ": {error}")?;
            below = error.source();
        }
        Ok(())
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.outermost().1
    }
}

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(error) => error,
            error => into_candle(error),
        }
    }
}

impl From<UsageError> for Error {
    fn from(error: UsageError) -> Self {
        Self::Usage(error)
    }
}

impl From<candle_core::Error> for Error {
    fn from(error: candle_core::Error) -> Self {
        Self::Candle(error)
    }
}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<serde_json::Error> for Error {
    fn from(error: serde_json::Error) -> Self {
        Self::Json(error)
    }
}

/// Errors that the engine's error holds as errors of a part.
macro_rules! parts {
    ($($error:ty),+ $(,)?) => {
        $(impl From<$error> for $crate::error::Error {
            fn from(error: $error) -> Self {
                Self::Part(Box::new(error))
            }
        })+
    };
}
pub(crate) use parts;

parts!(
    CheckpointError,
    ConfigError,
    GeometryError,
    LaunchError,
    QuantError,
    RouterError,
    SamplingError,
    moe_eplb::Error,
    postcard::Error,
    std::num::TryFromIntError,
    std::str::Utf8Error,
    std::string::FromUtf8Error,
);

/// Adds what was being done to an error, or makes an error of an absent value.
pub(crate) trait Context<T> {
    fn context(self, context: impl fmt::Display) -> Result<T>;
    fn with_context<C: fmt::Display>(self, context: impl FnOnce() -> C) -> Result<T>;
}

impl<T, E: Into<Error>> Context<T> for std::result::Result<T, E> {
    fn context(self, context: impl fmt::Display) -> Result<T> {
        self.map_err(|e| e.into().context(context))
    }

    fn with_context<C: fmt::Display>(self, context: impl FnOnce() -> C) -> Result<T> {
        self.map_err(|e| e.into().context(context()))
    }
}

impl<T> Context<T> for Option<T> {
    fn context(self, context: impl fmt::Display) -> Result<T> {
        self.ok_or_else(|| Error::Failed(context.to_string()))
    }

    fn with_context<C: fmt::Display>(self, context: impl FnOnce() -> C) -> Result<T> {
        self.ok_or_else(|| Error::Failed(context().to_string()))
    }
}

/// An [`Error::Failed`] with a formatted message.
macro_rules! failed {
    ($($message:tt)*) => {
        $crate::error::Error::Failed(format!($($message)*))
    };
}

/// Returns an [`Error::Failed`] with a formatted message.
macro_rules! bail {
    ($($message:tt)*) => {
        return Err($crate::error::failed!($($message)*))
    };
}

/// Returns an [`Error::Failed`] with a formatted message unless a condition holds.
macro_rules! ensure {
    ($holds:expr, $($message:tt)*) => {
        if !$holds {
            $crate::error::bail!($($message)*)
        }
    };
}
pub(crate) use {bail, ensure, failed};

/// A [`UsageError`] with this message.
pub fn usage(message: impl Into<String>) -> Error {
    Error::Usage(UsageError(message.into()))
}

/// The text of a panic, if there is one.
pub fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}

/// Ends this process with `code` after a failure that has been reported, without running the exit handlers that
/// libraries have registered. Ranks that have lost others have communicators that cannot be closed and whose threads
/// still run. These threads use memory that the driver frees at the end of a process, so the process sometimes ended
/// with a segmentation fault (code 139).
pub fn end_failed(code: u8) -> ! {
    // If this cannot be written, the error cannot be reported either.
    let _ = std::io::stdout().flush();
    #[cfg(unix)]
    // SAFETY: there are no conditions, and no code of this process runs afterwards.
    unsafe {
        libc::_exit(i32::from(code))
    }
    #[cfg(not(unix))]
    std::process::exit(i32::from(code))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn typed_causes_are_found_below_context_and_inside_candle() {
        let error: Result<()> =
            Err(usage("`tp` must be at least 1, got 0")).context("rank 1").context("start");
        let error = error.unwrap_err();
        assert_eq!(error.to_string(), "start");
        assert_eq!(format!("{error:#}"), "start: rank 1: `tp` must be at least 1, got 0");
        assert!(error.is_usage() && error.downcast_ref::<io::Error>().is_none());
        let io = Error::from(io::Error::other("disk on fire")).context("load");
        assert!(io.downcast_ref::<io::Error>().is_some() && !io.is_usage());
        let inside = candle_core::Error::from(error);
        let outside = Error::from(inside.context("layer 3"));
        assert!(outside.downcast_ref::<Error>().is_some_and(Error::is_usage));
    }

    #[test]
    fn an_absent_value_is_a_failure_and_checks_return_one() {
        let check = |n: usize| -> Result<usize> {
            ensure!(n > 1, "expected more than 1, got {n}");
            None.context("nothing there")
        };
        assert_eq!(check(1).unwrap_err().to_string(), "expected more than 1, got 1");
        assert!(matches!(check(2), Err(Error::Failed(text)) if text == "nothing there"));
    }
}
