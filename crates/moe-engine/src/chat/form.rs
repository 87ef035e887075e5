//! The form of a model's answers: how the model writes reasoning and tool calls.

use super::ChatFiles;
use super::parsers::{CallParser, DEFAULT_CALLS, ReasoningParser};

/// The parts that an answer is searched for. By default there are none, and the whole answer is text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AnswerForm {
    /// How the model writes reasoning.
    pub reasoning: Option<&'static ReasoningParser>,
    /// How it writes tool calls.
    pub calls: Option<&'static CallParser>,
}

impl AnswerForm {
    /// The form in which reasoning is written if the model's own form is not known.
    pub const REASONING: &'static ReasoningParser = &super::parsers::THINK_TAGS;

    /// Returns the form of answers that a checkpoint's templates show.
    pub fn of(files: &ChatFiles) -> Self {
        Self { reasoning: ReasoningParser::of(files), calls: CallParser::of(files) }
    }

    /// Checks that an answer can have both this form of reasoning and this form of calls.
    ///
    /// # Errors
    /// One of them uses harmony's channels, and the other uses tags.
    pub fn check(&self) -> Result<(), String> {
        match (self.reasoning, self.calls) {
            (Some(reasoning), Some(calls)) if reasoning.channels != calls.is_channel() => Err(format!(
                "the reasoning parser {} and the tool-call parser {} are of different models: openai_gptoss and openai \
                 belong together, and neither fits another one; leave one of the two out, or name none for it",
                reasoning.name, calls.name
            )),
            _ => Ok(()),
        }
    }

    /// Returns the form of calls for a grammar that requires calls: the form of the model's calls, or else the form
    /// that fits its reasoning.
    pub fn required_calls(&self) -> &'static CallParser {
        let of_channels = || CallParser::named("openai").filter(|_| self.has_channels());
        self.calls.or_else(of_channels).unwrap_or(DEFAULT_CALLS)
    }

    /// Whether the answer is a sequence of messages, each in a channel.
    pub(super) fn has_channels(&self) -> bool {
        self.reasoning.is_some_and(|parser| parser.channels) || self.calls.is_some_and(CallParser::is_channel)
    }

    /// The tags of the form. A tokenizer may hide them with its other special tokens.
    pub fn tags(&self) -> Vec<&'static str> {
        let mut tags = Vec::new();
        tags.extend(self.reasoning.iter().flat_map(|parser| parser.tags()));
        tags.extend(self.calls.iter().flat_map(|parser| parser.tags()));
        tags
    }
}
