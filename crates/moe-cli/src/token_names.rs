//! What answers call a token in lists of log-probabilities.

use std::borrow::Cow;
use std::fmt::Write;

use moe_engine::tokenizer::{TokenBytes, Tokenizer};

/// Names of tokens.
#[derive(Clone, Copy)]
pub struct TokenNames<'a> {
    tokenizer: Option<&'a Tokenizer>,
    bytes: Option<&'a TokenBytes>,
}

impl<'a> TokenNames<'a> {
    /// Names of a tokenizer's tokens, or of ids alone.
    pub fn new(tokenizer: Option<&'a Tokenizer>) -> Self {
        Self { tokenizer, bytes: tokenizer.and_then(|tokenizer| tokenizer.token_bytes().ok()) }
    }

    /// The bytes that a token stands for, special ones with their text; none where it has no text.
    pub fn bytes(&self, id: u32) -> Cow<'a, [u8]> {
        match (self.bytes, self.tokenizer) {
            (Some(bytes), _) => bytes.get(id).into(),
            // Its tokens are not bytes of the text: a token alone may look otherwise there.
            (None, Some(tokenizer)) => {
                tokenizer.decode_with(&[id], false).unwrap_or_default().into_bytes().into()
            }
            (None, None) => Cow::default(),
        }
    }

    /// The text of a token. Where it is part of a character, its bytes in OpenAI's form, `bytes:\xe2\x80`; where it has
    /// none, vLLM's name for its id.
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

    /// vLLM's name for an id.
    pub fn of_id(id: u32) -> String {
        format!("token_id:{id}")
    }
}

/// Counts the characters of a text whose tokens come one by one. Tokens of one character begin where it does.
#[derive(Default)]
pub struct CharCount {
    begun: usize,
}

impl CharCount {
    /// The characters before a token of these bytes, which is added.
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
