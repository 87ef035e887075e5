//! The engine's inputs and outputs.

use std::sync::Arc;
use std::time::Duration;

use model_runtime::sampling::{SamplingError, TokenLogprobs};
use model_runtime::{RoutedExperts, SamplingParams};
use serde::{Deserialize, Serialize};

use crate::structured::{Reasoning, StructuredOutput, StructuredOutputError};

/// Identifies a request of one engine, in ascending order of addition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct RequestId(pub(super) u64);

/// A prompt to continue. Names and meanings are as in vLLM's `SamplingParams`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Request {
    /// Token ids of the prompt; at least one.
    pub prompt: Vec<u32>,
    /// How tokens are chosen. Choice c of several samples with seed + c.
    pub sampling: SamplingParams,
    /// Independent continuations.
    pub n: usize,
    /// The largest number of tokens to generate; `None` means until the context ends. 0 only computes
    /// `prompt_logprobs`, and then the prompt may fill the context.
    pub max_tokens: Option<usize>,
    /// Until this number of tokens is generated, only the length ends a choice: stop ids cannot be sampled, and stop
    /// strings are ignored.
    pub min_tokens: usize,
    /// Ids that end the text as the model's own end.
    pub eos_token_ids: Vec<u32>,
    /// Treats `eos_token_ids` as ordinary tokens.
    pub ignore_eos: bool,
    /// Further ids that end the text.
    pub stop_token_ids: Vec<u32>,
    /// Texts that end the text; needs a tokenizer.
    pub stop: Vec<String>,
    /// Texts that must not occur in the output, whatever tokens it consists of; this needs a tokenizer. The end of the
    /// prompt counts as the beginning of the text.
    pub bad_words: Vec<String>,
    /// Keeps the stop string, or the text of the stop token, at the end.
    pub include_stop_str_in_output: bool,
    /// The form that the text must have; this needs a tokenizer. The text ends where nothing may follow, even before
    /// `min_tokens` and with `ignore_eos`. The ids that end a text are only allowed where the text may end.
    pub structured_output: Option<Arc<StructuredOutput>>,
    /// Reasoning before the structured output. No token that ends a text may be sampled in it.
    pub reasoning: Option<Reasoning>,
    /// Leaves special tokens out of the text.
    pub skip_special_tokens: bool,
    /// Log-probabilities of the prompt's tokens, each with this number of top tokens.
    pub prompt_logprobs: Option<usize>,
    /// Ends the request after this time, with what it has.
    pub timeout: Option<Duration>,
    /// Records which experts were chosen for each token.
    pub capture_routing: bool,
    /// Routing to force, with one token per position, from the first position of the prompt on. Later positions route
    /// freely.
    pub replay_routing: Option<Arc<RoutedExperts>>,
}

impl Request {
    /// A request with vLLM's defaults, but greedy and without a limit of tokens.
    pub fn new(prompt: Vec<u32>) -> Self {
        Self {
            prompt,
            sampling: SamplingParams::default(),
            n: 1,
            max_tokens: None,
            min_tokens: 0,
            eos_token_ids: Vec::new(),
            ignore_eos: false,
            stop_token_ids: Vec::new(),
            stop: Vec::new(),
            bad_words: Vec::new(),
            include_stop_str_in_output: false,
            structured_output: None,
            reasoning: None,
            skip_special_tokens: true,
            prompt_logprobs: None,
            timeout: None,
            capture_routing: false,
            replay_routing: None,
        }
    }

    /// Whether nothing is generated, and only the prompt is scored.
    pub(super) fn scores_only(&self) -> bool {
        self.max_tokens == Some(0)
    }

    /// The ids that end the text now.
    pub(super) fn stop_ids(&self) -> impl Iterator<Item = u32> + '_ {
        let eos: &[u32] = if self.ignore_eos { &[] } else { &self.eos_token_ids };
        eos.iter().chain(&self.stop_token_ids).copied()
    }
}

/// Why a request was refused.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// The prompt has no token.
    #[error("the prompt is empty; give it at least one token")]
    EmptyPrompt,
    /// The prompt leaves no room for an answer.
    #[error(
        "the prompt of {len} tokens is longer than the context: at most {} fit the model length of {max_model_len} \
         with one new token",
        max_model_len.saturating_sub(1)
    )]
    PromptTooLong {
        /// Tokens of the prompt.
        len: usize,
        /// The longest sequence.
        max_model_len: usize,
    },
    /// A token id is not in the vocabulary.
    #[error("token id {token_id} at position {position} is outside of the vocabulary of {vocab_size}")]
    UnknownToken {
        /// Where it is in the prompt.
        position: usize,
        /// The id.
        token_id: u32,
        /// Number of token ids.
        vocab_size: usize,
    },
    /// The request cannot run even alone.
    #[error(
        "it can come to {tokens} tokens, which need {needed} KV blocks; the cache has {blocks} of {block_size} tokens: \
         lower max_tokens or enlarge `kv_cache_memory`"
    )]
    KvCacheTooSmall {
        /// Tokens of prompt and output.
        tokens: usize,
        /// Blocks that they need.
        needed: usize,
        /// Number of blocks in the cache.
        blocks: usize,
        /// Tokens per block.
        block_size: usize,
    },
    /// A sampling parameter is out of its range.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    /// The text cannot be restricted as requested.
    #[error("structured_output: {0}")]
    StructuredOutput(#[from] StructuredOutputError),
    /// Another parameter is out of its range.
    #[error("{name} must be {expected}, got {got}")]
    Parameter {
        /// The parameter.
        name: &'static str,
        /// Its range.
        expected: String,
        /// The value.
        got: String,
    },
    /// The rank that would run it, in another process, refuses it for this reason.
    #[error("{0}")]
    Refused(String),
}

crate::error::parts!(RequestError);

/// Why a choice ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum FinishReason {
    /// The model's own end, a stop id or a stop string.
    Stop(StopReason),
    /// `max_tokens`, or the end of the context.
    Length,
    /// [`super::Engine::cancel`] ended it.
    Cancelled,
    /// Its time was over.
    TimedOut,
    /// No token could be sampled; the message says why. Other requests go on.
    Failed(String),
}

/// What stopped a text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum StopReason {
    /// An end-of-sequence id, or structured output that is complete.
    EndOfSequence,
    /// One of `stop_token_ids`.
    Token(u32),
    /// One of `stop`.
    Text(String),
}

/// New output of one choice of a request.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Output {
    /// The request.
    pub request: RequestId,
    /// Which of its `n` continuations.
    pub choice: usize,
    /// The new token; `None` if the choice ends without one.
    pub token_id: Option<u32>,
    /// Text that has become final; often empty, always empty without a tokenizer.
    pub text: String,
    /// The new token's log-probabilities, if they were asked for.
    pub logprobs: Option<TokenLogprobs>,
    /// Log-probabilities of prompt tokens 1.., once, with the first token of choice 0.
    pub prompt_logprobs: Option<Vec<TokenLogprobs>>,
    /// Set on the choice's last output.
    pub finish: Option<FinishReason>,
    /// With the last output: the experts of each token but the last, [T, L_moe, K], if asked for.
    pub routed_experts: Option<RoutedExperts>,
    /// Prompt tokens that were found in the prefix cache when the choice first ran.
    pub num_cached_tokens: usize,
}
