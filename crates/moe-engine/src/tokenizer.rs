//! Text to token ids and back. The work is the `tokenizers` crate's; this adds what generation
//! needs: errors that name the file, and text that streams without breaking a character.

mod bound;
mod template;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, OnceLock};

use anyhow::{Context, Result, anyhow};
use model_runtime::config::read_file;

pub use bound::TooLong;

/// A tokenizer as `tokenizer.json` describes it.
#[derive(Clone)]
pub struct Tokenizer(pub(crate) tokenizers::Tokenizer, Arc<OnceLock<Option<bound::Longest>>>);

impl Tokenizer {
    /// Reads `tokenizer.json` of a checkpoint folder.
    pub fn from_dir(dir: &Path) -> Result<Self> {
        let path = dir.join("tokenizer.json");
        let bytes = read_file(&path).with_context(|| {
            format!("cannot read {}: generating text needs the checkpoint's tokenizer", path.display())
        })?;
        Self::from_bytes(&bytes).with_context(|| format!("{} is not a tokenizer", path.display()))
    }

    /// Parses the contents of a `tokenizer.json`. Its truncation and padding are left out, as transformers does: they
    /// are what the file's author trained with, and would change a prompt unseen.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let mut tokenizer = tokenizers::Tokenizer::from_bytes(bytes).map_err(|e| anyhow!("{e}"))?;
        tokenizer.with_truncation(None).map_err(|e| anyhow!("{e}"))?.with_padding(None);
        template::check(&tokenizer)?;
        Ok(Self(tokenizer, Arc::default()))
    }

    /// A tokenizer that needs no file: GPT-2's byte alphabet without merges, so every byte of a text is
    /// one of 256 tokens. For models with random weights, and for tests.
    pub fn bytes() -> Result<Self> {
        let alphabet = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet();
        let mut chars: Vec<char> = alphabet.into_iter().collect();
        chars.sort_unstable();
        let vocab: serde_json::Map<String, serde_json::Value> =
            chars.iter().enumerate().map(|(i, c)| (c.to_string(), i.into())).collect();
        let byte_level = serde_json::json!(
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false}
        );
        let json = serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
            "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []},
        });
        Self::from_bytes(json.to_string().as_bytes())
    }

    /// Token ids of a text, with the special tokens that the tokenizer's own template adds.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.ids(text, true)
    }

    /// Token ids of a rendered chat, which holds all its special tokens already.
    pub fn encode_rendered(&self, text: &str) -> Result<Vec<u32>> {
        self.ids(text, false)
    }

    fn ids(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>> {
        // The library panics on what some files say; a text is then refused like any other that it cannot take.
        let encode = AssertUnwindSafe(|| self.0.encode_fast(text, add_special_tokens));
        let encoding = catch_unwind(encode).map_err(|panic| {
            let text = crate::panic_text(&*panic);
            anyhow!(
                "cannot tokenize the prompt: the tokenizers library panicked ({text}); check tokenizer.json"
            )
        })?;
        Ok(encoding.map_err(|e| anyhow!("cannot tokenize the prompt: {e}"))?.get_ids().to_vec())
    }

    /// Refuses a text that is certainly longer than `context` tokens, by its bytes alone: nothing is tokenized. A text
    /// that passes may be too long all the same.
    pub fn check_length(&self, text: &str, context: usize) -> Result<(), TooLong> {
        // Where there is a bound, a token stands for at least one byte.
        if text.len() <= context {
            return Ok(());
        }
        let longest = self.1.get_or_init(|| bound::Longest::of(&self.0));
        longest.map_or(Ok(()), |longest| longest.check(text, context))
    }

    /// Text of token ids, without special tokens. Bytes that are not UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.decode_with(ids, true)
    }

    /// Text of token ids, with or without special tokens.
    pub fn decode_with(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String> {
        self.0.decode(ids, skip_special_tokens).map_err(|e| anyhow!("cannot decode tokens: {e}"))
    }

    /// Number of tokens, added ones included.
    pub fn vocab_size(&self) -> usize {
        self.0.get_vocab_size(true)
    }

    /// The id of a token's exact text.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.0.token_to_id(token)
    }
}

/// Turns a stream of token ids into a stream of text.
///
/// A token may end inside a character, so a piece of text is given out only once no later
/// token can change it. Lossy decoding turns the bytes of an unfinished character into U+FFFD at
/// the end of the text: one for all of them in byte-level tokenizers; with byte fallback one for
/// each byte of the whole run that the character ends, finished characters included. So every U+FFFD
/// at the end is held back. The pieces, with [`Self::finish`], concatenate to the decoding of all ids;
/// not so with byte fallback where bytes fit no character.
#[derive(Default)]
pub struct TextStream {
    /// The ids whose decoding still matters: the last given-out ones, for context, and the rest.
    window: Vec<u32>,
    /// Bytes of the window's text that are given out.
    emitted: usize,
    special_tokens: bool,
}

impl TextStream {
    /// Bytes that an unfinished UTF-8 character has at most: what is held back of a window that
    /// is too long to be anything but bytes without meaning.
    const UNFINISHED: usize = 3;
    /// Tokens of context kept for decoders that treat the first token specially.
    const CONTEXT: usize = 4;

    /// Tokens after which the window is cut even if its tail has no text.
    const LONGEST: usize = 64;

    /// A stream with nothing in it.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether special tokens are part of the text; they are not by default.
    pub fn with_special_tokens(mut self, on: bool) -> Self {
        self.special_tokens = on;
        self
    }

    fn decode(&self, tokenizer: &Tokenizer, ids: &[u32]) -> Result<String> {
        tokenizer.decode_with(ids, !self.special_tokens)
    }

    /// Adds a token; the text that has become final, often empty.
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

    /// The rest of the text: an unfinished character, if there is one.
    pub fn finish(&mut self, tokenizer: &Tokenizer) -> Result<String> {
        let text = self.decode(tokenizer, &self.window)?;
        let piece = self.unseen(&text);
        self.window.clear();
        self.emitted = 0;
        Ok(piece)
    }

    /// The part that is not given out. Byte fallback turns a whole run of bytes into U+FFFD once one
    /// of them fits no character; what was given out may then end inside a U+FFFD.
    fn unseen(&self, text: &str) -> String {
        text.get(text.ceil_char_boundary(self.emitted)..).unwrap_or_default().to_string()
    }

    /// Drops all but the last tokens, if their text alone is the end of `text`: not so when
    /// the cut would fall inside a character. With at most four bytes to a character, one of the
    /// cuts that are tried falls between two.
    fn shrink(&mut self, tokenizer: &Tokenizer, text: &str) -> Result<()> {
        if self.window.len() < 2 * Self::CONTEXT {
            return Ok(());
        }
        for kept in Self::CONTEXT..2 * Self::CONTEXT {
            let tail = &self.window[self.window.len() - kept..];
            let tail_text = self.decode(tokenizer, tail)?;
            // Skipped special tokens have no text; a run of them must not keep the window growing.
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

    /// A tokenizer of Llama's kind: a few pieces where U+2581 stands for a space, bytes for all else,
    /// and a decoder that drops the space before the first piece.
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

    /// The pieces of a stream, the last one from `finish`.
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
        // The text ends inside a character: one U+FFFD for each of its bytes.
        assert_eq!(pieces(&t, &ids[..3]), ["a", "", "", "\u{FFFD}\u{FFFD}"]);
    }

    /// A byte that fits no character spoils the whole run of bytes for the decoder. What is given
    /// out stays, and the text after the run is not lost.
    #[test]
    fn text_after_a_spoilt_run_of_bytes_is_not_lost() {
        let t = byte_fallback();
        let byte = |b: u8| t.token_to_id(&format!("<0x{b:02X}>")).unwrap();
        let a = t.token_to_id("a").unwrap();
        let text = pieces(&t, &[a, byte(0xC3), byte(0xA9), byte(0xFF), a, a]).concat();
        assert_eq!(text, "aé\u{FFFD}\u{FFFD}aa");
    }

    #[test]
    fn a_rendered_chat_gets_no_second_bos() {
        let token = serde_json::json!({"id": 0, "content": "<s>", "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true});
        let sequence = serde_json::json!({"Sequence": {"id": "A", "type_id": 0}});
        let bos = serde_json::json!({"SpecialToken": {"id": "<s>", "type_id": 0}});
        let json = serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [token], "normalizer": null,
            "pre_tokenizer": null, "decoder": null, "model": {"type": "WordLevel", "vocab": {"<s>": 0, "a": 1}, "unk_token": "a"},
            "post_processor": {"type": "TemplateProcessing", "single": [bos, sequence], "pair": [sequence],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}},
        });
        let t = Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap();
        assert_eq!(t.encode("a").unwrap(), [0, 1]);
        assert_eq!(t.encode_rendered("<s>a").unwrap(), [0, 1]);
    }

    #[test]
    fn not_a_tokenizer_is_an_error() {
        assert!(Tokenizer::from_bytes(b"{}").is_err());
        assert!(Tokenizer::from_bytes(b"\xff").is_err());
    }

    /// The stride here makes the library panic, and this padding would take all memory.
    #[test]
    fn truncation_and_padding_of_the_file_are_left_out() {
        let mut json = serde_json::to_value(&Tokenizer::bytes().unwrap().0).unwrap();
        json["truncation"] = serde_json::json!(
            {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 8}
        );
        json["padding"] = serde_json::json!({"strategy": {"Fixed": 1_000_000_000}, "direction": "Right",
            "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0, "pad_token": "a"});
        let t = Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap();
        let text = "longer than eight tokens";
        assert_eq!(t.decode(&t.encode(text).unwrap()).unwrap(), text);
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
