//! The prompts of a body: `prompt` in its four forms, or `messages` through the chat template.

use moe_engine::chat::ChatRequest;
use moe_engine::tokenizer::Tokenizer;
use serde_json::{Map, Value};

use super::body::{Parser, PromptForm};
use super::fields::{ApiError, Fields, short, token_ids};
use crate::error;

/// Tokens to continue.
pub struct Prompt {
    /// At least one, or the engine refuses them.
    pub ids: Vec<u32>,
    /// Text in front of the answer, if it is wanted.
    pub echo: Option<String>,
}

impl Prompt {
    /// What an answer needs of it.
    pub fn form(&self) -> PromptForm {
        let first_token = self.ids.first().copied().unwrap_or_default();
        PromptForm { len: self.ids.len(), first_token, echo: self.echo.clone() }
    }
}

/// The prompts of `/v1/completions`: a text, a list of texts, token ids, or a list of those.
pub fn completions(tokenizer: &Tokenizer, body: &Fields, echo: bool) -> Result<Vec<Prompt>, ApiError> {
    const FORMS: &str = "expected a text, token ids, or a list of either that is not empty";
    let special = body.bool("add_special_tokens")?.unwrap_or(true);
    let from_text = |text: &str| {
        let ids = encode(tokenizer, text, special)?;
        Ok(Prompt { ids, echo: echo.then(|| text.to_string()) })
    };
    let from_ids = |ids: Vec<u32>| {
        let text = || tokenizer.decode(&ids).map_err(|e| ApiError::field("prompt", error::describe(&e)));
        let echo = echo.then(text).transpose()?;
        Ok(Prompt { ids, echo })
    };
    let value = body.value("prompt").ok_or_else(|| ApiError::field("prompt", FORMS))?;
    let wrong = || ApiError::field("prompt", format!("{FORMS}, got {}", short(value)));
    match value {
        Value::String(text) => Ok(vec![from_text(text)?]),
        Value::Array(list) if list.is_empty() => Err(wrong()),
        Value::Array(list) if list[0].is_number() => Ok(vec![from_ids(token_ids(value).ok_or_else(wrong)?)?]),
        Value::Array(list) => {
            let one = |prompt: &Value| match prompt {
                Value::String(text) => from_text(text),
                ids => from_ids(token_ids(ids).ok_or_else(wrong)?),
            };
            list.iter().map(one).collect()
        }
        _ => Err(wrong()),
    }
}

/// The prompt of `/v1/chat/completions`, and the role that answers.
pub fn chat(parser: &Parser, body: &Fields, echo: bool) -> Result<(Vec<Prompt>, String), ApiError> {
    const MISSING: &str = "the checkpoint has no chat template, which /v1/chat/completions needs: name one with \
         --chat-template, or send a rendered prompt to /v1/completions";
    let template = parser.template.as_ref().ok_or_else(|| ApiError::bad(MISSING))?;
    let missing = || ApiError::field("messages", "it is missing");
    let mut messages = body.objects("messages")?.ok_or_else(missing)?;
    messages.iter_mut().filter_map(Value::as_object_mut).try_for_each(plain_message)?;
    let continues = body.bool("continue_final_message")?.unwrap_or(false);
    let mut kwargs = parser.template_kwargs.clone();
    kwargs.extend(body.object("chat_template_kwargs")?.cloned().unwrap_or_default());
    let generates = body.bool("add_generation_prompt")?.unwrap_or(!continues);
    let last = messages.last().cloned().unwrap_or_default();
    let chat = ChatRequest {
        messages,
        tools: body.objects("tools")?,
        documents: body.objects("documents")?,
        add_generation_prompt: generates,
        continue_final_message: continues,
        chat_template_kwargs: kwargs,
    };
    let text = template.render(&chat).map_err(|e| ApiError::field("messages", e))?;
    let special = body.bool("add_special_tokens")?.unwrap_or(false);
    let ids = encode(&parser.tokenizer, &text, special)?;
    let role = if generates { "assistant" } else { last["role"].as_str().unwrap_or_default() };
    // As in vLLM: the message that the answer continues.
    let echo = echo && last["role"] == *role;
    let echo = echo.then(|| last["content"].as_str().unwrap_or_default().to_string());
    Ok((vec![Prompt { ids, echo }], role.to_string()))
}

/// A message as templates expect it: its content one text, the arguments of its tool calls objects.
fn plain_message(message: &mut Map<String, Value>) -> Result<(), ApiError> {
    let wrong = |what: String| ApiError::field("messages", what);
    if !message.get("role").is_some_and(Value::is_string) {
        return Err(wrong("each needs a role, which is a string".into()));
    }
    let content = match message.get("content") {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => parts.iter().map(part_text).collect::<Result<Vec<_>, _>>()?.join("\n"),
        Some(other) => {
            return Err(wrong(format!("content must be a string or a list of parts, got {}", short(other))));
        }
    };
    message.insert("content".into(), content.into());
    let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
    for call in calls.into_iter().flatten() {
        let Some(function) = call.get_mut("function").and_then(Value::as_object_mut) else { continue };
        let arguments = function.entry("arguments").or_insert(Value::Null);
        match arguments {
            Value::Null => *arguments = Value::Object(Map::new()),
            Value::String(text) => {
                *arguments = serde_json::from_str(text)
                    .map_err(|e| wrong(format!("the arguments of a tool call are not JSON: {e}")))?;
            }
            _ => {}
        }
    }
    Ok(())
}

/// The text of a part of a message.
fn part_text(part: &Value) -> Result<&str, ApiError> {
    let kind = part.get("type").and_then(Value::as_str);
    let text = part.as_str().or_else(|| part.get("text").and_then(Value::as_str));
    text.filter(|_| matches!(kind, None | Some("text" | "input_text" | "output_text" | "refusal")))
        .ok_or_else(|| {
            ApiError::field("messages", format!("the model takes text only, got the part {}", short(part)))
        })
}

/// Token sequences of words that must not appear: with and without a space in front, as in vLLM.
pub fn bad_words(tokenizer: &Tokenizer, words: &[String]) -> Result<Vec<Vec<u32>>, ApiError> {
    let mut sequences: Vec<Vec<u32>> = Vec::new();
    for word in words {
        let word = word.trim_start();
        let plain = encode(tokenizer, word, false)?;
        let spaced = encode(tokenizer, &format!(" {word}"), false)?;
        // Where the space is a token of its own, the plain form excludes the word already.
        let differs = spaced.len() == plain.len() && spaced.first() != plain.first();
        sequences.push(plain);
        sequences.extend(differs.then_some(spaced));
    }
    Ok(sequences)
}

fn encode(tokenizer: &Tokenizer, text: &str, special_tokens: bool) -> Result<Vec<u32>, ApiError> {
    let ids = if special_tokens { tokenizer.encode(text) } else { tokenizer.encode_rendered(text) };
    ids.map_err(|e| ApiError::field("prompt", error::describe(&e)))
}
