//! Chat templates: from a conversation to the prompt that the model was trained on, as
//! transformers' `apply_chat_template` makes it.
//!
//! A template is Jinja2 under Python; minijinja runs it here. `engine` sets minijinja up as
//! transformers sets up Jinja2, `python` and `json` are what is Python in templates,
//! `checkpoint` finds the templates and special tokens, `worker` renders in a process that a bad
//! template may take down; `answer` takes apart what the model says. docs/chat.md lists what still differs.

mod answer;
mod begun;
mod call;
mod checkpoint;
mod continuation;
mod engine;
mod error;
mod json;
mod python;
mod raw;
mod serve;
mod template;
#[cfg(test)]
mod tests;
mod worker;

use serde_json::{Map, Value};

pub use answer::{Answer, AnswerForm, Part, Splitter};
pub use begun::Begun;
pub(crate) use begun::{END_THINK, THINK};
pub use call::ToolCall;
pub(crate) use call::{CALL, END_CALL};
pub use checkpoint::ChatFiles;
pub use error::ChatError;
pub use raw::with_long_integers;
pub use serve::serve;
pub use template::ChatTemplate;
pub use worker::RENDER_COMMAND;

pub use crate::isolated::this_program;

/// A conversation and how to render it: the arguments of `apply_chat_template`, under the names
/// they have in a request to `/v1/chat/completions`.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct ChatRequest {
    /// The messages, each an object; templates expect `role` and `content` at least.
    pub messages: Vec<Value>,
    /// Tools as JSON schemas. An empty list is not the same as none.
    pub tools: Option<Vec<Value>>,
    /// Documents to answer from.
    pub documents: Option<Vec<Value>>,
    /// End the prompt where the assistant's answer begins.
    pub add_generation_prompt: bool,
    /// Leave the last message open, so that the answer continues it.
    pub continue_final_message: bool,
    /// Further variables of the template, such as `enable_thinking`. They replace special tokens
    /// of their name.
    pub chat_template_kwargs: Map<String, Value>,
}
