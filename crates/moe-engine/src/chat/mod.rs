//! Chat templates: converts a conversation to the prompt on which the model was trained, as transformers'
//! `apply_chat_template` does.
//! A template is written in Jinja2 and expects Python; here minijinja runs it. `engine` sets minijinja up in the way in
//! which transformers sets up Jinja2. `python` and `json` imitate Python. `checkpoint` finds the templates and special
//! tokens. `worker` renders in a separate process, which a bad template may crash. `answer` splits the model's answer
//! into its parts, in the forms of `parsers`. docs/chat.md lists the remaining differences.

mod answer;
#[cfg(test)]
mod answer_tests;
mod arguments;
mod begun;
mod call;
mod call_ends;
mod channel_tags;
mod channels;
mod checkpoint;
mod continuation;
mod engine;
mod error;
mod form;
mod json;
mod parsers;
#[cfg(test)]
mod parsers_tests;
mod part;
mod python;
mod raw;
mod serve;
mod splitter;
mod tags;
mod template;
#[cfg(test)]
mod tests;
mod worker;
mod written;

use serde_json::{Map, Value};

pub use answer::{Answer, Splitter};
pub use arguments::Schemas;
pub use begun::Begun;
pub use call::ToolCall;
pub(crate) use channel_tags::{ASSISTANT, CHANNEL, FINAL, JSON_MESSAGE, MESSAGE};
pub use checkpoint::ChatFiles;
pub use error::ChatError;
pub use form::AnswerForm;
pub use parsers::{
    ArgumentTags, CALL_PARSERS, CallBody, CallParser, REASONING_PARSERS, ReasoningParser, Tags,
};
pub(crate) use parsers::{CALL_ARGUMENTS, calls_by_name, reasoning_by_name};
pub use part::Part;
pub use raw::{has_long_integer, json_field, with_long_integers};
pub use serve::serve;
pub use template::ChatTemplate;
pub use worker::RENDER_COMMAND;

pub use crate::isolated::this_program;

/// A conversation and how to render it. The fields are the arguments of `apply_chat_template`, under the names that
/// they have in a request to `/v1/chat/completions`.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct ChatRequest {
    /// The messages. Each is an object; templates expect at least `role` and `content`.
    pub messages: Vec<Value>,
    /// Tools as JSON schemas. For a template an empty list differs from `None`.
    pub tools: Option<Vec<Value>>,
    /// Documents that the model may use for its answer.
    pub documents: Option<Vec<Value>>,
    /// Ends the prompt where the assistant's answer begins.
    pub add_generation_prompt: bool,
    /// Leaves the last message open, so that the answer continues it.
    pub continue_final_message: bool,
    /// Further variables of the template, such as `enable_thinking`. They replace special tokens of the same name.
    pub chat_template_kwargs: Map<String, Value>,
}
