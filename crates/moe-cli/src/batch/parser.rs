//! The data that is known before any line is read: the model, and the defaults of requests.

use moe_engine::chat::{AnswerForm, ChatTemplate};
use moe_engine::engine::Request;
use moe_engine::tokenizer::Tokenizer;
use serde_json::{Map, Value};

use super::fields::ApiError;
use super::served::Served;

/// Turns lines into jobs.
pub struct Parser {
    /// The model's tokenizer; without it only token ids are possible.
    pub tokenizer: Option<Tokenizer>,
    /// Its chat template, if it has one.
    pub template: Option<ChatTemplate>,
    /// Variables for the template; variables of a body replace them.
    pub template_kwargs: Map<String, Value>,
    /// What is looked for in answers of a chat.
    pub answer: AnswerForm,
    /// Flags over generation_config.json over vLLM's defaults.
    pub defaults: Request,
    /// The run's seed.
    pub seed: u64,
    /// The length of the longest sequence.
    pub max_model_len: usize,
    /// Bytes of the experts of a token.
    pub routing_bytes: usize,
    /// The model and its names.
    pub served: Served,
}

impl Parser {
    /// The tokenizer; the error names the field that needs it.
    pub fn tokenizer(&self, field: &str) -> Result<&Tokenizer, ApiError> {
        let without =
            "it needs a tokenizer, and this run has none (--skip-tokenizer-init): send token ids as prompt";
        self.tokenizer.as_ref().ok_or_else(|| ApiError::field(field, without))
    }
}
