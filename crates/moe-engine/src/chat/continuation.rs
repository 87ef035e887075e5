//! Continues the last message. Like transformers, it marks the end of the message's text, renders the conversation, and
//! cuts the prompt at the mark.

use serde_json::Value;

use super::error::ChatError;

/// The mark of transformers. Its last character, a space, shows whether the template trims the text.
const MARK: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

fn refuse<T>(reason: impl std::fmt::Display) -> Result<T, ChatError> {
    Err(ChatError::Request(format!("continue_final_message: {reason}")))
}

/// Marks the end of the last message's text. Returns the text without the mark.
pub fn mark(messages: &mut [Value]) -> Result<String, ChatError> {
    let content = match messages.last_mut().and_then(|message| message.get_mut("content")) {
        Some(Value::Array(blocks)) => blocks.iter_mut().rev().find_map(|block| block.get_mut("text")),
        content => content,
    };
    let Some(Value::String(text)) = content else {
        return refuse("the last message has no text to continue");
    };
    let before = text.clone();
    text.push_str(MARK);
    Ok(before)
}

/// Cuts a prompt at the mark that [`mark`] left after `text`.
pub fn cut(prompt: &str, text: &str) -> Result<String, ChatError> {
    match prompt.rfind(MARK.trim_end()) {
        Some(at) if prompt.contains(text.trim()) => {
            let (head, tail) = prompt.split_at(at);
            // If the space is missing, the template trims the text, so the spaces at the end of the message are
            // trimmed, too.
            Ok(if tail.starts_with(MARK) { head } else { head.trim_end() }.to_string())
        }
        _ => refuse(format!(
            "the last message is not in the prompt, because the chat template drops or changes it: {text:?}"
        )),
    }
}
