//! What the user types: with line editing and history at a terminal, plain lines otherwise.

use std::io::{self, BufRead, IsTerminal};

use anyhow::{Context, Result};
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;

/// Where lines come from.
pub enum Lines {
    /// A person.
    Terminal(Box<DefaultEditor>),
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
    /// Of stdin.
    pub fn open() -> Result<Self> {
        if io::stdin().is_terminal() && io::stdout().is_terminal() {
            return Ok(Self::Terminal(Box::new(DefaultEditor::new().context("cannot use the terminal")?)));
        }
        Ok(Self::Plain)
    }

    /// Whether a person sits there.
    pub fn is_terminal(&self) -> bool {
        matches!(self, Self::Terminal(_))
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
                    if let Self::Terminal(editor) = self {
                        // For the arrow keys. A line that cannot be remembered is no reason to stop.
                        let _ = editor.add_history_entry(&message);
                    }
                    return Ok(Typed::Message(message));
                }
            }
        }
    }

    fn line(&mut self, prompt: &str) -> Result<Typed> {
        match self {
            Self::Terminal(editor) => match editor.readline(prompt) {
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
