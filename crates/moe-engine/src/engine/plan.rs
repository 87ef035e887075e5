//! A step as plain data, which the engine's files pass to each other: which rows of which sequences it has, and its
//! results.

use std::collections::HashMap;

use model_runtime::sampling::{Sampled, SamplingError, TokenLogprobs};
use model_runtime::{RoutedExperts, Step};
use moe_layer::ExpertHeat;

/// The id of a token that was sampled but is not yet known to the host.
pub(super) const IN_FLIGHT: u32 = u32::MAX;

/// Identifies a sequence by request and choice, in ascending order of arrival.
pub(super) type Key = (u64, usize);

/// The rows of one sequence in a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub key: Key,
    /// Position of its first row.
    pub start: usize,
    pub rows: usize,
    /// The output position of the token that its last row samples, if it samples one.
    pub samples: Option<usize>,
}

/// A step and the sequences that its rows belong to.
pub(super) struct Plan {
    pub step: Step,
    pub parts: Vec<Part>,
    /// Rows whose token is in flight, with the sequence that it was sampled for.
    pub in_flight: Vec<(usize, Key)>,
}

/// The results of a step.
#[derive(Default)]
pub(super) struct StepResult {
    pub parts: Vec<Part>,
    pub sampled: Tokens,
    pub prompt_logprobs: PromptLogprobs,
    pub routed: Option<RoutedExperts>,
    pub expert_counts: Option<ExpertHeat>,
}

/// The token of each part that samples.
pub(super) type Tokens = HashMap<Key, std::result::Result<Sampled, SamplingError>>;

/// Log-probabilities of prompt tokens, from a part's first row on.
pub(super) type PromptLogprobs = HashMap<Key, std::result::Result<Vec<TokenLogprobs>, SamplingError>>;
