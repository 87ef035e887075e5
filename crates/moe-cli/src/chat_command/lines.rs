//! What the user types: with line editing and history at a terminal, plain lines otherwise.

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

/// Where lines come from.
pub enum Lines {
    /// A person.
    Terminal(Box<Typist>),
    /// A file or another program.
    Plain,
}

/// What a person types at a terminal.
pub struct Typist {
    editor: Editor<Paste, DefaultHistory>,
    /// Lines may be kept for the next time.
    history: Option<History>,
    /// What was pasted and is not answered yet.
    waiting: VecDeque<String>,
    /// Ctrl-D came with a paste.
    ended: bool,
}

/// What came.
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
    /// The lines of stdin; `keep`: with the history of earlier runs.
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

    /// Whether a person sits there.
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
                // The file may end in a continued line.
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

    /// For the arrow keys. A line that cannot be remembered is no reason to stop.
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
                    // Its last line has no end yet, and may be edited.
                    Some(pasted) => pasted,
                },
                Err(e) => return Err(e).context("cannot read from the terminal"),
            };
            print("\n")?;
        }
    }

    /// A line with those that came together with it.
    fn with_lines_that_wait(&mut self, mut text: String) -> Result<String> {
        while !self.ended && paste::more_lines_wait() {
            match plain_line(&mut io::stdin().lock())? {
                Typed::Message(line) => text = text + "\n" + &line,
                _ => self.ended = true,
            }
        }
        Ok(text)
    }

    /// The first message of a paste; the others wait.
    fn pasted(&mut self, text: &str) -> Typed {
        self.waiting = paste::messages(text).into();
        Typed::Message(self.waiting.pop_front().unwrap_or_default())
    }
}

/// Whether the terminal is one that rustyline edits no lines on.
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
