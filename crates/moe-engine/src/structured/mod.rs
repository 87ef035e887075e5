//! Structured output: text that follows a JSON schema, a regular expression, a list of choices or a grammar.
//!
//! ```text
//! StructuredOutput (data of a request) ─► Grammars: compiled once ─► Constraint of each choice ─► Mask of each token
//! ```
//!
//! The `llguidance` crate compiles and matches grammars; JSON schemas become grammars in `schema`. A mask says which
//! tokens may come next; the sampler sees nothing but the mask. [`Reasoning`] may come before: then the text is free up to
//! `</think>`.
//!
//! Compiling recurses, and what a text asks for may take all time and memory: `bounds` and `compiler` limit it, and
//! [`Precompiler`] tries it in another process first.

mod bounds;
mod compiler;
mod constraint;
mod grammars;
mod lead;
#[cfg(test)]
mod limits_tests;
mod perl;
mod precompiler;
mod room;
mod schema;
#[cfg(test)]
mod tests;
mod tool_calls;
mod vocabulary;

use serde::{Deserialize, Serialize};

pub(crate) use constraint::{Constraint, Mask};
pub(crate) use grammars::{Grammar, Grammars};
pub use precompiler::{COMPILE_COMMAND, Precompiled, Precompiler, serve};

use crate::chat::{AnswerForm, Begun};
use crate::tokenizer::Tokenizer;

/// What the text of a request must be. Plain data: the engine compiles it when the request is added.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum StructuredOutput {
    /// A JSON object, whatever is in it.
    JsonObject,
    /// JSON that a schema describes. The schema is JSON text: requests travel in a format that has no JSON values.
    JsonSchema(String),
    /// A regular expression, of the syntax of the `regex` crate, that the whole text matches. `\d`, `\w` and `\s` are
    /// classes of ASCII characters.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A grammar in llguidance's dialect of Lark; its first rule is `start`.
    Grammar(String),
    /// Calls of these functions: JSON between `<tool_call>` and `</tool_call>` (Hermes).
    ToolCalls {
        /// What may be called.
        functions: Vec<Function>,
        /// More than one call may be made.
        parallel: bool,
    },
}

/// Reasoning that comes before a structured output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Reasoning {
    /// The model may begin with `<think>`: then the text is free up to `</think>`. Otherwise it follows the output at once.
    Possible,
    /// The prompt has opened the reasoning: the text is free up to `</think>`.
    Open,
}

impl Reasoning {
    /// What comes before the output in an answer of this form, of which the prompt has begun this.
    pub fn before(form: AnswerForm, begun: Begun) -> Option<Self> {
        match begun {
            _ if !form.reasoning => None,
            Begun::Nothing => Some(Self::Possible),
            Begun::Reasoning | Begun::MoreReasoning => Some(Self::Open),
            Begun::Text => None,
        }
    }
}

/// A function that a model may call.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Function {
    /// Its name.
    pub name: String,
    /// The JSON schema of its arguments, as text.
    pub parameters: String,
}

/// Why a [`StructuredOutput`] cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the {what} cannot be used: {reason}")]
pub struct StructuredOutputError {
    /// What it describes the text with, such as "JSON schema".
    pub what: &'static str,
    /// What is wrong with it.
    pub reason: String,
}

impl StructuredOutput {
    /// Checks it as the engine will. Without a tokenizer a grammar is taken as it is: it may name special tokens.
    ///
    /// # Errors
    /// It is not well-formed, uses what is not supported, allows no text, or is too large.
    pub fn check(&self, tokenizer: Option<&Tokenizer>) -> Result<(), StructuredOutputError> {
        match (tokenizer, self) {
            (Some(tokenizer), _) => Grammars::new(tokenizer.clone()).compile(self).map(drop),
            (None, Self::Grammar(_)) => Ok(()),
            (None, _) => {
                let bytes = Tokenizer::bytes().map_err(|e| self.error(format!("{e:#}")))?;
                Grammars::new(bytes).compile(self).map(drop)
            }
        }
    }

    /// What it describes the text with.
    fn what(&self) -> &'static str {
        match self {
            Self::JsonObject => "JSON object",
            Self::JsonSchema(_) => "JSON schema",
            Self::Regex(_) => "regular expression",
            Self::Choice(_) => "list of choices",
            Self::Grammar(_) => "grammar",
            Self::ToolCalls { .. } => "grammar of tool calls",
        }
    }

    fn error(&self, reason: impl Into<String>) -> StructuredOutputError {
        StructuredOutputError { what: self.what(), reason: reason.into() }
    }

    /// Bytes of its text.
    pub fn text_len(&self) -> usize {
        match self {
            Self::JsonObject => 0,
            Self::JsonSchema(text) | Self::Regex(text) | Self::Grammar(text) => text.len(),
            Self::Choice(texts) => texts.iter().map(String::len).sum(),
            Self::ToolCalls { functions, .. } => {
                functions.iter().map(|function| function.name.len() + function.parameters.len()).sum()
            }
        }
    }
}
