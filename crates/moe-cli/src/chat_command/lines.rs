//! Reads the user's lines: with line editing and history at a terminal, as plain lines otherwise.

use std::collections::VecDeque;
use std::io::{self, BufRead, IsTerminal};

use anyhow::{Context, Result};
use moe_engine::terminal::note;
use rustyline::Editor;
use rustyline::error::ReadlineError;
use rustyline::history::DefaultHistory;

use super::history::{self, History};
use super::paste::{self, Paste};
use crate::output::print;

/// The source of lines.
pub enum Lines {
    /// A user at a terminal.
    Terminal(Box<Typist>),
    /// A file or another program.
    Plain,
}

/// A user who types at a terminal.
pub struct Typist {
    editor: Editor<Paste, DefaultHistory>,
    /// The history, if lines are stored for the next run.
    history: Option<History>,
    /// Pasted messages that are not answered yet.
    waiting: VecDeque<String>,
    /// Whether Ctrl-D came with a paste.
    ended: bool,
}

/// The result of reading.
#[derive(Debug, PartialEq)]
pub enum Typed {
    /// A message, perhaps of several lines.
    Message(String),
    /// Ctrl-C at the prompt.
    Interrupted,
    /// Ctrl-D, or the end of the file.
    End,
}

impl Lines {
    /// The lines of stdin. With `keep`, they include the history of earlier runs.
    pub fn open(keep: bool) -> Result<Self> {
        if !(io::stdin().is_terminal() && io::stdout().is_terminal()) {
            return Ok(Self::Plain);
        }
        let mut editor = Editor::<Paste, DefaultHistory>::new().context("cannot use the terminal")?;
        editor.set_helper(Some(Paste::default()));
        let place = history::place(|name| std::env::var_os(name)).filter(|_| keep);
        let history = place.and_then(|path| match History::open(&path) {
            Ok((history, entries)) => {
                for entry in entries {
                    let _ = editor.add_history_entry(entry);
                }
                Some(history)
            }
            Err(e) => {
                note(format_args!("warning: no history is kept in {}: {e}", path.display()));
                None
            }
        });
        Ok(Self::Terminal(Box::new(Typist { editor, history, waiting: VecDeque::new(), ended: false })))
    }

    /// Whether stdin is a terminal.
    pub fn is_terminal(&self) -> bool {
        matches!(self, Self::Terminal(..))
    }

    /// The next message; a backslash at the end of a line continues it on the next one.
    pub fn message(&mut self) -> Result<Typed> {
        let mut message = String::new();
        loop {
            let prompt = if message.is_empty() { "> " } else { "… " };
            let line = match self.line(prompt)? {
                Typed::Message(line) => line,
                // The file may end in a line that is to be continued.
                Typed::End if !message.is_empty() => String::new(),
                other => return Ok(other),
            };
            match line.strip_suffix('\\') {
                Some(start) => message = message + start + "\n",
                None => {
                    message += &line;
                    self.remember(&message);
                    return Ok(Typed::Message(message));
                }
            }
        }
    }

    /// Stores a line for the arrow keys. If that fails, the conversation still goes on.
    fn remember(&mut self, message: &str) {
        let Self::Terminal(typist) = self else { return };
        let new = typist.editor.add_history_entry(message).unwrap_or(false);
        if let Some(file) = typist.history.as_mut().filter(|_| new)
            && let Err(e) = file.add(message)
        {
            note(format_args!("warning: the history is kept no longer: {e}"));
            typist.history = None;
        }
    }

    fn line(&mut self, prompt: &str) -> Result<Typed> {
        match self {
            Self::Terminal(typist) => typist.line(prompt),
            Self::Plain => plain_line(&mut io::stdin().lock()),
        }
    }
}

impl Typist {
    /// The next line, or all lines of a paste.
    fn line(&mut self, prompt: &str) -> Result<Typed> {
        if let Some(line) = self.waiting.pop_front() {
            return Ok(Typed::Message(line));
        }
        if self.ended {
            return Ok(Typed::End);
        }
        let mut text = String::new();
        loop {
            if let Some(paste) = self.editor.helper() {
                paste.begin();
            }
            text = match self.editor.readline_with_initial(prompt, (&text, "")) {
                Ok(line) if without_editing() => {
                    let text = self.with_lines_that_wait(line)?;
                    return Ok(self.pasted(&text));
                }
                Ok(line) => return Ok(Typed::Message(line)),
                Err(ReadlineError::Interrupted) => return Ok(Typed::Interrupted),
                Err(ReadlineError::Eof) => match self.editor.helper().and_then(Paste::take) {
                    None => return Ok(Typed::End),
                    Some(pasted) if pasted.ends_with('\n') => return Ok(self.pasted(&pasted)),
                    // The last line of a paste has no line end yet, and may be edited.
                    Some(pasted) => pasted,
                },
                Err(e) => return Err(e).context("cannot read from the terminal"),
            };
            print("\n")?;
        }
    }

    /// A line together with the lines that arrived at the same time.
    fn with_lines_that_wait(&mut self, mut text: String) -> Result<String> {
        while !self.ended && paste::more_lines_wait() {
            match plain_line(&mut io::stdin().lock())? {
                Typed::Message(line) => text = text + "\n" + &line,
                _ => self.ended = true,
            }
        }
        Ok(text)
    }

    /// The first message of a paste; the other messages wait.
    fn pasted(&mut self, text: &str) -> Typed {
        self.waiting = paste::messages(text).into();
        Typed::Message(self.waiting.pop_front().unwrap_or_default())
    }
}

/// Whether rustyline cannot edit lines on this terminal.
fn without_editing() -> bool {
    let term = std::env::var("TERM").unwrap_or_default();
    ["dumb", "cons25", "emacs"].iter().any(|name| term.eq_ignore_ascii_case(name))
}

fn plain_line(input: &mut impl BufRead) -> Result<Typed> {
    let mut bytes = Vec::new();
    if input.read_until(b'\n', &mut bytes).context("cannot read from stdin")? == 0 {
        return Ok(Typed::End);
    }
    let text = String::from_utf8(bytes).context("stdin is not UTF-8")?;
    Ok(Typed::Message(text.trim_end_matches(['\n', '\r']).to_string()))
}
