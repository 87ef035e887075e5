//! The names of tokens in the lists of log-probabilities of answers.

use std::borrow::Cow;
use std::fmt::Write;

use moe_engine::tokenizer::{TokenBytes, Tokenizer};

/// Finds the names of tokens.
#[derive(Clone, Copy)]
pub struct TokenNames<'a> {
    tokenizer: Option<&'a Tokenizer>,
    bytes: Option<&'a TokenBytes>,
}

impl<'a> TokenNames<'a> {
    /// Makes the names of a tokenizer's tokens. Without a tokenizer, tokens are named by their ids.
    pub fn new(tokenizer: Option<&'a Tokenizer>) -> Self {
        Self { tokenizer, bytes: tokenizer.and_then(|tokenizer| tokenizer.token_bytes().ok()) }
    }

    /// Returns the bytes that a token stands for. A special token stands for its text. A token without text has no
    /// bytes.
    pub fn bytes(&self, id: u32) -> Cow<'a, [u8]> {
        match (self.bytes, self.tokenizer) {
            (Some(bytes), _) => bytes.get(id).into(),
            // The tokens of this tokenizer are not bytes of the text, so a token may look different when it is decoded
            // alone.
            (None, Some(tokenizer)) => {
                tokenizer.decode_with(&[id], false).unwrap_or_default().into_bytes().into()
            }
            (None, None) => Cow::default(),
        }
    }

    /// Returns the text of a token. If it is a part of a character, the name is its bytes in OpenAI's form,
    /// `bytes:\xe2\x80`. If it has no text, the name is vLLM's name for its id.
    pub fn name(&self, id: u32) -> String {
        let bytes = self.bytes(id);
        match std::str::from_utf8(&bytes) {
            Ok("") => Self::of_id(id),
            Ok(text) => text.to_string(),
            Err(_) => bytes.iter().fold("bytes:".to_string(), |mut name, byte| {
                let _ = write!(name, "\\x{byte:02x}");
                name
            }),
        }
    }

    /// Returns vLLM's name for an id.
    pub fn of_id(id: u32) -> String {
        format!("token_id:{id}")
    }
}

/// Counts the characters of a text whose tokens arrive one by one. All tokens of one character have the position of
/// that character.
#[derive(Default)]
pub struct CharCount {
    begun: usize,
}

impl CharCount {
    /// Adds a token of these bytes, and returns the number of characters before it.
    pub fn add(&mut self, bytes: &[u8]) -> usize {
        let continues = |byte: &&u8| **byte & 0xC0 == 0x80;
        let inside = bytes.first().is_some_and(|byte| continues(&byte));
        let before = self.begun - usize::from(inside && self.begun > 0);
        self.begun += bytes.iter().filter(|byte| !continues(byte)).count();
        before
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_a_character_is_called_by_its_bytes() {
        let tokenizer = Tokenizer::bytes().unwrap();
        let names = TokenNames::new(Some(&tokenizer));
        let ids = tokenizer.encode("a😀b").unwrap();
        let all: Vec<String> = ids.iter().map(|&id| names.name(id)).collect();
        assert_eq!(all, ["a", "bytes:\\xf0", "bytes:\\x9f", "bytes:\\x98", "bytes:\\x80", "b"]);
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| names.bytes(id).into_owned()).collect();
        assert_eq!(bytes, "a😀b".as_bytes());
        let mut count = CharCount::default();
        let offsets: Vec<usize> = ids.iter().map(|&id| count.add(&names.bytes(id))).collect();
        assert_eq!(offsets, [0, 1, 1, 1, 1, 2]);
        assert_eq!(names.name(999), "token_id:999", "an id of the model alone");
        assert_eq!(TokenNames::new(None).name(5), "token_id:5");
    }
}
