//! Splits the answer of a model into reasoning, text and tool calls, while the answer arrives.
//!
//! Qwen3 and models of its kind write
//!
//! ```text
//! <think>
//! reasoning
//! </think>
//!
//! text
//! <tool_call>
//! {"name": "f", "arguments": {"x": 1}}
//! </tool_call>
//! ```
//!
//! Other families have other tags, which [`parsers`](super::parsers) lists. The tags may arrive in any pieces, and the
//! parts do not depend on the pieces. Line ends next to a tag belong to the form and are left out.

use super::arguments::Schemas;
use super::begun::Begun;
use super::call::ToolCall;
use super::channels::ChannelSplitter;
use super::form::AnswerForm;
use super::part::Part;
use super::splitter::TagSplitter;

/// A whole answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    /// The reasoning; `None` if the model did not reason.
    pub reasoning: Option<String>,
    /// The text that is neither reasoning nor a call.
    pub text: String,
    /// The calls in their order.
    pub calls: Vec<ToolCall>,
}

impl Answer {
    /// Splits a whole answer. `begun` is the part that the prompt has already begun. The schemas give the types of
    /// arguments.
    pub fn of(text: &str, form: AnswerForm, begun: Begun, schemas: Schemas) -> Self {
        let mut splitter = Splitter::new(form, begun, schemas);
        let mut answer = Self::default();
        answer.extend(splitter.push(text));
        answer.extend(splitter.finish());
        answer
    }

    /// Adds parts that have arrived.
    pub fn extend(&mut self, parts: Vec<Part>) {
        for part in parts {
            match part {
                Part::Reasoning(text) => *self.reasoning.get_or_insert_default() += &text,
                Part::Text(text) => self.text += &text,
                Part::Call(call) => self.calls.push(call),
            }
        }
    }
}

/// Splits an answer while it arrives.
pub struct Splitter(Way);

enum Way {
    Tags(TagSplitter),
    Channels(ChannelSplitter),
}

impl Splitter {
    /// Makes a splitter for an answer in this form. `begun` is the part of the answer that the prompt has already
    /// begun. The schemas of the functions give the types of their arguments; without a schema, arguments that are JSON
    /// stay JSON.
    pub fn new(form: AnswerForm, begun: Begun, schemas: Schemas) -> Self {
        Self(match form.has_channels() {
            true => Way::Channels(ChannelSplitter::new(form, begun)),
            false => Way::Tags(TagSplitter::new(form, begun, schemas)),
        })
    }

    /// Adds text, and returns the parts that later text cannot change any more.
    pub fn push(&mut self, text: &str) -> Vec<Part> {
        match &mut self.0 {
            Way::Tags(splitter) => splitter.push(text),
            Way::Channels(splitter) => splitter.push(text),
        }
    }

    /// Ends the answer and returns the remaining parts. The end of the reasoning or the closing tag of a call may be
    /// missing. An incomplete call is returned as text.
    pub fn finish(&mut self) -> Vec<Part> {
        match &mut self.0 {
            Way::Tags(splitter) => splitter.finish(),
            Way::Channels(splitter) => splitter.finish(),
        }
    }
}
