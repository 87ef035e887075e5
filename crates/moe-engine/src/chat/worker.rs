//! Rendering in a process of its own, which a template may take down: a text doubled forty times, a list nested a million
//! deep.

use std::path::PathBuf;

use super::ChatRequest;
use super::checkpoint::ChatFiles;
use super::error::ChatError;
use crate::isolated::{self, Task};

/// The argument with which a program serves as a worker: it then does nothing but call [`serve`](super::serve).
pub const RENDER_COMMAND: &str = "render-chat-templates";

/// 1 GiB is 64 MiB of conversation, some copies of it, and the stack.
pub(super) const TASK: Task =
    Task { command: RENDER_COMMAND, what: "chat template", memory: 1 << 30, seconds: 20 };

/// Templates that a process of their own renders.
pub(super) struct Worker(isolated::Worker);

impl Worker {
    pub(super) fn new(program: PathBuf, files: &ChatFiles) -> Self {
        // Texts by name always have a JSON form.
        Self(isolated::Worker::new(program, TASK, json(files).unwrap_or_default()))
    }

    /// The prompt of a conversation; without one, whether the default template compiles.
    pub(super) fn render(&self, chat: Option<&ChatRequest>) -> Result<String, ChatError> {
        match self.0.ask(json(&chat)?).map_err(limit)? {
            Ok(prompt) => String::from_utf8(prompt).map_err(|e| limit(e.to_string())),
            Err(error) => Err(serde_json::from_slice(&error).unwrap_or_else(|e| limit(e.to_string()))),
        }
    }
}

fn limit(message: String) -> ChatError {
    ChatError::Limit { template: "default".to_string(), message }
}

pub(super) fn json(value: &impl serde::Serialize) -> Result<Vec<u8>, ChatError> {
    serde_json::to_vec(value).map_err(|e| ChatError::Request(e.to_string()))
}
