//! What the text of a request must be, and what may come before it: plain data.

use serde::{Deserialize, Serialize};

use crate::chat::{AnswerForm, Begun};

/// What the text of a request must be. Plain data: the engine compiles it when the request is added.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum StructuredOutput {
    /// Any JSON object.
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
    /// What it describes the text with.
    pub(super) fn what(&self) -> &'static str {
        match self {
            Self::JsonObject => "JSON object",
            Self::JsonSchema(_) => "JSON schema",
            Self::Regex(_) => "regular expression",
            Self::Choice(_) => "list of choices",
            Self::Grammar(_) => "grammar",
            Self::ToolCalls { .. } => "grammar of tool calls",
        }
    }

    pub(super) fn error(&self, reason: impl Into<String>) -> StructuredOutputError {
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
