//! Errors that a caller can tell apart, and how candle's error carries them.
//!
//! Every call on tensors returns candle's error, so that `?` works in a candle model. candle's own variants cannot hold
//! the error types of other crates so that they can be taken out again, except for `Error::Io`: it holds a
//! `std::io::Error`, which is made to carry any error. [`into_candle`] puts a typed error there with the kind
//! `InvalidInput`, and [`cause`] finds it.

use std::error::Error as StdError;
use std::io;

use candle_core::{DType, Error};

/// Why an operation refused an argument.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ArgumentError {
    /// An argument has other dimensions than the other arguments imply.
    #[error("{op}: expected {name} with {expected}, got {got:?}")]
    Dims {
        /// The operation.
        op: String,
        /// The argument.
        name: String,
        /// What was expected, such as `dims [2, 8]`.
        expected: String,
        /// The dimensions of the argument.
        got: Vec<usize>,
    },
    /// An argument has another dtype.
    #[error("{op}: expected {name} of dtype {expected}, got {}", got.as_str())]
    Dtype {
        /// The operation.
        op: String,
        /// The argument.
        name: String,
        /// The dtypes that are accepted, such as `bf16 or f32`.
        expected: String,
        /// The dtype of the argument.
        got: DType,
    },
    /// An argument has a value with which the operation is not defined.
    #[error("{op}: expected {name} to be {expected}, got {got}")]
    Value {
        /// The operation.
        op: String,
        /// The argument.
        name: String,
        /// What was expected, such as `above 0`.
        expected: String,
        /// The value of the argument.
        got: String,
    },
}

impl From<ArgumentError> for Error {
    fn from(error: ArgumentError) -> Self {
        into_candle(error)
    }
}

/// Candle's error with this one inside, where [`cause`] finds it. Its text is that of `error`.
pub fn into_candle(error: impl StdError + Send + Sync + 'static) -> Error {
    Error::Io(io::Error::new(io::ErrorKind::InvalidInput, error)).bt()
}

/// The error of type `E` that candle's error carries, also below context, a path or a backtrace.
///
/// ```
/// use moe_kernels::candle::{DType, Device, Tensor};
/// use moe_kernels::{ArgumentError, TensorView, cause, arguments::expect_dtype};
/// let x = Tensor::zeros(2, DType::F32, &Device::Cpu)?;
/// let error = expect_dtype("my op", "x", &TensorView::new(&x)?.view()?, DType::BF16).unwrap_err();
/// let error = error.context("layer 3");
/// assert!(matches!(cause(&error), Some(ArgumentError::Dtype { got: DType::F32, .. })));
/// # Ok::<(), moe_kernels::candle::Error>(())
/// ```
pub fn cause<E: StdError + 'static>(error: &Error) -> Option<&E> {
    match error {
        Error::Context { inner, .. } | Error::WithPath { inner, .. } | Error::WithBacktrace { inner, .. } => {
            cause(inner)
        }
        Error::WrappedContext { wrapped, .. } => of_std(wrapped.as_ref()),
        Error::Io(io) => of_std(io.get_ref()?),
        _ => None,
    }
}

/// The error itself, or what candle's error in it carries.
fn of_std<'a, E: StdError + 'static>(error: &'a (dyn StdError + Send + Sync + 'static)) -> Option<&'a E> {
    error.downcast_ref().or_else(|| cause(error.downcast_ref::<Error>()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::error::Context;

    #[test]
    fn a_typed_error_is_found_below_whatever_candle_puts_around_it() {
        let wrong = ArgumentError::Dims {
            op: "op".into(),
            name: "x".into(),
            expected: "dims [2]".into(),
            got: vec![3],
        };
        let text = "op: expected x with dims [2], got [3]";
        let error = Error::from(wrong.clone());
        assert!(error.to_string().starts_with(text), "{error}");
        assert_eq!(cause(&error), Some(&wrong));
        let around = error.context("layer").with_path("file");
        assert_eq!(cause(&around), Some(&wrong));
        let again: Result<(), _> = Err::<(), _>(around).context("outside");
        assert_eq!(again.err().as_ref().and_then(cause), Some(&wrong));
        assert_eq!(cause::<ArgumentError>(&Error::Msg(text.into())), None);
        assert!(cause::<io::Error>(&Error::from(wrong)).is_none());
    }
}
