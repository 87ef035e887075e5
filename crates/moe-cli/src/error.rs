//! Errors as a person reads them: one line of causes, each said once.
//!
//! Some library errors repeat their source in their own text, and candle appends a backtrace when
//! `RUST_BACKTRACE` is set; neither helps somebody whose file is truncated.

use std::error::Error;

/// The message of an error with its causes, outermost first.
pub fn describe(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain() {
        let message = message(cause);
        if text.is_empty() {
            text = message;
        } else if !text.contains(&message) {
            text = format!("{text}: {message}");
        }
    }
    text
}

/// A cause's own text, without candle's backtrace.
fn message(cause: &(dyn Error + 'static)) -> String {
    match cause.downcast_ref::<candle_core::Error>() {
        Some(error) => innermost(error).to_string(),
        None => without_backtrace(&cause.to_string()),
    }
}

fn innermost(error: &candle_core::Error) -> &candle_core::Error {
    match error {
        candle_core::Error::WithBacktrace { inner, .. } => innermost(inner),
        other => other,
    }
}

/// Cuts a text where a backtrace begins: its first frame is a line `   0: ...`.
fn without_backtrace(text: &str) -> String {
    let frame = text.lines().position(|line| line.trim_start().starts_with("0: "));
    let lines = text.lines().take(frame.unwrap_or(usize::MAX));
    lines.collect::<Vec<_>>().join("\n").trim_end().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn a_cause_is_said_once() {
        let io = std::io::Error::other("disk on fire");
        let outer = Err::<(), _>(io).context("cannot read x: disk on fire").context("loading").unwrap_err();
        assert_eq!(describe(&outer), "loading: cannot read x: disk on fire");
    }

    #[test]
    fn backtraces_are_cut() {
        let error = candle_core::Error::Msg("bad shape".into()).bt();
        assert_eq!(describe(&anyhow::Error::new(error)), "bad shape");
        assert_eq!(without_backtrace("a\nb\n   0: core::fn\n   1: x"), "a\nb");
    }
}
