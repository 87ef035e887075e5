//! Renders in a separate process, because a template may crash it: for example by doubling a text forty times, or by
//! nesting a list a million levels deep.

use std::path::PathBuf;

use super::ChatRequest;
use super::checkpoint::ChatFiles;
use super::error::ChatError;
use crate::isolated::{self, Task};

/// The argument that makes a program a worker. The program then only calls [`serve`](super::serve).
pub const RENDER_COMMAND: &str = "render-chat-templates";

/// The limit of 1 GiB has room for 64 MiB of conversation, some copies of it, and the stack.
pub(super) const TASK: Task =
    Task { command: RENDER_COMMAND, what: "chat template", memory: 1 << 30, seconds: 20 };

/// Templates that a separate process renders.
pub(super) struct Worker(isolated::Worker);

impl Worker {
    pub(super) fn new(program: PathBuf, files: &ChatFiles) -> Self {
        // A map of texts can always be written as JSON.
        Self(isolated::Worker::new(program, TASK, json(files).unwrap_or_default()))
    }

    /// Returns the prompt of a conversation. Without a conversation, it checks that the default template compiles.
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
