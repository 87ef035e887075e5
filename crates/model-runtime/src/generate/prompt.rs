//! Which prompts can be run.

/// Why a prompt cannot be run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PromptError {
    /// There is no token.
    #[error("the prompt is empty; give it at least one token")]
    Empty,
    /// It leaves no room for an answer.
    #[error(
        "the prompt of {len} tokens is longer than the context: at most {} fit the model length of {max_model_len} \
         beside one new token",
        max_model_len.saturating_sub(1)
    )]
    TooLong {
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
}

impl From<PromptError> for candle_core::Error {
    fn from(e: PromptError) -> Self {
        Self::msg(e)
    }
}

/// Checks that a prompt is not empty, leaves room in `max_model_len` for a new token, and has only
/// ids of the vocabulary.
pub fn check_prompt(prompt: &[u32], vocab_size: usize, max_model_len: usize) -> Result<(), PromptError> {
    if prompt.is_empty() {
        return Err(PromptError::Empty);
    }
    if prompt.len() >= max_model_len {
        return Err(PromptError::TooLong { len: prompt.len(), max_model_len });
    }
    match prompt.iter().position(|&id| id as usize >= vocab_size) {
        None => Ok(()),
        Some(position) => Err(PromptError::UnknownToken { position, token_id: prompt[position], vocab_size }),
    }
}
