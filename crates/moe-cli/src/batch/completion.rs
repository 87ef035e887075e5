//! Bodies of answers: the objects `chat.completion` and `text_completion` of OpenAI's APIs with
//! vLLM's additions.

use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Result;
use model_runtime::sampling::{TokenLogprob, TokenLogprobs};
use moe_engine::chat::Answer;
use moe_engine::engine::FinishReason;
use moe_engine::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};

use super::answer::Choice;
use super::body::{Api, Form, PromptForm};
use super::fields::ApiError;
use crate::error::describe;
use crate::messages;
use crate::output::finish_reason;
use crate::routing;

/// The body of a line's answer; status 500 if one of its choices failed.
pub fn body(
    id: &str,
    form: &Form,
    choices: &[Choice],
    tokenizer: Option<&Tokenizer>,
) -> Result<Value, ApiError> {
    let internal = |message: String| ApiError { status: 500, param: None, message };
    let failure = choices.iter().find_map(|choice| match &choice.finish {
        Some(FinishReason::Failed(message)) => Some(message),
        _ => None,
    });
    match failure {
        Some(message) => Err(internal(message.clone())),
        None => Writer { form, tokenizer }.body(id, choices).map_err(|e| internal(describe(&e))),
    }
}

struct Writer<'a> {
    form: &'a Form,
    tokenizer: Option<&'a Tokenizer>,
}

impl Writer<'_> {
    fn body(&self, id: &str, choices: &[Choice]) -> Result<Value> {
        let form = self.form;
        let (object, prefix) = match form.api {
            Api::Chat => ("chat.completion", "chatcmpl"),
            Api::Completions => ("text_completion", "cmpl"),
        };
        let mut list = Vec::with_capacity(choices.len());
        let mut prompt_logprobs = None;
        for (prompt, group) in form.prompts.iter().zip(choices.chunks(form.n.max(1))) {
            // The first choice has the log-probabilities of the prompt for all of them.
            let logprobs =
                group.first().and_then(|choice| choice.prompt_logprobs.as_deref()).unwrap_or_default();
            prompt_logprobs = form.prompt_logprobs.then(|| self.prompt_logprobs(logprobs)).transpose()?;
            for choice in group {
                let mut json = match form.api {
                    Api::Chat => self.chat_choice(list.len(), prompt, choice)?,
                    Api::Completions => {
                        let mut choice = self.completion_choice(list.len(), prompt, logprobs, choice)?;
                        choice["prompt_logprobs"] = prompt_logprobs.clone().into();
                        choice
                    }
                };
                if form.token_ids {
                    let new: &[u32] = if form.prompt_only { &[] } else { &choice.token_ids };
                    json["token_ids"] = new.into();
                }
                if form.routed_experts {
                    json["routed_experts"] = choice.routed_experts.as_ref().map(routing::base64_npy).into();
                }
                if let (Some(ids), Api::Completions) = (&prompt.token_ids, form.api) {
                    json["prompt_token_ids"] = ids.as_slice().into();
                }
                list.push(json);
            }
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        let mut body = json!({
            "id": format!("{prefix}-{id}"), "object": object, "created": now, "model": form.model,
            "choices": list, "usage": self.usage(choices),
        });
        if form.api == Api::Chat {
            body["prompt_logprobs"] = prompt_logprobs.into();
            if let Some(ids) = form.prompts.first().and_then(|prompt| prompt.token_ids.as_deref()) {
                body["prompt_token_ids"] = ids.into();
            }
        }
        Ok(body)
    }

    /// Token counts. How many came from the prefix cache is left out: it depends on what else ran.
    fn usage(&self, choices: &[Choice]) -> Value {
        let prompt: usize = self.form.prompts.iter().map(|prompt| prompt.len).sum();
        let generated: usize = choices.iter().map(|choice| choice.num_tokens).sum();
        let generated = if self.form.prompt_only { 0 } else { generated };
        json!({"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated})
    }

    fn chat_choice(&self, index: usize, prompt: &PromptForm, choice: &Choice) -> Result<Value> {
        let echo = prompt.echo.as_deref().unwrap_or_default();
        let mut answer = Answer::of(&choice.text, self.form.answer, prompt.opened);
        answer.text.insert_str(0, echo);
        let logprobs = match self.form.logprobs {
            Some(top) => {
                let entries = choice.logprobs.iter().map(|logprobs| self.chat_logprobs(logprobs, top));
                json!({"content": entries.collect::<Result<Vec<_>>>()?})
            }
            None => Value::Null,
        };
        let (mut finish_reason, stop_reason) = finish_reason(choice.finish.as_ref());
        // The client is to call something; a text that was cut may still have had more calls to come.
        if !answer.calls.is_empty() && matches!(choice.finish, Some(FinishReason::Stop(_))) {
            finish_reason = "tool_calls";
        }
        let name = |i: usize| format!("call_{}_{index}_{i}", self.form.name);
        Ok(json!({
            "index": index,
            "message": messages::of_answer(&self.form.role, &answer, self.form.answer, name),
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }))
    }

    fn chat_logprobs(&self, logprobs: &TokenLogprobs, top: usize) -> Result<Value> {
        let entry = |token: &TokenLogprob| -> Result<Value> {
            let text = self.token(token.token_id)?;
            Ok(json!({"token": text, "logprob": finite(token.logprob), "bytes": text.as_bytes()}))
        };
        let mut chosen = entry(&logprobs.chosen)?;
        chosen["top_logprobs"] = logprobs.top.iter().take(top).map(entry).collect::<Result<_>>()?;
        Ok(chosen)
    }

    fn completion_choice(
        &self,
        index: usize,
        prompt: &PromptForm,
        prompt_logprobs: &[TokenLogprobs],
        choice: &Choice,
    ) -> Result<Value> {
        let generated = if self.form.prompt_only { "" } else { &choice.text };
        let text = format!("{}{generated}", prompt.echo.as_deref().unwrap_or_default());
        let mut tokens = TokenList::default();
        if let (Some(_), Some(_)) = (self.form.logprobs, &prompt.echo) {
            tokens.push(self.token(prompt.first_token)?, Value::Null, Value::Null);
            prompt_logprobs.iter().try_for_each(|logprobs| self.list(&mut tokens, logprobs))?;
        }
        if !self.form.prompt_only {
            choice.logprobs.iter().try_for_each(|logprobs| self.list(&mut tokens, logprobs))?;
        }
        let (finish_reason, stop_reason) = finish_reason(choice.finish.as_ref());
        Ok(json!({
            "index": index,
            "text": text,
            "logprobs": self.form.logprobs.map(|_| tokens.into_json()),
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }))
    }

    /// Adds a token to the lists of `/v1/completions`: the likeliest, and itself if it is not among
    /// them.
    fn list(&self, tokens: &mut TokenList, logprobs: &TokenLogprobs) -> Result<()> {
        let mut top = Map::new();
        for token in logprobs.top.iter().chain([&logprobs.chosen]) {
            top.entry(self.token(token.token_id)?).or_insert_with(|| finite(token.logprob));
        }
        let chosen = &logprobs.chosen;
        tokens.push(self.token(chosen.token_id)?, finite(chosen.logprob), top.into());
        Ok(())
    }

    /// vLLM's `prompt_logprobs`: null for the first token, then an object by token id for each.
    fn prompt_logprobs(&self, logprobs: &[TokenLogprobs]) -> Result<Value> {
        let entry = |logprobs: &TokenLogprobs| -> Result<Value> {
            let mut tokens = Map::new();
            for token in [&logprobs.chosen].into_iter().chain(&logprobs.top) {
                let text = self.tokenizer.map(|_| self.token(token.token_id)).transpose()?;
                let value =
                    json!({"logprob": finite(token.logprob), "rank": token.rank, "decoded_token": text});
                tokens.insert(token.token_id.to_string(), value);
            }
            Ok(tokens.into())
        };
        let entries = logprobs.iter().map(entry).collect::<Result<Vec<_>>>()?;
        Ok(std::iter::once(Value::Null).chain(entries).collect())
    }

    /// The text of a token; without a tokenizer vLLM's name for its id.
    fn token(&self, id: u32) -> Result<String> {
        match self.tokenizer {
            Some(tokenizer) => tokenizer.decode_with(&[id], false),
            None => Ok(format!("token_id:{id}")),
        }
    }
}

/// The parallel lists of `/v1/completions`.
#[derive(Default)]
struct TokenList {
    offsets: Vec<usize>,
    tokens: Vec<String>,
    logprobs: Vec<Value>,
    top: Vec<Value>,
    /// Characters so far.
    offset: usize,
}

impl TokenList {
    fn push(&mut self, token: String, logprob: Value, top: Value) {
        self.offsets.push(self.offset);
        self.offset += token.chars().count();
        self.tokens.push(token);
        self.logprobs.push(logprob);
        self.top.push(top);
    }

    fn into_json(self) -> Value {
        json!({
            "text_offset": self.offsets,
            "token_logprobs": self.logprobs,
            "tokens": self.tokens,
            "top_logprobs": self.top,
        })
    }
}

/// JSON has no -inf; vLLM writes this for it.
fn finite(logprob: f32) -> Value {
    logprob.max(-9999.0).into()
}
