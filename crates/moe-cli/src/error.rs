//! Errors as text for users: one line of causes, without repetitions.
//!
//! Some library errors repeat their source in their own text, and candle adds a backtrace when `RUST_BACKTRACE` is set.
//! Neither helps a user whose file is truncated.

use std::error::Error;

use console::Term;
use moe_engine::terminal::{LONGEST_MESSAGE, note, note_error, shortened};

use crate::setting_names::as_flags;

/// Reports an error to the user on stderr. At a terminal, lines break between words.
pub fn report(error: &anyhow::Error) {
    let text = describe(error);
    match Term::stderr().size_checked() {
        Some((_, columns)) => {
            let text = format!("error: {}", shortened(&text, LONGEST_MESSAGE));
            note(wrapped(&text, usize::from(columns)));
        }
        None => note_error(text),
    }
}

/// An error that is a mistake on the command line: the program ends with the code 2.
pub fn usage(message: impl Into<String>) -> anyhow::Error {
    moe_engine::usage(message).into()
}

/// Whether the command line or a setting is at fault.
pub fn is_usage(error: &anyhow::Error) -> bool {
    let of_engine = error.downcast_ref::<moe_engine::Error>();
    of_engine.is_some_and(moe_engine::Error::is_usage)
}

/// Wraps text that is wider than a terminal with `columns` columns. Words stay whole, so that names and commands can be
/// copied, and indented lines stay unchanged.
fn wrapped(text: &str, columns: usize) -> String {
    let mut out = String::with_capacity(text.len() + 8);
    for line in text.split_inclusive('\n') {
        let mut used = 0;
        for word in line.split_inclusive(' ') {
            let width = word.trim_end().chars().count();
            if used > 0 && used + width > columns && !line.starts_with(' ') {
                out.truncate(out.trim_end_matches(' ').len());
                out.push('\n');
                used = 0;
            }
            out += word;
            used += word.chars().count();
        }
    }
    out
}

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
    as_flags(&text).into_owned()
}

/// A cause's own text, without candle's backtrace.
fn message(cause: &(dyn Error + 'static)) -> String {
    match cause.downcast_ref::<candle_core::Error>() {
        Some(error) => without_backtrace(&innermost(error).to_string()),
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
    fn long_lines_break_between_words() {
        assert_eq!(wrapped("error: all of it", 80), "error: all of it");
        assert_eq!(
            wrapped("a long name/that/stays/whole and more", 12),
            "a long\nname/that/stays/whole\nand more"
        );
        assert_eq!(wrapped("ab cd\n  1 | x y z\nef gh", 4), "ab\ncd\n  1 | x y z\nef\ngh");
        assert_eq!(wrapped("ab cd", 5), "ab cd");
    }

    #[test]
    fn backtraces_are_cut() {
        let error = candle_core::Error::Msg("bad shape".into()).bt();
        assert_eq!(describe(&anyhow::Error::new(error)), "bad shape");
        let inner = candle_core::Error::Msg("bad\n   0: core::fn".into());
        let error = candle_core::Error::Context { inner: Box::new(inner), context: Box::new("row 5") };
        assert!(!describe(&anyhow::Error::new(error)).contains("core::fn"));
        assert_eq!(without_backtrace("a\nb\n   0: core::fn\n   1: x"), "a\nb");
    }
}
