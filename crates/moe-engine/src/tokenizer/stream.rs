//! Converts token ids to text as they arrive, without splitting a character.

use crate::error::Result;

use super::Tokenizer;

/// Turns a stream of token ids into a stream of text.
///
/// A token may end inside a character, so a piece of text is returned only when no later token can change it. Lossy
/// decoding turns the bytes of an unfinished character at the end of the text into U+FFFD. A byte-level tokenizer
/// writes one U+FFFD for all of these bytes. With byte fallback there is one U+FFFD for each byte of the whole run of
/// bytes that the character ends, including the bytes of finished characters. So every U+FFFD at the end is held back.
/// All pieces, together with [`Self::finish`], give the decoding of all ids. The exception is byte fallback with bytes
/// that fit no character.
#[derive(Default)]
pub struct TextStream {
    /// The ids whose decoding is still needed: the last ids that were returned, for context, and all later ones.
    window: Vec<u32>,
    /// The number of bytes of the window's text that have been returned.
    emitted: usize,
    special_tokens: bool,
}

impl TextStream {
    /// The largest number of bytes of an unfinished UTF-8 character. Only this many bytes are held back if the window
    /// is so long that its bytes cannot form a character.
    const UNFINISHED: usize = 3;
    /// The number of tokens of context. It is needed for decoders that treat the first token specially.
    const CONTEXT: usize = 4;

    /// The number of tokens after which the window is shortened, even if its last tokens have no text.
    const LONGEST: usize = 64;

    /// Creates an empty stream.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets whether special tokens are part of the text. By default they are not.
    #[must_use]
    pub fn with_special_tokens(mut self, on: bool) -> Self {
        self.special_tokens = on;
        self
    }

    fn decode(&self, tokenizer: &Tokenizer, ids: &[u32]) -> Result<String> {
        tokenizer.decode_with(ids, !self.special_tokens)
    }

    /// Adds a token and returns the text that has become final, which is often empty.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> Result<String> {
        self.window.push(id);
        let text = self.decode(tokenizer, &self.window)?;
        let held = if self.window.len() > Self::LONGEST { Self::UNFINISHED } else { usize::MAX };
        let unfinished = text.chars().rev().take_while(|&c| c == char::REPLACEMENT_CHARACTER).count();
        let end = text.len() - unfinished.min(held) * char::REPLACEMENT_CHARACTER.len_utf8();
        let stable = text.get(..end).unwrap_or_default();
        let piece = self.unseen(stable);
        self.emitted = self.emitted.max(stable.len());
        if stable.len() == text.len() {
            self.shrink(tokenizer, &text)?;
        }
        Ok(piece)
    }

    /// Returns the rest of the text, which is an unfinished character if there is one.
    pub fn finish(&mut self, tokenizer: &Tokenizer) -> Result<String> {
        let text = self.decode(tokenizer, &self.window)?;
        let piece = self.unseen(&text);
        self.window.clear();
        self.emitted = 0;
        Ok(piece)
    }

    /// Returns the part of the text that has not been returned. Byte fallback turns a whole run of bytes into U+FFFD
    /// once one of them fits no character. The text that was returned may then end inside a U+FFFD.
    fn unseen(&self, text: &str) -> String {
        text.get(text.ceil_char_boundary(self.emitted)..).unwrap_or_default().to_string()
    }

    /// Drops all but the last tokens, if the text of these tokens is the end of `text`. That fails if the window would
    /// be cut inside a character. A character has at most four bytes, so one of the cuts that are tried is between two
    /// characters.
    fn shrink(&mut self, tokenizer: &Tokenizer, text: &str) -> Result<()> {
        if self.window.len() < 2 * Self::CONTEXT {
            return Ok(());
        }
        for kept in Self::CONTEXT..2 * Self::CONTEXT {
            let tail = &self.window[self.window.len() - kept..];
            let tail_text = self.decode(tokenizer, tail)?;
            // Skipped special tokens have no text. A run of them must not make the window grow without limit.
            if text.ends_with(&tail_text) && (!tail_text.is_empty() || self.window.len() > Self::LONGEST) {
                self.window = tail.to_vec();
                self.emitted = tail_text.len();
                break;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_character_comes_out_whole() {
        let t = Tokenizer::bytes().unwrap();
        let ids = t.encode("aé€😀").unwrap();
        assert_eq!(ids.len(), 1 + 2 + 3 + 4);
        let mut stream = TextStream::new();
        let pieces: Vec<String> = ids.iter().map(|&id| stream.push(&t, id).unwrap()).collect();
        assert_eq!(pieces, ["a", "", "é", "", "", "€", "", "", "", "😀"]);
    }

    #[test]
    fn an_unfinished_character_is_flushed() {
        let t = Tokenizer::bytes().unwrap();
        let ids = t.encode("x€").unwrap();
        let mut stream = TextStream::new();
        let mut text = String::new();
        for &id in &ids[..3] {
            text += &stream.push(&t, id).unwrap();
        }
        assert_eq!(text, "x");
        text += &stream.finish(&t).unwrap();
        assert_eq!(text, "x\u{FFFD}");
    }

    /// Returns a tokenizer like Llama's. It has a few pieces in which U+2581 stands for a space, and bytes for
    /// everything else. Its decoder drops the space before the first piece.
    fn byte_fallback() -> Tokenizer {
        let pieces = ["<unk>", "\u{2581}", "a", "b", "\u{2581}a", "\u{2581}b", "ab"].map(String::from);
        let bytes = (0..=255u8).map(|b| format!("<0x{b:02X}>"));
        let vocab: serde_json::Map<String, serde_json::Value> =
            pieces.into_iter().chain(bytes).enumerate().map(|(i, token)| (token, i.into())).collect();
        let json = serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
            "normalizer": {"type": "Sequence", "normalizers": [
                {"type": "Prepend", "prepend": "\u{2581}"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"}]},
            "pre_tokenizer": null, "post_processor": null,
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "},
                {"type": "ByteFallback"}, {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
            "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "vocab": vocab,
                "merges": ["\u{2581} a", "\u{2581} b", "a b"]},
        });
        Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap()
    }

    /// Returns the pieces of a stream. The last one comes from `finish`.
    fn pieces(t: &Tokenizer, ids: &[u32]) -> Vec<String> {
        let mut stream = TextStream::new();
        let mut pieces: Vec<String> = ids.iter().map(|&id| stream.push(t, id).unwrap()).collect();
        assert!(stream.window.len() <= TextStream::LONGEST + 1, "{} tokens are kept", stream.window.len());
        pieces.push(stream.finish(t).unwrap());
        pieces
    }

    #[test]
    fn bytes_of_a_fallback_come_out_as_characters() {
        let t = byte_fallback();
        let ids = t.encode("a€ bé").unwrap();
        assert_eq!(ids.len(), 1 + 3 + 1 + 2);
        assert_eq!(pieces(&t, &ids), ["a", "", "", "€", " b", "", "é", ""]);
        // The text ends inside a character, so there is one U+FFFD for each of its bytes.
        assert_eq!(pieces(&t, &ids[..3]), ["a", "", "", "\u{FFFD}\u{FFFD}"]);
    }

    /// After a byte that fits no character, the decoder replaces the whole run of bytes. The text that has been
    /// returned stays, and the text after the run is not lost.
    #[test]
    fn text_after_a_spoilt_run_of_bytes_is_not_lost() {
        let t = byte_fallback();
        let byte = |b: u8| t.token_to_id(&format!("<0x{b:02X}>")).unwrap();
        let a = t.token_to_id("a").unwrap();
        let text = pieces(&t, &[a, byte(0xC3), byte(0xA9), byte(0xFF), a, a]).concat();
        assert_eq!(text, "aé\u{FFFD}\u{FFFD}aa");
    }

    proptest! {
        #[test]
        fn pieces_concatenate_to_the_whole(ids in prop::collection::vec(0u32..256, 0..60)) {
            let t = Tokenizer::bytes().unwrap();
            let mut stream = TextStream::new();
            let mut text = String::new();
            for &id in &ids {
                text += &stream.push(&t, id).unwrap();
            }
            text += &stream.finish(&t).unwrap();
            prop_assert_eq!(text, t.decode(&ids).unwrap());
        }

        #[test]
        fn fallback_pieces_concatenate_to_the_text(text in "[ab é€😀中文]{0,150}") {
            let t = byte_fallback();
            let ids = t.encode(&text).unwrap();
            prop_assert_eq!(pieces(&t, &ids).concat(), t.decode(&ids).unwrap());
        }
    }
}
