//! What the user types: with line editing and history at a terminal, plain lines otherwise.

use std::io::{self, BufRead, IsTerminal};

use anyhow::{Context, Result};
use moe_engine::terminal::note;
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;

use super::history::{self, History};

/// Where lines come from.
pub enum Lines {
    /// A person, whose lines may be kept for the next time.
    Terminal(Box<DefaultEditor>, Option<History>),
    /// A file or another program.
    Plain,
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
        let mut editor = DefaultEditor::new().context("cannot use the terminal")?;
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
        Ok(Self::Terminal(Box::new(editor), history))
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
        let Self::Terminal(editor, history) = self else { return };
        let new = editor.add_history_entry(message).unwrap_or(false);
        if let Some(file) = history.as_mut().filter(|_| new)
            && let Err(e) = file.add(message)
        {
            note(format_args!("warning: the history is kept no longer: {e}"));
            *history = None;
        }
    }

    fn line(&mut self, prompt: &str) -> Result<Typed> {
        match self {
            Self::Terminal(editor, _) => match editor.readline(prompt) {
                Ok(line) => Ok(Typed::Message(line)),
                Err(ReadlineError::Interrupted) => Ok(Typed::Interrupted),
                Err(ReadlineError::Eof) => Ok(Typed::End),
                Err(e) => Err(e).context("cannot read from the terminal"),
            },
            Self::Plain => plain_line(&mut io::stdin().lock()),
        }
    }
}

fn plain_line(input: &mut impl BufRead) -> Result<Typed> {
    let mut bytes = Vec::new();
    if input.read_until(b'\n', &mut bytes).context("cannot read from stdin")? == 0 {
        return Ok(Typed::End);
    }
    let text = String::from_utf8(bytes).context("stdin is not UTF-8")?;
    Ok(Typed::Message(text.trim_end_matches(['\n', '\r']).to_string()))
}
