//! A line's requests, and the form of their answers: plain data.

use moe_engine::chat::{AnswerForm, Begun};
use moe_engine::engine::{Request, RequestError};
use moe_engine::structured::Precompiled;

use super::api::Api;
use super::fields::ApiError;
use super::fingerprint::Fingerprint;
use super::tools::Tools;

/// The requests of a line, one for each prompt.
pub struct Job {
    /// In the order of the prompts.
    pub requests: Vec<Request>,
    /// How to answer.
    pub form: Form,
    /// The grammar of its structured output, once it is compiled.
    pub grammar: Option<Precompiled>,
}

/// The contents of an answer other than the generated output.
#[derive(Debug)]
pub struct Form {
    /// Which object.
    pub api: Api,
    /// The `model` of the body, else this program's.
    pub model: String,
    /// Choices of each prompt.
    pub n: usize,
    /// The role of a message.
    pub role: String,
    /// The number of top tokens whose log-probabilities are requested.
    pub logprobs: Option<usize>,
    /// Whether log-probabilities of the prompt are requested under the name `prompt_logprobs`.
    pub prompt_logprobs: bool,
    /// The field that requests structured output.
    pub structured: Option<&'static str>,
    /// Whether only the prompt is wanted: `echo` with `max_tokens` 0.
    pub prompt_only: bool,
    /// Whether token ids of prompts and choices are wanted.
    pub token_ids: bool,
    /// Whether the experts of every token are wanted.
    pub routed_experts: bool,
    /// What is looked for in an answer.
    pub answer: AnswerForm,
    /// Which tools may be called.
    pub tools: Tools,
    /// Whether reasoning is detected and left out.
    pub hide_reasoning: bool,
    /// Whether log-probabilities name tokens by their ids.
    pub tokens_as_ids: bool,
    /// Part of the ids of its tool calls.
    pub name: Fingerprint,
    /// The prompts.
    pub prompts: Vec<PromptForm>,
}

impl Form {
    /// Tokens of the prompts.
    pub fn prompt_tokens(&self) -> u64 {
        self.prompts.iter().map(|prompt| prompt.len as u64).sum()
    }

    /// The error of a request that the engine refuses.
    pub fn refused(&self, error: RequestError) -> ApiError {
        match (error, self.structured) {
            (RequestError::StructuredOutput(e), Some(field)) => ApiError::field(field, e),
            (error, _) => error.into(),
        }
    }
}

/// The data of a prompt that its answer needs.
#[derive(Debug)]
pub struct PromptForm {
    /// Its tokens.
    pub len: usize,
    /// The first of them, which has no log-probability.
    pub first_token: u32,
    /// Text before the answer.
    pub echo: Option<String>,
    /// The part of the answer that the prompt has begun.
    pub begun: Begun,
    /// Its token ids, if they are wanted.
    pub token_ids: Option<Vec<u32>>,
}
