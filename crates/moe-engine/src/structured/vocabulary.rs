//! The vocabulary as llguidance takes it.

use std::sync::Arc;

use llguidance::toktrie::{ApproximateTokEnv, INVALID_TOKEN, TokEnv, TokRxInfo, TokTrie};

use crate::tokenizer::Tokenizer;

/// The tokens as llguidance takes them. Special tokens are marked, so that no text matches them. There is no
/// end-of-sequence token: which ids end a text is a matter of each request.
///
/// # Errors
/// The tokenizer's tokens are not bytes of the text, or an id is too large.
pub(super) fn token_environment(tokenizer: &Tokenizer) -> Result<TokEnv, String> {
    let words = token_bytes(tokenizer)?;
    let info = TokRxInfo::new(words.len() as u32, INVALID_TOKEN);
    let trie = TokTrie::from(&info, &words);
    Ok(Arc::new(ApproximateTokEnv::new(trie)))
}

/// The bytes of each token id; none for an id without a token. At least one special token follows the ids: llguidance
/// expects that there is one.
pub(super) fn token_bytes(tokenizer: &Tokenizer) -> Result<Vec<Vec<u8>>, String> {
    let bytes = tokenizer.token_bytes()?;
    let word = |(id, word): (u32, &[u8])| if bytes.is_special(id) { special(word) } else { word.to_vec() };
    let words = (0..).zip(bytes.iter()).map(word);
    Ok(words.chain([special(b"<|no token|>")]).collect())
}

fn special(content: &[u8]) -> Vec<u8> {
    [&[TokTrie::SPECIAL_TOKEN_MARKER], content].concat()
}
