//! Rendering in a process of its own, which a template may take down: a text doubled forty times, a list nested a million
//! deep.

use std::path::PathBuf;

use anyhow::{Context, Result};

use super::checkpoint::ChatFiles;
use super::error::ChatError;
use super::template::ChatTemplate;
use super::{ChatRequest, engine};
use crate::isolated::{self, Answer, Task};

/// The argument with which a program serves as a worker: it then does nothing but call [`serve`].
pub const RENDER_COMMAND: &str = "render-chat-templates";

/// 1 GiB is 64 MiB of conversation, some copies of it, and the stack.
const TASK: Task = Task { command: RENDER_COMMAND, what: "chat template", memory: 1 << 30, seconds: 20 };

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

/// The worker's side: reads the files, then answers questions until stdin ends.
///
/// # Errors
/// The pipes break, or what comes is no question.
pub fn serve() -> Result<()> {
    isolated::serve(TASK, |files| {
        let template = ChatTemplate::new(serde_json::from_slice(&files)?, engine::local_time)?;
        let template = template.context("there is no template")?;
        Ok(move |question| answer(&template, question))
    })
}

fn answer(template: &ChatTemplate, question: Vec<u8>) -> Answer {
    let chat: Result<Option<ChatRequest>, _> = serde_json::from_slice(&question);
    drop(question);
    let rendered = match chat {
        Ok(Some(chat)) => template.render(&chat),
        Ok(None) => template.check().map(|()| String::new()),
        Err(e) => Err(ChatError::Request(format!("the conversation: {e}"))),
    };
    rendered.map(String::into_bytes).map_err(|e| json(&e).unwrap_or_default())
}

fn limit(message: String) -> ChatError {
    ChatError::Limit { template: "default".to_string(), message }
}

fn json(value: &impl serde::Serialize) -> Result<Vec<u8>, ChatError> {
    serde_json::to_vec(value).map_err(|e| ChatError::Request(e.to_string()))
}
