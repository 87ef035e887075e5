//! The form that the text of a request must have, and what may come before the text. This is plain data.

use serde::{Deserialize, Serialize};

use crate::chat::{AnswerForm, Begun, CallParser, ReasoningParser, calls_by_name, reasoning_by_name};

/// The form that the text of a request must have. This is plain data: the engine compiles it when the request is added.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum StructuredOutput {
    /// Any JSON object.
    JsonObject,
    /// JSON that a schema describes. The schema is JSON text, because the format in which requests are sent between
    /// processes has no JSON values.
    JsonSchema(String),
    /// A regular expression that the whole text matches. It has the syntax of the `regex` crate, but `\d`, `\w` and
    /// `\s` are classes of ASCII characters.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A grammar in llguidance's dialect of Lark; its first rule is `start`.
    Grammar(String),
    /// Calls of these functions.
    ToolCalls {
        /// The form in which the model writes calls.
        #[serde(with = "calls_by_name")]
        parser: &'static CallParser,
        /// The functions that the model may call.
        functions: Vec<Function>,
        /// Whether the model may make more than one call.
        parallel: bool,
    },
}

/// The reasoning that comes before a structured output. It is free up to its closing tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Reasoning {
    /// The form in which the model writes its reasoning.
    #[serde(with = "reasoning_by_name")]
    pub parser: &'static ReasoningParser,
    /// Whether the answer is within the reasoning from its first token. If this is false, the model begins either with
    /// the opening tag or with the output. In channels, all but a call then comes after any other messages.
    pub open: bool,
}

impl Reasoning {
    /// Returns the reasoning that comes before the output in an answer of this form. `begun` is the part that the
    /// prompt has already begun.
    pub fn before(form: AnswerForm, begun: Begun) -> Option<Self> {
        let parser = form.reasoning?;
        match begun {
            Begun::Nothing => Some(Self { parser, open: parser.assumed }),
            Begun::Reasoning | Begun::MoreReasoning => Some(Self { parser, open: true }),
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

/// The error of a [`StructuredOutput`] that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the {what} cannot be used: {reason}")]
pub struct StructuredOutputError {
    /// The kind of the description, such as "JSON schema".
    pub what: &'static str,
    /// What is wrong with the description.
    pub reason: String,
}

crate::error::parts!(StructuredOutputError);

impl StructuredOutput {
    /// Returns the kind of the description.
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

    /// Returns whether the text begins with the header of its message, which is so of a call in a channel.
    pub(super) fn has_header(&self) -> bool {
        matches!(self, Self::ToolCalls { parser, .. } if parser.is_channel())
    }

    pub(super) fn error(&self, reason: impl Into<String>) -> StructuredOutputError {
        StructuredOutputError { what: self.what(), reason: reason.into() }
    }

    /// Returns the number of bytes of the description.
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
