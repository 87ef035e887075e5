//! Bodies of answers: the objects `chat.completion` and `text_completion` of OpenAI's APIs with
//! vLLM's additions.
//!
//! A body is written token by token, because as one value in memory it would be many times larger than its data.

use std::time::{SystemTime, UNIX_EPOCH};

use model_runtime::sampling::{TokenLogprob, TokenLogprobs};
use moe_engine::chat::Answer;
use moe_engine::engine::FinishReason;
use moe_engine::tokenizer::Tokenizer;
use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::{Map, Value, json};

use super::answer::Choice;
use super::api::Api;
use super::fields::ApiError;
use super::job::{Form, PromptForm};
use super::logprobs::LogprobList;
use crate::messages;
use crate::output::finish_reason;
use crate::routing;
use crate::setting_names::as_flags;
use crate::token_names::{CharCount, TokenNames};

/// The body of a line's answer; status 500 if one of its choices failed.
pub fn body<'a>(
    id: &'a str,
    form: &'a Form,
    choices: &'a [Choice],
    tokenizer: Option<&'a Tokenizer>,
) -> Result<Body<'a>, ApiError> {
    let failure = choices.iter().find_map(|choice| match &choice.finish {
        Some(FinishReason::Failed(message)) => Some(message),
        _ => None,
    });
    match failure {
        Some(message) => Err(ApiError { status: 500, param: None, message: as_flags(message).into_owned() }),
        None => {
            Ok(Body { id, form, choices, names: TokenNames::new(tokenizer), has_text: tokenizer.is_some() })
        }
    }
}

/// A body that is created while it is serialized.
pub struct Body<'a> {
    id: &'a str,
    form: &'a Form,
    choices: &'a [Choice],
    names: TokenNames<'a>,
    has_text: bool,
}

impl<'a> Serialize for Body<'a> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let form = self.form;
        let (object, prefix) = match form.api {
            Api::Chat => ("chat.completion", "chatcmpl"),
            Api::Completions => ("text_completion", "cmpl"),
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        let n = form.n.max(1);
        let one = |(index, choice): (usize, &'a Choice)| {
            let prompt = form.prompts.get(index / n)?;
            // The first choice has the log-probabilities of the prompt for all of them.
            let prompt_logprobs = self.choices[index / n * n].prompt_logprobs.as_ref();
            Some(ChoiceBody { body: self, index, prompt, prompt_logprobs, choice })
        };
        let choices = || self.choices.iter().enumerate().filter_map(one);
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("id", &format!("{prefix}-{}", self.id))?;
        map.serialize_entry("object", object)?;
        map.serialize_entry("created", &now)?;
        map.serialize_entry("model", &form.model)?;
        map.serialize_entry("choices", &List(choices))?;
        map.serialize_entry("usage", &self.usage())?;
        if form.api == Api::Chat {
            let logprobs = self.choices.first().and_then(|choice| choice.prompt_logprobs.as_ref());
            map.serialize_entry("prompt_logprobs", &self.prompt_logprobs(logprobs))?;
            if let Some(ids) = form.prompts.first().and_then(|prompt| prompt.token_ids.as_deref()) {
                map.serialize_entry("prompt_token_ids", ids)?;
            }
        }
        map.end()
    }
}

impl Body<'_> {
    /// The name of a token: its text, or vLLM's name for its id if ids were requested.
    fn name(&self, id: u32) -> String {
        if self.form.tokens_as_ids { TokenNames::of_id(id) } else { self.names.name(id) }
    }

    /// Token counts. The number of tokens from the prefix cache is left out, because it depends on the other requests.
    fn usage(&self) -> Value {
        let prompt: usize = self.form.prompts.iter().map(|prompt| prompt.len).sum();
        let generated: usize = self.choices.iter().map(|choice| choice.num_tokens).sum();
        let generated = if self.form.prompt_only { 0 } else { generated };
        json!({"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated})
    }

    /// vLLM's `prompt_logprobs`, if they were requested: null for the first token, then an object by token id for each
    /// token.
    fn prompt_logprobs<'s>(&'s self, logprobs: Option<&'s LogprobList>) -> Option<impl Serialize + 's> {
        let entry = |logprobs: TokenLogprobs| {
            let mut tokens = Map::new();
            for token in [&logprobs.chosen].into_iter().chain(&logprobs.top) {
                let text = self.has_text.then(|| self.names.name(token.token_id));
                let value =
                    json!({"logprob": finite(token.logprob), "rank": token.rank, "decoded_token": text});
                tokens.insert(token.token_id.to_string(), value);
            }
            Value::Object(tokens)
        };
        let entries = move || logprobs.into_iter().flat_map(LogprobList::iter).map(entry);
        self.form.prompt_logprobs.then_some(List(move || std::iter::once(Value::Null).chain(entries())))
    }

    fn chat_logprobs(&self, logprobs: &TokenLogprobs, top: usize) -> Value {
        let entry = |token: &TokenLogprob| {
            let id = token.token_id;
            let logprob = finite(token.logprob);
            json!({"token": self.name(id), "logprob": logprob, "bytes": self.names.bytes(id)})
        };
        let mut chosen = entry(&logprobs.chosen);
        chosen["top_logprobs"] = logprobs.top.iter().take(top).map(entry).collect();
        chosen
    }

    /// The top tokens by name, and the chosen one if it is not among them. If two tokens have the same name, the later
    /// one is named by its id.
    fn top_logprobs(&self, logprobs: &TokenLogprobs) -> Value {
        let chosen = &logprobs.chosen;
        let name = self.name(chosen.token_id);
        let mut tokens = Map::new();
        for token in &logprobs.top {
            let mut own = self.name(token.token_id);
            if token.token_id != chosen.token_id && (own == name || tokens.contains_key(&own)) {
                own = TokenNames::of_id(token.token_id);
            }
            tokens.insert(own, finite(token.logprob));
        }
        tokens.entry(name).or_insert_with(|| finite(chosen.logprob));
        tokens.into()
    }
}

/// A list that is created each time it is serialized.
struct List<F>(F);

impl<F: Fn() -> I, I: Iterator<Item: Serialize>> Serialize for List<F> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq((self.0)())
    }
}

/// One of the choices of a body.
struct ChoiceBody<'a> {
    body: &'a Body<'a>,
    index: usize,
    prompt: &'a PromptForm,
    prompt_logprobs: Option<&'a LogprobList>,
    choice: &'a Choice,
}

impl Serialize for ChoiceBody<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let form = self.body.form;
        let choice = self.choice;
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("index", &self.index)?;
        match form.api {
            Api::Chat => self.chat(&mut map)?,
            Api::Completions => self.completion(&mut map)?,
        }
        if form.token_ids {
            let new: &[u32] = if form.prompt_only { &[] } else { &choice.token_ids };
            map.serialize_entry("token_ids", new)?;
        }
        if form.routed_experts {
            let routed = choice.routed_experts.as_ref().map(routing::base64_npy);
            map.serialize_entry("routed_experts", &routed)?;
        }
        if let (Some(ids), Api::Completions) = (&self.prompt.token_ids, form.api) {
            map.serialize_entry("prompt_token_ids", ids)?;
        }
        map.end()
    }
}

impl ChoiceBody<'_> {
    fn chat<M: SerializeMap>(&self, map: &mut M) -> Result<(), M::Error> {
        let form = self.body.form;
        let choice = self.choice;
        let echo = self.prompt.echo.as_deref().unwrap_or_default();
        let mut answer = Answer::of(&choice.text, form.answer, self.prompt.begun, form.tools.schemas());
        answer.text.insert_str(0, echo);
        answer.calls.truncate(form.tools.most_calls());
        let (mut finish_reason, stop_reason) = finish_reason(choice.finish.as_ref());
        // The client must call something. If the text was cut, further calls may have been missing. As in OpenAI's API
        // the reason stays "stop" if the client has named the function.
        let stopped = matches!(choice.finish, Some(FinishReason::Stop(_)));
        if !answer.calls.is_empty() && stopped && !form.tools.is_named() {
            finish_reason = "tool_calls";
        }
        let name = |i: usize| format!("call_{}_{}_{i}", form.name, self.index);
        let mut message = messages::of_answer(&form.role, &answer, form.answer, name);
        if form.hide_reasoning && form.answer.reasoning.is_some() {
            message["reasoning"] = Value::Null;
        }
        map.serialize_entry("message", &message)?;
        match form.logprobs {
            Some(top) => map.serialize_entry("logprobs", &ChatLogprobs { choice: self, top })?,
            None => map.serialize_entry("logprobs", &Value::Null)?,
        }
        map.serialize_entry("finish_reason", finish_reason)?;
        map.serialize_entry("stop_reason", &stop_reason)
    }

    fn completion<M: SerializeMap>(&self, map: &mut M) -> Result<(), M::Error> {
        let form = self.body.form;
        let choice = self.choice;
        let generated = if form.prompt_only { "" } else { &choice.text };
        let text = format!("{}{generated}", self.prompt.echo.as_deref().unwrap_or_default());
        let (finish_reason, stop_reason) = finish_reason(choice.finish.as_ref());
        map.serialize_entry("text", &text)?;
        map.serialize_entry("logprobs", &form.logprobs.map(|_| TokenLists(self)))?;
        map.serialize_entry("finish_reason", finish_reason)?;
        map.serialize_entry("stop_reason", &stop_reason)?;
        map.serialize_entry("prompt_logprobs", &self.body.prompt_logprobs(self.prompt_logprobs))
    }

    /// The tokens of the echoed prompt and of the text. The first token of a prompt has no log-probabilities.
    fn tokens(&self) -> impl Iterator<Item = (u32, Option<TokenLogprobs>)> {
        let echoed = self.prompt.echo.is_some();
        let first = echoed.then_some((self.prompt.first_token, None));
        let prompt = self.prompt_logprobs.filter(|_| echoed).into_iter();
        let new = Some(&self.choice.logprobs).filter(|_| !self.body.form.prompt_only);
        let scored = prompt.chain(new).flat_map(LogprobList::iter);
        first.into_iter().chain(scored.map(|logprobs| (logprobs.chosen.token_id, Some(logprobs))))
    }
}

/// `logprobs` of `/v1/chat/completions`.
struct ChatLogprobs<'a> {
    choice: &'a ChoiceBody<'a>,
    top: usize,
}

impl Serialize for ChatLogprobs<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { choice: ChoiceBody { body, choice, .. }, top } = *self;
        let entries = || choice.logprobs.iter().map(|logprobs| body.chat_logprobs(&logprobs, top));
        let mut map = serializer.serialize_map(Some(1))?;
        map.serialize_entry("content", &List(entries))?;
        map.end()
    }
}

/// `logprobs` of `/v1/completions`: lists with one entry per token each.
struct TokenLists<'a>(&'a ChoiceBody<'a>);

impl Serialize for TokenLists<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let body = self.0.body;
        let offsets = || {
            let mut count = CharCount::default();
            self.0.tokens().map(move |(id, _)| count.add(&body.names.bytes(id)))
        };
        let own = || self.0.tokens().map(|(_, logprobs)| logprobs.map(|l| finite(l.chosen.logprob)));
        let names = || self.0.tokens().map(|(id, _)| body.name(id));
        let top = || self.0.tokens().map(|(_, logprobs)| logprobs.map(|l| body.top_logprobs(&l)));
        let mut map = serializer.serialize_map(Some(4))?;
        map.serialize_entry("text_offset", &List(offsets))?;
        map.serialize_entry("token_logprobs", &List(own))?;
        map.serialize_entry("tokens", &List(names))?;
        map.serialize_entry("top_logprobs", &List(top))?;
        map.end()
    }
}

/// JSON has no -inf; vLLM writes this number instead.
fn finite(logprob: f32) -> Value {
    logprob.max(-9999.0).into()
}
