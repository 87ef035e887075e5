//! The prompts of a body: `prompt` in its four forms, or `messages` through the chat template.

use moe_engine::chat::{Begun, ChatError, ChatRequest};
use moe_engine::tokenizer::Tokenizer;
use serde_json::Value;

use super::fields::{ApiError, Fields, short, token_ids};
use super::job::PromptForm;
use super::parser::Parser;
use crate::{error, messages};

/// Tokens to continue.
pub struct Prompt {
    /// Token ids. The engine refuses a prompt without any.
    pub ids: Vec<u32>,
    /// Text before the answer, if it is wanted.
    pub echo: Option<String>,
    /// The part of the answer that the prompt has begun.
    pub begun: Begun,
}

impl Prompt {
    /// The data that an answer needs; token ids are only included if they are requested.
    pub fn form(&self, token_ids: bool) -> PromptForm {
        let first_token = self.ids.first().copied().unwrap_or_default();
        let token_ids = token_ids.then(|| self.ids.clone());
        let len = self.ids.len();
        let echo = self.echo.clone();
        let begun = self.begun;
        PromptForm { len, first_token, echo, begun, token_ids }
    }
}

/// The prompts of `/v1/completions`: a text, a list of texts, a list of token ids, or a list of such lists.
pub fn completions(parser: &Parser, body: &Fields, echo: bool) -> Result<Vec<Prompt>, ApiError> {
    const FORMS: &str = "expected a text, token ids, or a list of either that is not empty";
    let special = body.bool("add_special_tokens")?.unwrap_or(true);
    let from_text = |text: &str| {
        let ids = encode_prompt(parser, "prompt", text, special)?;
        Ok(Prompt { ids, echo: echo.then(|| text.to_string()), begun: Begun::Nothing })
    };
    let from_ids = |ids: Vec<u32>| {
        let text = || match &parser.tokenizer {
            Some(tokenizer) => tokenizer.decode(&ids),
            None => Ok(String::new()),
        };
        let echo = echo.then(text).transpose();
        let echo = echo.map_err(|e| ApiError::field("prompt", error::describe(&e.into())))?;
        Ok(Prompt { ids, echo, begun: Begun::Nothing })
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
    parser.tokenizer("messages")?;
    let template = parser.template.as_ref().ok_or_else(|| ApiError::bad(MISSING))?;
    let missing = || ApiError::field("messages", "it is missing");
    let mut messages = body.objects("messages")?.ok_or_else(missing)?;
    let plain = messages.iter_mut().filter_map(Value::as_object_mut).try_for_each(messages::for_template);
    plain.map_err(|e| ApiError::field("messages", e))?;
    let continues = body.bool("continue_final_message")?.unwrap_or(false);
    let mut kwargs = parser.template_kwargs.clone();
    kwargs.extend(body.object("chat_template_kwargs")?.cloned().unwrap_or_default());
    // As in vLLM, the template decides what this means.
    if let Some(effort) = body.text("reasoning_effort")? {
        kwargs.insert("reasoning_effort".into(), effort.into());
    }
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
    let text = template.render(&chat).map_err(|e| refused(&e))?;
    let special = body.bool("add_special_tokens")?.unwrap_or(false);
    let ids = encode_prompt(parser, "messages", &text, special)?;
    let begun = match continues {
        true => Begun::of_continued(&text, last["content"].as_str().unwrap_or_default(), parser.answer),
        false => Begun::of(&text, parser.answer),
    };
    let role = if generates { "assistant" } else { last["role"].as_str().unwrap_or_default() };
    // As in vLLM: the message that the answer continues.
    let echo = echo && last["role"] == *role;
    let echo = echo.then(|| last["content"].as_str().unwrap_or_default().to_string());
    Ok((vec![Prompt { ids, echo, begun }], role.to_string()))
}

/// The error of a conversation that cannot be rendered. It names the field if the cause is not in the messages.
fn refused(error: &ChatError) -> ApiError {
    const FIELDS: [&str; 4] = ["chat_template_kwargs", "continue_final_message", "tools", "documents"];
    let ChatError::Request(message) = error else { return ApiError::field("messages", error) };
    match FIELDS.into_iter().find(|field| message.starts_with(field)) {
        Some(field) => ApiError { param: Some(field.to_string()), ..ApiError::bad(message.clone()) },
        None => ApiError::field("messages", error),
    }
}

/// Token ids of a prompt, unless it is certainly too long.
fn encode_prompt(
    parser: &Parser,
    name: &str,
    text: &str,
    special_tokens: bool,
) -> Result<Vec<u32>, ApiError> {
    let tokenizer = parser.tokenizer(name)?;
    tokenizer.check_length(text, parser.max_model_len).map_err(|e| ApiError::field(name, e))?;
    encode(tokenizer, text, special_tokens)
}

fn encode(tokenizer: &Tokenizer, text: &str, special_tokens: bool) -> Result<Vec<u32>, ApiError> {
    let ids = if special_tokens { tokenizer.encode(text) } else { tokenizer.encode_rendered(text) };
    ids.map_err(|e| ApiError::field("prompt", error::describe(&e.into())))
}
