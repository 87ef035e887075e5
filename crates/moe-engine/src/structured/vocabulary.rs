//! The bytes of each token, which grammars are matched against.
//!
//! A vocabulary writes tokens as text: in GPT-2's alphabet of one character for each byte, or as pieces where one
//! character stands for a space and `<0x0A>` for a byte. The decoder of the tokenizer tells which.

use std::sync::Arc;

use llguidance::toktrie::{ApproximateTokEnv, INVALID_TOKEN, TokEnv, TokRxInfo, TokTrie};
use serde_json::Value;

use crate::tokenizer::Tokenizer;

/// The first id that a trie of tokens has no room for.
const MAX_IDS: usize = 0xff_ffff;

/// How a vocabulary writes bytes.
enum Alphabet {
    /// One character for each byte.
    Bytes,
    /// Text where this stands for a space, and single bytes as `<0x0A>`.
    Pieces(String),
}

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
    let decoder = tokenizer.0.get_decoder().map(serde_json::to_value).transpose();
    let decoder = decoder.map_err(|e| format!("the tokenizer's decoder cannot be read: {e}"))?;
    let alphabet = alphabet(&decoder.unwrap_or_default()).ok_or(
        "it needs a tokenizer whose tokens are bytes of the text (byte-level, or with byte fallback), and this one's \
         decoder is of another kind",
    )?;
    let vocab = tokenizer.0.get_vocab(true);
    let len = vocab.values().map(|&id| id as usize + 1).max().unwrap_or(0);
    if len >= MAX_IDS {
        return Err(format!("the tokenizer has the token id {}, and ids below {MAX_IDS} are taken", len - 1));
    }
    let mut words = vec![Vec::new(); len];
    for (token, id) in vocab {
        words[id as usize] = alphabet.bytes(&token);
    }
    for (id, token) in tokenizer.0.get_added_tokens_decoder() {
        if let Some(word) = words.get_mut(id as usize) {
            *word = if token.special { special(&token.content) } else { token.content.into_bytes() };
        }
    }
    words.push(special("<|no token|>"));
    Ok(words)
}

fn special(content: &str) -> Vec<u8> {
    [&[TokTrie::SPECIAL_TOKEN_MARKER], content.as_bytes()].concat()
}

/// The alphabet that a decoder reads.
fn alphabet(decoder: &Value) -> Option<Alphabet> {
    let steps: Vec<&Value> = match decoder["decoders"].as_array() {
        Some(steps) => steps.iter().collect(),
        None => vec![decoder],
    };
    let is = |step: &Value, name: &str| step["type"] == name;
    if steps.iter().any(|step| is(step, "ByteLevel")) {
        return Some(Alphabet::Bytes);
    }
    let space = steps.iter().find_map(|step| match step["type"].as_str()? {
        "Metaspace" => step["replacement"].as_str(),
        "Replace" if step["content"] == " " => step["pattern"]["String"].as_str(),
        _ => None,
    });
    let bytes = steps.iter().any(|step| is(step, "ByteFallback") || is(step, "Metaspace"));
    bytes.then(|| Alphabet::Pieces(space.unwrap_or(" ").to_string()))
}

impl Alphabet {
    /// The bytes of a token; none where its text is not of this alphabet.
    fn bytes(&self, token: &str) -> Vec<u8> {
        match self {
            Self::Bytes => token.chars().map(byte_of).collect::<Option<_>>().unwrap_or_default(),
            Self::Pieces(space) => {
                let hex = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
                let byte = hex.filter(|hex| hex.len() == 2).and_then(|hex| u8::from_str_radix(hex, 16).ok());
                byte.map_or_else(|| token.replace(space.as_str(), " ").into_bytes(), |byte| vec![byte])
            }
        }
    }
}

/// The byte that a character of GPT-2's alphabet stands for. Bytes that are visible characters of Latin-1 stand for
/// themselves; the others follow, in order, from U+0100 on.
fn byte_of(c: char) -> Option<u8> {
    let itself = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    match u8::try_from(c) {
        Ok(byte) => Some(byte).filter(itself),
        Err(_) => (0..=255).filter(|byte| !itself(byte)).nth((c as usize).checked_sub(0x100)?),
    }
}
