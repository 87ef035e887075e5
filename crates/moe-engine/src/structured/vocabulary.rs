//! Converts the vocabulary to the form of llguidance.

use std::sync::Arc;

use llguidance::toktrie::{ApproximateTokEnv, INVALID_TOKEN, TokEnv, TokRxInfo, TokTrie};

use crate::tokenizer::Tokenizer;

/// Converts tokens, in the form that [`token_bytes`] returns, to the form of llguidance. There is no end-of-sequence
/// token, because each request has its own ids that end a text.
pub(super) fn token_environment(words: &[Vec<u8>]) -> TokEnv {
    let info = TokRxInfo::new(words.len() as u32, INVALID_TOKEN);
    Arc::new(ApproximateTokEnv::new(TokTrie::from(&info, words)))
}

/// Returns the bytes of each token id. An id without a token has no bytes. At least one special token follows the ids,
/// because llguidance expects one. Special tokens are marked, so that no text matches them.
///
/// # Errors
/// The tokenizer's tokens are not bytes of the text, or an id is too large.
pub(super) fn token_bytes(tokenizer: &Tokenizer) -> Result<Vec<Vec<u8>>, String> {
    let bytes = tokenizer.token_bytes()?;
    let word = |(id, word): (u32, &[u8])| if bytes.is_special(id) { special(word) } else { word.to_vec() };
    let words = (0..).zip(bytes.iter()).map(word);
    Ok(words.chain([special(b"<|no token|>")]).collect())
}

fn special(content: &[u8]) -> Vec<u8> {
    [&[TokTrie::SPECIAL_TOKEN_MARKER], content].concat()
}
