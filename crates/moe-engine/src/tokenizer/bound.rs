//! How many bytes of text so many tokens can stand for at most: a text with more is too long for a context, and nobody
//! has to tokenize megabytes to know it.
//!
//! That holds only where no part of the text can disappear on its way to the tokens. A tokenizer that may drop text or
//! map any amount of it to one token (an unknown token, a normalizer that strips) has no bound here, and its prompts are
//! tokenized whatever their length.

use serde_json::Value;
use tokenizers::ModelWrapper;
use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

/// The most bytes that Unicode's composition makes one byte of: U+1FBE U+0308 U+0301 (7 bytes) becomes U+0390 (2).
const COMPOSED: usize = 4;

/// A text that is certainly longer than a context.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the prompt of {bytes} bytes is too long: the context of {context} tokens takes at most {bound} bytes, because no \
     token stands for more than {longest}"
)]
pub struct TooLong {
    /// Bytes of the text.
    pub bytes: usize,
    /// Tokens that there is room for.
    pub context: usize,
    /// Bytes of the text that one token stands for, at most.
    pub longest: usize,
    /// Bytes that the context takes, at most.
    pub bound: usize,
}

/// Bytes that one token stands for, at most: in a text of ASCII alone, and in any other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Longest {
    ascii: usize,
    other: usize,
}

impl Longest {
    /// The bounds of a tokenizer; `None` if some text may become nothing, or any amount of it one token.
    pub fn of(tokenizer: &tokenizers::Tokenizer) -> Option<Self> {
        let added = tokenizer.get_added_vocabulary().get_added_tokens_decoder();
        if added.values().any(|token| token.lstrip || token.rstrip) {
            return None;
        }
        let mut normalizers = Vec::new();
        let mut splits = Vec::new();
        if let Some(normalizer) = tokenizer.get_normalizer() {
            leaves(&serde_json::to_value(normalizer).ok()?, "normalizers", &mut normalizers);
        }
        if let Some(split) = tokenizer.get_pre_tokenizer() {
            leaves(&serde_json::to_value(split).ok()?, "pretokenizers", &mut splits);
        }
        if !normalizers.iter().all(keeps) || !splits.iter().all(keeps) {
            return None;
        }
        let is = |kind: &str, list: &[Value]| list.iter().any(|step| step["type"] == kind);
        let in_bytes = is("ByteLevel", &normalizers) || is("ByteLevel", &splits);
        let ModelWrapper::BPE(bpe) = tokenizer.get_model() else { return None };
        let of_vocab = longest_token(bpe, in_bytes)?;
        let ascii = added.values().map(|token| token.content.len()).chain([of_vocab]).max()?;
        Some(Self { ascii, other: if is("NFC", &normalizers) { ascii * COMPOSED } else { ascii } })
    }

    /// Refuses a text that so many tokens cannot stand for.
    pub fn check(self, text: &str, context: usize) -> Result<(), TooLong> {
        let longest = if text.is_ascii() { self.ascii } else { self.other };
        let bytes = text.len();
        let bound = context.saturating_mul(longest);
        match bytes > bound {
            true => Err(TooLong { bytes, context, longest, bound }),
            false => Ok(()),
        }
    }
}

/// The steps of a normalizer or a pre-tokenizer, which may be a sequence of further ones.
fn leaves(step: &Value, list: &str, found: &mut Vec<Value>) {
    match step.get(list).and_then(Value::as_array) {
        Some(steps) => steps.iter().for_each(|step| leaves(step, list, found)),
        None => found.push(step.clone()),
    }
}

/// Whether a step keeps all text: it may cut it, compose it or make it longer.
fn keeps(step: &Value) -> bool {
    match step["type"].as_str().unwrap_or_default() {
        "ByteLevel" | "NFC" | "Prepend" | "Metaspace" | "Digits" => true,
        "Split" | "Punctuation" => step["behavior"].as_str().is_some_and(|behavior| behavior != "Removed"),
        "Replace" => {
            let from = step["pattern"]["String"].as_str();
            let to = step["content"].as_str();
            from.zip(to).is_some_and(|(from, to)| to.len() >= from.len())
        }
        _ => false,
    }
}

/// Bytes of the longest token of a vocabulary that has a token for every byte.
fn longest_token(bpe: &BPE, in_bytes: bool) -> Option<usize> {
    let vocab = bpe.get_vocab();
    let whole = match in_bytes {
        true => ByteLevel::alphabet().iter().all(|letter| vocab.contains_key(&letter.to_string())),
        false => bpe.byte_fallback && (0..=255u8).all(|byte| vocab.contains_key(&format!("<0x{byte:02X}>"))),
    };
    let plain = bpe.continuing_subword_prefix.is_none() && bpe.end_of_word_suffix.is_none();
    // A letter of the byte alphabet stands for one byte; elsewhere a token is written in at least its bytes.
    let bytes = |token: &String| if in_bytes { token.chars().count() } else { token.len() };
    vocab.keys().map(bytes).max().filter(|_| whole && plain)
}

#[cfg(test)]
mod tests {
    use super::super::Tokenizer;
    use super::*;
    use serde_json::json;

    fn with(change: impl FnOnce(&mut Value)) -> Tokenizer {
        let plain = Tokenizer::bytes().unwrap().library.to_string(false).unwrap();
        let mut json: Value = serde_json::from_str(&plain).unwrap();
        change(&mut json);
        Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap()
    }

    fn longest(change: impl FnOnce(&mut Value)) -> Option<Longest> {
        Longest::of(&with(change).library)
    }

    fn token(content: &str, lstrip: bool) -> Value {
        json!([{"id": 256, "content": content, "single_word": false, "lstrip": lstrip, "rstrip": false,
            "normalized": false, "special": true}])
    }

    #[test]
    fn the_bound_is_the_longest_token_where_nothing_can_get_lost() {
        assert_eq!(longest(|_| {}), Some(Longest { ascii: 1, other: 1 }));
        let merged = longest(|t| {
            t["model"]["vocab"]["ĠĠ"] = json!(256);
            t["model"]["merges"] = json!(["Ġ Ġ"]);
        });
        assert_eq!(
            merged,
            Some(Longest { ascii: 2, other: 2 }),
            "two spaces, whose letters are two bytes each"
        );
        let special = longest(|t| t["added_tokens"] = token("<|long|>", false));
        assert_eq!(special, Some(Longest { ascii: 8, other: 8 }));
        let composed = longest(|t| t["normalizer"] = json!({"type": "NFC"}));
        assert_eq!(composed, Some(Longest { ascii: 1, other: 4 }));
    }

    #[test]
    fn where_text_can_get_lost_there_is_no_bound() {
        let split = |behavior: &str| {
            let split =
                json!({"type": "Split", "pattern": {"Regex": "\\s+"}, "behavior": behavior, "invert": false});
            longest(|t| {
                let bytes = t["pre_tokenizer"].clone();
                t["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [split, bytes]});
            })
        };
        assert_eq!(split("Isolated"), Some(Longest { ascii: 1, other: 1 }));
        assert_eq!(split("Removed"), None);
        let strip = json!({"type": "Strip", "strip_left": true, "strip_right": true});
        assert_eq!(longest(|t| t["normalizer"] = strip), None);
        let replace = |to: &str| json!({"type": "Replace", "pattern": {"String": "ab"}, "content": to});
        assert_eq!(longest(|t| t["normalizer"] = replace("a")), None);
        assert!(longest(|t| t["normalizer"] = replace("abc")).is_some());
        assert_eq!(longest(|t| t["added_tokens"] = token("<x>", true)), None);
        let lost = longest(|t| drop(t["model"]["vocab"].as_object_mut().unwrap().remove("!")));
        assert_eq!(lost, None, "a byte without a token disappears");
    }

    #[test]
    fn what_is_refused_would_not_have_fitted() {
        let tokenizer = with(|t| t["normalizer"] = json!({"type": "NFC"}));
        // What composition shrinks most.
        let text = "\u{1FBE}\u{308}\u{301}".repeat(100);
        let tokens = tokenizer.encode(&text).unwrap().len();
        assert_eq!((text.len(), tokens), (700, 200));
        assert!(tokenizer.check_length(&text, tokens).is_ok());
        let error = tokenizer.check_length(&text, 174).unwrap_err();
        assert_eq!((error.bytes, error.longest, error.bound), (700, 4, 696));
        let message = tokenizer.check_length(&"x".repeat(4 << 20), 512).unwrap_err().to_string();
        for word in ["4194304 bytes", "context of 512 tokens", "at most 512 bytes"] {
            assert!(message.contains(word), "{message}");
        }
    }
}
