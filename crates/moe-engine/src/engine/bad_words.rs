//! Words that must not occur in a text, whatever tokens it consists of.
//!
//! A word can arise within a token, or across any number of tokens. So the text counts, and not the tokens of the word
//! alone: a token is excluded if its bytes, after the text so far, complete a word. There are two cases. The token
//! contains a word itself, which does not depend on the text. Or the text ends with the beginning of a word, and the
//! token begins with the rest of it. The tokens that begin with given bytes are a range of the sorted vocabulary.

use std::sync::{Arc, Mutex, PoisonError};

use aho_corasick::AhoCorasick;

use super::request::RequestError;
use crate::structured::Mask;
use crate::tokenizer::{TokenBytes, Tokenizer};

/// The largest number of bytes in the words of a request.
const MAX_BYTES: usize = 64 << 10;
/// Number of lists of words that are kept. The least recently used one is dropped.
const KEPT: usize = 8;

/// Prepares the words of requests for one tokenizer.
pub(super) struct BadWordLists {
    tokenizer: Tokenizer,
    vocab_size: usize,
    /// The most recently used list is at the end.
    kept: Mutex<Vec<Arc<BadWords>>>,
}

/// The words of a request.
pub(super) struct BadWords {
    tokenizer: Tokenizer,
    words: Vec<String>,
    /// Whether special tokens have no text.
    skip_special_tokens: bool,
    vocab_size: usize,
    /// Tokens that contain a word themselves.
    excluded: Vec<u32>,
    /// Number of bytes at the end of the text in which a word may have begun.
    reach: usize,
}

/// Checks what no tokenizer can exclude.
///
/// # Errors
/// A word is empty or cannot occur in a text, or there are too many words.
pub(super) fn check(words: &[String]) -> Result<(), RequestError> {
    if words.iter().any(String::is_empty) {
        return refuse("words that are not empty", "an empty one");
    }
    // The replacement character stands for bytes that are no character, and later bytes decide which bytes these are.
    if let Some(word) = words.iter().find(|word| word.contains(char::REPLACEMENT_CHARACTER)) {
        return refuse(
            "words without U+FFFD, which stands for bytes that are no character",
            format!("{word:?}"),
        );
    }
    let bytes: usize = words.iter().map(String::len).sum();
    match bytes > MAX_BYTES {
        true => refuse(format!("of at most {MAX_BYTES} bytes together"), bytes),
        false => Ok(()),
    }
}

fn refuse<T>(expected: impl Into<String>, got: impl std::fmt::Display) -> Result<T, RequestError> {
    Err(RequestError::Parameter { name: "bad_words", expected: expected.into(), got: got.to_string() })
}

impl BadWordLists {
    /// Prepares words for a model of `vocab_size` tokens.
    pub fn new(tokenizer: Tokenizer, vocab_size: usize) -> Self {
        Self { tokenizer, vocab_size, kept: Mutex::default() }
    }

    /// Prepares these words.
    ///
    /// # Errors
    /// The tokenizer's tokens are not bytes of the text.
    pub fn prepare(
        &self,
        words: &[String],
        skip_special_tokens: bool,
    ) -> Result<Arc<BadWords>, RequestError> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let is_same = |of: &Arc<BadWords>| of.words == words && of.skip_special_tokens == skip_special_tokens;
        let found = match kept.iter().position(is_same) {
            Some(at) => kept.remove(at),
            None => {
                let prepared =
                    BadWords::new(&self.tokenizer, self.vocab_size, words.to_vec(), skip_special_tokens);
                Arc::new(prepared.or_else(|reason| refuse("left out", format!("some: {reason}")))?)
            }
        };
        if kept.len() == KEPT {
            kept.remove(0);
        }
        kept.push(found.clone());
        Ok(found)
    }
}

impl BadWords {
    fn new(
        tokenizer: &Tokenizer,
        vocab_size: usize,
        words: Vec<String>,
        skip_special_tokens: bool,
    ) -> Result<Self, String> {
        let reach = words.iter().map(String::len).max().unwrap_or(0).saturating_sub(1);
        let tokenizer = tokenizer.clone();
        let mut bad = Self { tokenizer, words, skip_special_tokens, vocab_size, excluded: Vec::new(), reach };
        let finder = AhoCorasick::new(&bad.words).map_err(|e| e.to_string())?;
        let bytes = bad.tokenizer.token_bytes()?;
        let holds = |&id: &u32| finder.is_match(bad.text(bytes, id));
        bad.excluded = (0..bytes.len() as u32).filter(holds).collect();
        Ok(bad)
    }

    /// The part of a token that is text.
    fn text<'a>(&self, bytes: &'a TokenBytes, id: u32) -> &'a [u8] {
        if self.skip_special_tokens && bytes.is_special(id) { &[] } else { bytes.get(id) }
    }

    /// The tokens of `allowed`, or of the vocabulary, that complete no word after a prompt and its output. The tokens
    /// in `ends` have no text.
    pub fn mask(&self, prompt: &[u32], output: &[u32], ends: &[u32], allowed: Option<Mask>) -> Mask {
        let mut mask = allowed.unwrap_or_else(|| Mask::all(self.vocab_size));
        // The bytes were read when the words were prepared.
        let Ok(bytes) = self.tokenizer.token_bytes() else { return mask };
        let mut exclude = |id: u32| {
            if !ends.contains(&id) {
                mask.exclude(id);
            }
        };
        self.excluded.iter().for_each(|&id| exclude(id));
        let end = self.end_of_text(bytes, prompt, output);
        for word in self.words.iter().map(String::as_bytes) {
            for begun in (1..word.len()).filter(|&begun| end.ends_with(&word[..begun])) {
                let completing = bytes.beginning_with(&word[begun..]);
                let shown = completing.iter().filter(|&&id| !self.text(bytes, id).is_empty());
                shown.for_each(|&id| exclude(id));
            }
        }
        mask
    }

    /// The last bytes of a text, as many as may contain the beginning of a word.
    fn end_of_text(&self, bytes: &TokenBytes, prompt: &[u32], output: &[u32]) -> Vec<u8> {
        let mut parts = Vec::new();
        let mut len = 0;
        for &id in output.iter().rev().chain(prompt.iter().rev()) {
            if len >= self.reach {
                break;
            }
            let text = self.text(bytes, id);
            len += text.len();
            parts.push(text);
        }
        parts.reverse();
        parts.concat()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Every byte, and tokens of several bytes, with a blank in front or inside of words.
    fn tokenizer() -> Tokenizer {
        let more = ["th", "ee", "Ġth", "Ġthee", "hee", "e,", "heeĠ", "ab", "ba", "aba", "Ã", "Ã©"];
        crate::testing::byte_level(&more, &[("<|end|>", true), ("<the>", false)])
    }

    fn allowed(mask: &Mask, id: u32) -> bool {
        mask.words().get(id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 1)
    }

    fn prepare(tokenizer: &Tokenizer, words: &[&str]) -> Arc<BadWords> {
        let words: Vec<String> = words.iter().map(|word| word.to_string()).collect();
        BadWordLists::new(tokenizer.clone(), tokenizer.vocab_size() + 7).prepare(&words, true).unwrap()
    }

    #[test]
    fn a_word_is_excluded_in_a_token_and_across_tokens() {
        let tokenizer = tokenizer();
        let id = |token: &str| tokenizer.token_to_id(token).unwrap();
        let words = prepare(&tokenizer, &["thee"]);
        let mask = words.mask(&[], &[], &[], None);
        assert!(!allowed(&mask, id("Ġthee")) && allowed(&mask, id("Ġth")) && allowed(&mask, id("hee")));
        for (before, token, may) in [
            (["Ġ", "th"], "ee", false),
            (["Ġ", "t"], "hee", false),
            (["Ġ", "t"], "heeĠ", false),
            (["th", "e"], "e,", false),
            (["th", "<|end|>"], "ee", false),
            (["th", "<the>"], "ee", true),
            (["th", "a"], "ee", true),
            (["th", "e"], "ee", false),
        ] {
            let output = before.map(id);
            assert_eq!(allowed(&words.mask(&[], &output, &[], None), id(token)), may, "{before:?} {token}");
            // A word may also begin in the prompt.
            assert_eq!(allowed(&words.mask(&output, &[], &[], None), id(token)), may, "{before:?} {token}");
        }
        // Ids that the model has and the tokenizer does not have stay allowed.
        assert!(allowed(&mask, tokenizer.vocab_size() as u32 + 3));
    }

    #[test]
    fn ends_and_grammars_keep_their_say() {
        let tokenizer = tokenizer();
        let id = |token: &str| tokenizer.token_to_id(token).unwrap();
        let words = prepare(&tokenizer, &["the"]);
        assert!(!allowed(&words.mask(&[], &[], &[], None), id("<the>")));
        assert!(allowed(&words.mask(&[], &[], &[id("<the>")], None), id("<the>")));
        let mut grammar = Mask::all(tokenizer.vocab_size());
        grammar.exclude(id("ab"));
        let mask = words.mask(&[], &[], &[], Some(grammar));
        assert!(!allowed(&mask, id("ab")) && !allowed(&mask, id("Ġthee")) && allowed(&mask, id("ba")));
    }

    #[test]
    fn words_that_cannot_be_excluded_are_refused() {
        let message = |word: &str| check(&[word.to_string()]).unwrap_err().to_string();
        assert!(message("").contains("bad_words must be words that are not empty"));
        assert!(message("a\u{FFFD}").contains("U+FFFD"));
        assert!(message(&"x".repeat(MAX_BYTES + 1)).contains("got 65537"));
        assert_eq!(check(&["x".repeat(MAX_BYTES)]), Ok(()));
    }

    proptest! {
        /// The mask follows the definition: a token is excluded if and only if the text with it contains a word that
        /// the text without it does not contain.
        #[test]
        fn the_mask_is_the_definition(
            output in prop::collection::vec(0usize..30, 0..12),
            words in prop::collection::vec("[abeht]{1,4}|é|th[ ,]", 1..4),
        ) {
            let tokenizer = tokenizer();
            let some: Vec<u32> = (0..tokenizer.vocab_size() as u32).rev().take(14)
                .chain("abeht ,e".bytes().map(|b| tokenizer.encode(&(b as char).to_string()).unwrap()[0]))
                .collect();
            let output: Vec<u32> = output.iter().map(|i| some[i % some.len()]).collect();
            let refs: Vec<&str> = words.iter().map(String::as_str).collect();
            let bad = prepare(&tokenizer, &refs);
            let mask = bad.mask(&[], &output, &[], None);
            let bytes = tokenizer.token_bytes().unwrap();
            let before: Vec<u8> = output.iter().flat_map(|&id| bad.text(bytes, id)).copied().collect();
            for &id in &some {
                let token = bad.text(bytes, id);
                let text = [&before[..], token].concat();
                let completes = words.iter().any(|word| {
                    (before.len()..text.len()).any(|end| text[..=end].ends_with(word.as_bytes()))
                });
                prop_assert_eq!(allowed(&mask, id), !completes, "{:?} + {:?}", before, token);
            }
        }
    }
}
