//! Says what a flag with a whole number expects, because clap shows Rust's own message.

use std::error::Error;
use std::num::{IntErrorKind, ParseIntError};

use clap::error::{ContextKind, ErrorKind};

/// clap's error, reworded if the value of a flag is not a whole number.
pub fn reworded(error: clap::Error) -> clap::Error {
    let Some(fault) = error.source().and_then(|source| source.downcast_ref::<ParseIntError>()) else {
        return error;
    };
    let expected = match fault.kind() {
        IntErrorKind::Zero => "expected at least 1",
        IntErrorKind::PosOverflow => "the number is too large",
        IntErrorKind::NegOverflow => "the number is too small",
        _ => "expected a whole number, without sign or unit",
    };
    let context = |kind| error.get(kind).map(ToString::to_string).unwrap_or_default();
    let value = context(ContextKind::InvalidValue);
    let flag = context(ContextKind::InvalidArg);
    let message =
        format!("invalid value '{value}' for '{flag}': {expected}\n\nFor more information, try '--help'.\n");
    clap::Error::raw(ErrorKind::ValueValidation, message)
}
