//! Lines that are pasted together are one message, even at a terminal that does not mark pasted text (bracketed paste).
//!
//! A user who types does not press Enter within a few milliseconds of a letter. After such an Enter the editor
//! continues, and the terminal is set to report an end of the input when nothing has arrived for a tenth of a second,
//! which is the end of the paste.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use rustyline::Helper;
use rustyline::completion::Completer;
use rustyline::highlight::{CmdKind, Highlighter};
use rustyline::hint::Hinter;
use rustyline::validate::{ValidationContext, ValidationResult, Validator};

use super::commands::Input;

/// This is less than the time between two typed keys, and more than between two letters of a paste.
const AT_ONCE: Duration = Duration::from_millis(3);

/// Watches the keys of a line for the editor.
#[derive(Default)]
pub struct Paste {
    last_key: Cell<Option<Instant>>,
    line: RefCell<String>,
    pasting: Cell<bool>,
}

impl Paste {
    /// Forgets the previous line.
    pub fn begin(&self) {
        self.last_key.set(None);
        self.pasting.set(false);
        self.line.borrow_mut().clear();
    }

    /// The pasted text, if it was a paste and the editor has reached its end.
    pub fn take(&self) -> Option<String> {
        self.pasting.take().then(|| self.line.take())
    }
}

impl Highlighter for Paste {
    fn highlight_char(&self, line: &str, _: usize, kind: CmdKind) -> bool {
        if kind != CmdKind::ForcedRefresh {
            self.last_key.set(Some(Instant::now()));
            *self.line.borrow_mut() = line.to_string();
        }
        false
    }
}

impl Validator for Paste {
    fn validate(&self, _: &mut ValidationContext) -> rustyline::Result<ValidationResult> {
        let at_once = self.last_key.get().is_some_and(|key| key.elapsed() < AT_ONCE);
        let pasting = self.pasting.get() || (at_once && end_at_silence());
        self.pasting.set(pasting);
        Ok(if pasting { ValidationResult::Incomplete } else { ValidationResult::Valid(None) })
    }
}

impl Completer for Paste {
    type Candidate = String;
}

impl Hinter for Paste {
    type Hint = String;
}

impl Helper for Paste {}

/// Makes the terminal report an end of the input when nothing arrives for a tenth of a second, until the editor sets
/// its modes again. Returns whether that worked.
#[cfg(unix)]
fn end_at_silence() -> bool {
    use rustix::termios::{OptionalActions, SpecialCodeIndex, tcgetattr, tcsetattr};
    let Ok(mut modes) = tcgetattr(std::io::stdin()) else { return false };
    modes.special_codes[SpecialCodeIndex::VMIN] = 0;
    modes.special_codes[SpecialCodeIndex::VTIME] = 1;
    tcsetattr(std::io::stdin(), OptionalActions::Now, &modes).is_ok()
}

#[cfg(not(unix))]
fn end_at_silence() -> bool {
    false
}

/// Whether a terminal without line editing already has another line, as after the first line of a paste.
#[cfg(unix)]
pub fn more_lines_wait() -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    const MOMENT: Timespec = Timespec { tv_sec: 0, tv_nsec: 30_000_000 };
    let stdin = std::io::stdin();
    let mut polled = [PollFd::new(&stdin, PollFlags::IN)];
    poll(&mut polled, Some(&MOMENT)).is_ok_and(|ready| ready > 0)
        && !polled[0].revents().contains(PollFlags::HUP)
}

#[cfg(not(unix))]
pub fn more_lines_wait() -> bool {
    false
}

/// The messages in a pasted text: one, unless it contains a command, which is a message of its own.
pub fn messages(text: &str) -> Vec<String> {
    let is_command = |line: &str| matches!(Input::parse(line), Input::Command(..));
    let text = text.trim_end_matches(['\n', '\r']);
    match text.lines().count() > 1 && text.lines().any(is_command) {
        true => text.lines().map(str::to_string).collect(),
        false => vec![text.to_string()],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_paste_is_one_message_unless_it_holds_commands() {
        assert_eq!(messages("one\n\n  two\n\n"), ["one\n\n  two"]);
        assert_eq!(messages("look at\n/etc/passwd\n"), ["look at\n/etc/passwd"], "that is no command");
        assert_eq!(messages("hi\n/quit\n"), ["hi", "/quit"]);
        assert_eq!(messages("/quit\n"), ["/quit"]);
        assert_eq!(messages("\n"), [""]);
    }

    #[test]
    fn only_what_was_pasted_is_taken() {
        let paste = Paste::default();
        paste.highlight_char("typed", 5, CmdKind::Other);
        assert_eq!(paste.take(), None);
        paste.pasting.set(true);
        assert_eq!((paste.take().as_deref(), paste.take()), (Some("typed"), None));
        paste.highlight_char("x", 1, CmdKind::Other);
        paste.begin();
        assert!(paste.last_key.get().is_none() && paste.line.borrow().is_empty());
    }
}
