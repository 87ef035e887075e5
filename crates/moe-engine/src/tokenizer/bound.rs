//! Bounds the number of bytes that a number of tokens can stand for. A text with more bytes is too long for a context,
//! so it is refused without tokenizing megabytes.
//!
//! The bound exists only if no part of a text can disappear before it becomes tokens. A tokenizer that may drop text,
//! or that may map text of any length to one token (an unknown token, or a normalizer that strips), has no bound here.
//! Its prompts are tokenized whatever their length.

use serde_json::Value;
use tokenizers::ModelWrapper;
use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

/// The largest number of bytes that Unicode's composition turns into one byte, rounded up: U+1FBE U+0308 U+0301 (7
/// bytes) becomes U+0390 (2 bytes).
const COMPOSED: usize = 4;

/// The error of a text that is certainly longer than a context.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the prompt of {bytes} bytes is too long: the context of {context} tokens takes at most {bound} bytes, because no \
     token stands for more than {longest}"
)]
pub struct TooLong {
    /// Number of bytes of the text.
    pub bytes: usize,
    /// Number of tokens of the context.
    pub context: usize,
    /// The largest number of bytes of the text that one token stands for.
    pub longest: usize,
    /// The largest number of bytes of a text that fits into the context.
    pub bound: usize,
}

crate::error::parts!(TooLong);

/// The largest number of bytes that one token stands for, in a text that is only ASCII and in any other text.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Longest {
    ascii: usize,
    other: usize,
}

impl Longest {
    /// Returns the bounds of a tokenizer. Returns `None` if some text may become nothing, or if one token may stand for
    /// text of any length.
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

    /// Refuses a text that is too long for `context` tokens, whatever its tokens are.
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

/// Collects the steps of a normalizer or a pre-tokenizer, which may be a sequence of other steps.
fn leaves(step: &Value, list: &str, found: &mut Vec<Value>) {
    match step.get(list).and_then(Value::as_array) {
        Some(steps) => steps.iter().for_each(|step| leaves(step, list, found)),
        None => found.push(step.clone()),
    }
}

/// Returns whether a step keeps all text. The step may split the text, compose letters or make the text longer.
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

/// Returns the bytes of the longest token of a vocabulary that has a token for every byte.
fn longest_token(bpe: &BPE, in_bytes: bool) -> Option<usize> {
    let vocab = bpe.get_vocab();
    let whole = match in_bytes {
        true => ByteLevel::alphabet().iter().all(|letter| vocab.contains_key(&letter.to_string())),
        false => bpe.byte_fallback && (0..=255u8).all(|byte| vocab.contains_key(&format!("<0x{byte:02X}>"))),
    };
    let plain = bpe.continuing_subword_prefix.is_none() && bpe.end_of_word_suffix.is_none();
    // A letter of the byte alphabet stands for one byte. In other vocabularies a token stands for at most the bytes in
    // which it is written.
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
        // This text shrinks most under composition.
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
