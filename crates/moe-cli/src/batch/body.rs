//! Converts a line's request into the engine's requests and the form of its answer.
//!
//! The value of a parameter comes from the body, else from a flag of the command, else from generation_config.json,
//! else from vLLM's defaults.

use std::sync::Arc;

use model_runtime::sampling::request_seed;
use moe_engine::chat::AnswerForm;
use moe_engine::engine::Request;
use moe_engine::structured::Reasoning;
use serde_json::{Map, Value};

use super::api::Api;
use super::fields::{ApiError, Fields, short};
use super::fingerprint::Fingerprint;
use super::held;
use super::job::{Form, Job};
use super::parser::Parser;
use super::prompts::{self, Prompt};
use super::structured;
use super::tools::Tools;
use super::unsupported;
use crate::options;

/// The largest number of log-probabilities of one token; it is vLLM's limit.
const MAX_LOGPROBS: usize = 20;
/// The largest number of choices of one line, so that one line uses only a small part of the memory.
const MAX_CHOICES: usize = 4096;
/// The number of tokens that `/v1/completions` generates by default.
const COMPLETION_TOKENS: usize = 16;

impl Parser {
    /// The job of a line.
    pub fn parse(&self, line: &Map<String, Value>, custom_id: &str) -> Result<Job, ApiError> {
        let line = Fields(line);
        if let Some(method) = line.text("method")?.filter(|method| *method != "POST") {
            return Err(ApiError::field("method", format!("expected \"POST\", got {method:?}")));
        }
        let api = match line.text("url")? {
            Some("/v1/chat/completions") => Api::Chat,
            Some("/v1/completions") => Api::Completions,
            other => {
                let got = other.map_or("none".into(), |url| format!("{url:?}"));
                let expected = "expected \"/v1/chat/completions\" or \"/v1/completions\"";
                return Err(ApiError::field("url", format!("{expected}, got {got}")));
            }
        };
        let body = line.object("body")?.ok_or_else(|| ApiError::field("body", "it is missing"))?;
        self.job(api, Fields(body), custom_id)
    }

    /// Whether all answers to a line with this request are the same: no token is sampled, or the body has a seed.
    pub fn repeats(&self, line: &Map<String, Value>) -> bool {
        let Ok(Some(body)) = Fields(line).object("body") else { return false };
        let body = Fields(body);
        let mut sampling = self.defaults.sampling.clone();
        match (body.seed("seed"), body.float("temperature")) {
            (Ok(seed), Ok(temperature)) => {
                sampling.temperature = temperature.unwrap_or(sampling.temperature);
                seed.is_some() || sampling.is_greedy()
            }
            _ => false,
        }
    }

    fn job(&self, api: Api, body: Fields, custom_id: &str) -> Result<Job, ApiError> {
        let model = self.served.check(&body)?;
        unsupported::check(&body)?;
        let mut request = self.request(&body)?;
        let tools = Tools::of(api, &body)?;
        let structured = structured::asked(&body)?;
        let answer = self.answer_form(api, &tools);
        let structured = tools.with_calls(structured, answer.required_calls())?;
        if let Some(asked) = &structured {
            if asked.output.is_some() {
                self.tokenizer(asked.field)?;
            }
            request.structured_output = asked.output.clone().map(Arc::new);
        }
        let own_seed = body.seed("seed")?;
        let derived = request_seed(self.seed, custom_id);
        let echo = body.bool("echo")?.unwrap_or(false);
        let limit = Limit::of(&body)?;
        let prompt_only = echo && api == Api::Completions && limit.tokens == Some(0);
        if limit.tokens == Some(0) && !prompt_only {
            return Err(ApiError::field(limit.field, "expected at least 1, got 0"));
        }
        let default_limit = match api {
            Api::Chat => request.max_tokens,
            Api::Completions => request.max_tokens.or(Some(COMPLETION_TOKENS)),
        };
        let logprobs = logprobs(api, &body)?;
        request.sampling.logprobs = logprobs.filter(|_| !prompt_only);
        request.prompt_logprobs = body.size("prompt_logprobs")?.or(logprobs.filter(|_| echo));
        at_most_max("prompt_logprobs", request.prompt_logprobs)?;
        let hidden = self.tokenizer.as_ref().is_some_and(|tokenizer| tokenizer.hides(&answer.tags()));
        request.skip_special_tokens &= !hidden;
        request.max_tokens = match (prompt_only, request.prompt_logprobs) {
            (false, _) => limit.tokens.or(default_limit),
            (true, Some(_)) => Some(0),
            // After a prompt that is only echoed one token is generated, which is dropped.
            (true, None) => Some(1),
        };
        request.min_tokens = if prompt_only { 0 } else { request.min_tokens };

        let (prompts, role) = match api {
            Api::Chat => prompts::chat(self, &body, echo)?,
            Api::Completions => (prompts::completions(self, &body, echo)?, String::new()),
        };
        if prompts.len().saturating_mul(request.n) > MAX_CHOICES {
            let got = format!("{} prompts with n = {}", prompts.len(), request.n);
            return Err(ApiError::field("n", format!("at most {MAX_CHOICES} choices in a line, got {got}")));
        }
        prompts.iter().try_for_each(|prompt| self.check_length(prompt, limit))?;
        let token_ids = self.tokenizer.is_none() || body.bool("return_token_ids")?.unwrap_or(false);
        let form = Form {
            api,
            token_ids,
            routed_experts: request.capture_routing,
            answer,
            tools,
            hide_reasoning: !body.bool("include_reasoning")?.unwrap_or(true),
            tokens_as_ids: body.bool("return_tokens_as_token_ids")?.unwrap_or(false),
            name: Fingerprint::of(&custom_id),
            model,
            n: request.n,
            role,
            logprobs,
            prompt_logprobs: body.value("prompt_logprobs").is_some(),
            structured: structured.map(|asked| asked.field),
            prompt_only,
            prompts: prompts.iter().map(|prompt| prompt.form(token_ids)).collect(),
        };
        let requests = prompts.into_iter().enumerate().map(|(i, prompt)| {
            let room = self.max_model_len.saturating_sub(prompt.ids.len()).max(1);
            let max_tokens = request.max_tokens.map(|max| max.min(room));
            let reasoning = Reasoning::before(answer, prompt.begun);
            let mut request = Request { prompt: prompt.ids, max_tokens, reasoning, ..request.clone() };
            // The choices of a line differ, even if its prompts are equal.
            request.sampling.seed = own_seed.unwrap_or(derived.wrapping_add((i * form.n) as u64));
            request
        });
        let requests: Vec<Request> = requests.collect();
        held::check(&requests, self.max_model_len, self.routing_bytes)?;
        Ok(Job { requests, form, grammar: None })
    }

    /// What is looked for in the answer to a body. As in vLLM, tool calls are only looked for if there are tools, and
    /// always if they are required.
    fn answer_form(&self, api: Api, tools: &Tools) -> AnswerForm {
        match api {
            Api::Chat => AnswerForm { calls: tools.called(self.answer), ..self.answer },
            Api::Completions => AnswerForm::default(),
        }
    }

    /// The parameters of a body over the defaults, without a prompt.
    fn request(&self, body: &Fields) -> Result<Request, ApiError> {
        let mut request = self.defaults.clone();
        let s = &mut request.sampling;
        for (name, value) in [
            ("temperature", &mut s.temperature),
            ("top_p", &mut s.top_p),
            ("min_p", &mut s.min_p),
            ("repetition_penalty", &mut s.repetition_penalty),
            ("presence_penalty", &mut s.presence_penalty),
            ("frequency_penalty", &mut s.frequency_penalty),
        ] {
            *value = body.float(name)?.unwrap_or(*value);
        }
        if let Some(k) = body.integer("top_k")? {
            s.top_k = options::top_k(k).map_err(|e| ApiError::field("top_k", format!("{e}, got {k}")))?;
        }
        if let Some(bias) = body.object("logit_bias")? {
            s.logit_bias = bias.iter().map(logit_bias).collect::<Result<_, _>>()?;
        }
        s.allowed_token_ids = body.token_ids("allowed_token_ids")?.or(s.allowed_token_ids.take());
        if let Some(words) = body.texts("bad_words")? {
            self.tokenizer("bad_words")?;
            request.bad_words = bad_words(&words)?;
        }
        for (name, value) in [
            ("ignore_eos", &mut request.ignore_eos),
            ("include_stop_str_in_output", &mut request.include_stop_str_in_output),
            ("skip_special_tokens", &mut request.skip_special_tokens),
        ] {
            *value = body.bool(name)?.unwrap_or(*value);
        }
        request.n = body.size("n")?.unwrap_or(request.n);
        request.capture_routing = body.bool("return_routed_experts")?.unwrap_or(request.capture_routing);
        request.min_tokens = body.size("min_tokens")?.unwrap_or(request.min_tokens);
        request.stop = body.texts("stop")?.unwrap_or(request.stop);
        if !request.stop.is_empty() {
            self.tokenizer("stop")?;
        }
        request.stop_token_ids = body.token_ids("stop_token_ids")?.unwrap_or(request.stop_token_ids);
        Ok(request)
    }

    /// As in vLLM, a limit in the body must fit after the prompt; a default limit is cut.
    fn check_length(&self, prompt: &Prompt, limit: Limit) -> Result<(), ApiError> {
        let len = prompt.ids.len();
        let max = self.max_model_len;
        match limit.tokens {
            Some(tokens) if len < max && len.saturating_add(tokens) > max => {
                let message =
                    format!("{tokens} is too large: the context is {max} tokens, the prompt has {len}");
                Err(ApiError::field(limit.field, message))
            }
            _ => Ok(()),
        }
    }
}

/// The largest number of tokens that a body requests, and the name of the field.
#[derive(Clone, Copy)]
struct Limit {
    field: &'static str,
    tokens: Option<usize>,
}

impl Limit {
    fn of(body: &Fields) -> Result<Self, ApiError> {
        let [newer, older] = ["max_completion_tokens", "max_tokens"];
        Ok(match body.size(newer)? {
            Some(tokens) => Self { field: newer, tokens: Some(tokens) },
            None => Self { field: older, tokens: body.size(older)? },
        })
    }
}

/// The number of log-probabilities that a body requests in the form of its API.
fn logprobs(api: Api, body: &Fields) -> Result<Option<usize>, ApiError> {
    let count = match api {
        Api::Completions => body.size("logprobs")?,
        Api::Chat => {
            let on = body.bool("logprobs")?.unwrap_or(false);
            let top = body.size("top_logprobs")?;
            if !on && top.is_some_and(|top| top > 0) {
                return Err(ApiError::field("top_logprobs", "it needs logprobs to be true"));
            }
            on.then(|| top.unwrap_or(0))
        }
    };
    let field = match api {
        Api::Completions => "logprobs",
        Api::Chat => "top_logprobs",
    };
    at_most_max(field, count)?;
    Ok(count)
}

fn at_most_max(name: &str, count: Option<usize>) -> Result<(), ApiError> {
    match count {
        Some(count) if count > MAX_LOGPROBS => {
            Err(ApiError::field(name, format!("expected at most {MAX_LOGPROBS}, got {count}")))
        }
        _ => Ok(()),
    }
}

/// Words that must not occur in the text. Spaces around them are removed, because most words have one before them in a
/// text.
fn bad_words(words: &[String]) -> Result<Vec<String>, ApiError> {
    let words: Vec<String> = words.iter().map(|word| word.trim().to_string()).collect();
    match words.iter().any(String::is_empty) {
        true => Err(ApiError::field("bad_words", "expected words that are not empty, got an empty one")),
        false => Ok(words),
    }
}

/// A token's bias, which vLLM keeps within [-100, 100].
fn logit_bias((id, bias): (&String, &Value)) -> Result<(u32, f32), ApiError> {
    let wrong =
        |expected: &str, got: &str| ApiError::field("logit_bias", format!("expected {expected}, got {got}"));
    let token: u32 = id.parse().map_err(|_| wrong("token ids as keys", &format!("{id:?}")))?;
    let bias = bias.as_f64().ok_or_else(|| wrong(&format!("a number for token {token}"), &short(bias)))?;
    Ok((token, bias.clamp(-100.0, 100.0) as f32))
}
