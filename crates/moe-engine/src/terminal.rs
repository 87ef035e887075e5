//! Writes the output of a program to stdout, and its messages to stderr. An error of stderr never stops the work; an
//! error of stdout does. Texts from files and peers reach a terminal without control characters.

use std::borrow::Cow;
use std::fmt::{Display, Write as _};
use std::io::{self, ErrorKind, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Context, Result};

/// The most characters of an error or a warning: about a screen.
pub const LONGEST_MESSAGE: usize = 4000;

/// Writes to stdout and flushes it. Returns false if the reader has closed the pipe, as `head` does; that is not an
/// error.
///
/// # Errors
/// Stdout cannot be written, so the result would be lost.
pub fn print(text: &str) -> Result<bool> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() == ErrorKind::BrokenPipe => Ok(false),
        result => result.map(|()| true).context("cannot write to stdout"),
    }
}

/// Writes lines to stderr, with control characters made visible. A newline is added if the text does not end with one.
/// A message that cannot be written is lost, because the run matters more than its messages.
pub fn note(text: impl Display) {
    let mut text = text.to_string();
    if text.is_empty() {
        return;
    }
    if !text.ends_with('\n') {
        text.push('\n');
    }
    let _ = io::stderr().write_all(visible(&text).as_bytes());
}

/// Whether only errors and requested output are written.
static QUIET: AtomicBool = AtomicBool::new(false);

/// From now on, only errors and requested output are written.
pub fn be_quiet() {
    QUIET.store(true, Ordering::Relaxed);
}

/// Whether only errors and requested output are written.
pub fn is_quiet() -> bool {
    QUIET.load(Ordering::Relaxed)
}

/// Does the same as [`note`] for messages that the user has not requested, such as the progress of a run. In quiet mode
/// it writes nothing.
pub fn hint(text: impl Display) {
    if !is_quiet() {
        note(text);
    }
}

/// Writes an error to stderr like [`note`]. If the error is very long, only its beginning and its end are written.
pub fn note_error(error: impl Display) {
    note(shortened(&format!("error: {error}"), LONGEST_MESSAGE));
}

/// Returns a text with its control characters written as escapes (`\u{1b}`), so that a terminal shows them and does not
/// obey them. Newlines, tabs and the letters of all scripts stay.
pub fn visible(text: &str) -> Cow<'_, str> {
    escaped(text, commands_terminal)
}

/// Does the same as [`visible`] for a line that has colours of its own, and whose values are already escaped.
fn visible_in_colours(text: &str) -> Cow<'_, str> {
    escaped(text, |c| c != '\u{1b}' && commands_terminal(c))
}

/// Returns JSON that is safe on a terminal: characters that [`visible`] would escape are written as escapes of JSON.
pub fn visible_json(text: &str) -> Cow<'_, str> {
    if !text.contains(commands_terminal) {
        return Cow::Borrowed(text);
    }
    let escape = |c: char| match commands_terminal(c) {
        true => format!("\\u{:04x}", u32::from(c)),
        false => c.to_string(),
    };
    Cow::Owned(text.chars().map(escape).collect())
}

fn escaped(text: &str, is_escaped: impl Fn(char) -> bool) -> Cow<'_, str> {
    if !text.contains(&is_escaped) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '\r' if chars.peek() == Some(&'\n') => {}
            c if is_escaped(c) => out.extend(c.escape_default()),
            c => out.push(c),
        }
    }
    Cow::Owned(out)
}

/// Whether a terminal reads a character as a command or as a change of the writing direction.
fn commands_terminal(c: char) -> bool {
    match c {
        '\n' | '\t' => false,
        // These characters change the writing direction: embeddings, overrides and isolates. They can make a text look
        // like another one.
        '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => true,
        c => c.is_control(),
    }
}

/// Shortens a text to about `most` characters: its beginning, its end, and the number of characters in between.
pub fn shortened(text: &str, most: usize) -> Cow<'_, str> {
    let count = text.chars().count();
    if count <= most {
        return Cow::Borrowed(text);
    }
    // More is kept of the beginning, but the end of a message often says what to do, so it gets a quarter.
    let head = most - most / 4;
    let tail = most / 4;
    let place = |n: usize| text.char_indices().nth(n).map_or(text.len(), |(at, _)| at);
    let mut out = text[..place(head)].to_string();
    // Writing to a string does not fail.
    let _ = write!(out, " [.. {} characters are left out ..] ", count - head - tail);
    out += &text[place(count - tail)..];
    Cow::Owned(out)
}

/// Stderr as the target of a log. Each write is one message, and no write fails.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stderr;

impl Write for Stderr {
    fn write(&mut self, message: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(message);
        let text = match text.strip_suffix('\n') {
            Some(line) => shortened(line, LONGEST_MESSAGE) + "\n",
            None => shortened(&text, LONGEST_MESSAGE),
        };
        let _ = io::stderr().write_all(visible_in_colours(&text).as_bytes());
        Ok(message.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_shown_and_not_obeyed() {
        let evil = "a\u{1b}]0;title\u{7}b\u{9b}31mc\rd\u{8}e\u{7f}\u{202e}f\0";
        let shown = r"a\u{1b}]0;title\u{7}b\u{9b}31mc\rd\u{8}e\u{7f}\u{202e}f\u{0}";
        assert_eq!(visible(evil), shown);
        assert!(matches!(visible("línea\n\tשלום 漢字 👩‍👩‍👧\n"), Cow::Borrowed(_)), "text stays as it is");
        assert_eq!(visible("a\r\nb\r"), "a\nb\\r", "ends of lines are no commands");
        assert_eq!(visible_in_colours("\u{1b}[33mWARN\u{1b}[0m a\rb"), "\u{1b}[33mWARN\u{1b}[0m a\\rb");
    }

    #[test]
    fn json_stays_json() {
        let text = serde_json::json!({"x": "\u{1b}a\u{9b}b\u{7f}\u{202e}é"}).to_string();
        let shown = visible_json(&text);
        assert_eq!(shown, r#"{"x":"\u001ba\u009bb\u007f\u202eé"}"#);
        let back: serde_json::Value = serde_json::from_str(&shown).unwrap();
        assert_eq!(back["x"], "\u{1b}a\u{9b}b\u{7f}\u{202e}é");
    }

    #[test]
    fn long_texts_keep_their_beginning_and_end() {
        assert_eq!(shortened("ééé", 3), "ééé");
        let long = format!("begin{}end", "é".repeat(10_000));
        let short = shortened(&long, 100);
        assert!(short.starts_with("begin") && short.ends_with("end"), "{short}");
        assert!(short.contains("9908 characters are left out") && short.chars().count() < 150, "{short}");
    }
}
