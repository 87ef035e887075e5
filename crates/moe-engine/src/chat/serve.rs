//! The main loop of the process that renders chat templates for another process.

use crate::error::{Context, Result};

use super::error::ChatError;
use super::template::ChatTemplate;
use super::worker::{TASK, json};
use super::{ChatRequest, engine};
use crate::isolated::{self, Answer};

/// Reads the files of the templates, and then answers questions until stdin ends.
///
/// # Errors
/// A pipe breaks, or a question is not valid.
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
