//! Why no token can be sampled.

/// Why no token can be sampled.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SamplingError {
    /// A parameter is out of its range.
    #[error("{name} must be {expected}, got {got}")]
    Parameter {
        /// The parameter.
        name: &'static str,
        /// Its range.
        expected: &'static str,
        /// The value.
        got: f32,
    },
    /// A list that must name tokens names none.
    #[error("{name} holds an empty list: name at least one token id, or leave it out")]
    NoTokens {
        /// The parameter.
        name: &'static str,
    },
    /// A token id is not in the vocabulary.
    #[error("{name}: token id {token_id} is outside of the vocabulary of {vocab_size}")]
    UnknownToken {
        /// The parameter.
        name: &'static str,
        /// The token id.
        token_id: u32,
        /// The size of the vocabulary.
        vocab_size: usize,
    },
    /// A logit is NaN or +inf.
    #[error(
        "the logit of token {token_id} is {value}: the weights hold values that are not finite, or activations \
         overflowed; check the weights or use a wider dtype"
    )]
    NotFinite {
        /// The first such token.
        token_id: u32,
        /// Its logit.
        value: f32,
    },
    /// The tokens that may come next are not known.
    #[error("structured_output: {0}")]
    Mask(String),
    /// Every logit is -inf, or there is none.
    #[error(
        "no token can be sampled: every logit is -inf; structured_output, allowed_token_ids, bad_words and the minimum \
         of tokens may exclude all of them together"
    )]
    Empty,
}

impl From<SamplingError> for candle_core::Error {
    fn from(e: SamplingError) -> Self {
        moe_kernels::into_candle(e)
    }
}
