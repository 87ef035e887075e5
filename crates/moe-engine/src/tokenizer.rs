//! Converts text to token ids and back. The `tokenizers` crate does the work. This module adds what generation needs:
//! tokens that other files declare, limits for untrusted files, and streamed text whose characters are never split.

mod bound;
mod declared;
pub(crate) mod gguf;
mod gguf_words;
#[cfg(test)]
mod hostile_tests;
mod limits;
mod steps;
mod stream;
mod template;
mod token_bytes;

use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use llguidance::panic_utils;
use model_runtime::checkpoint::Gguf;
use model_runtime::config::read_file;
use tracing::warn;

use crate::error::{Context, Result, failed};

use declared::Declared;
use limits::Parts;
use steps::Steps;

pub use bound::TooLong;
pub use gguf_words::gguf_rule;
pub use stream::TextStream;
pub use token_bytes::TokenBytes;

/// A tokenizer that a `tokenizer.json` describes.
#[derive(Clone)]
pub struct Tokenizer {
    pub(crate) library: Arc<tokenizers::Tokenizer>,
    steps: Arc<Steps>,
    /// The token that ends a text, if the checkpoint declares one.
    end: Option<u32>,
    known: Arc<Known>,
}

/// Values that are computed when they are first needed.
#[derive(Default)]
struct Known {
    longest: OnceLock<Option<bound::Longest>>,
    bytes: OnceLock<Result<TokenBytes, String>>,
}

impl Tokenizer {
    /// Reads `tokenizer.json` of a checkpoint folder and the tokens that its other files declare, or the tokenizer of a
    /// GGUF file.
    pub fn from_dir(dir: &Path) -> Result<Self> {
        if let Some(file) = Gguf::find(dir)? {
            return Self::from_gguf(&file).with_context(|| format!("the tokenizer of {}", file.display()));
        }
        let path = dir.join("tokenizer.json");
        let bytes = read_file(&path).with_context(|| {
            format!("cannot read {}: generating text needs the checkpoint's tokenizer", path.display())
        })?;
        let (mut library, steps) =
            read(&bytes).with_context(|| format!("{} is not a tokenizer", path.display()))?;
        let declared = Declared::read(dir)?;
        caught(|| declared.add_to(&mut library, &steps))
            .with_context(|| format!("the tokens of {}", dir.display()))?;
        let end = declared.named("eos_token").and_then(|token| library.token_to_id(token));
        let tokenizer = Self { end, ..Self::new(library)? };
        tokenizer.check_first_token(&declared);
        Ok(tokenizer)
    }

    fn from_gguf(file: &Path) -> Result<Self> {
        let (json, end) = gguf::read(&Gguf::open(file)?)?;
        let (library, _) = read(json.to_string().as_bytes())?;
        Ok(Self { end, ..Self::new(library)? })
    }

    /// Parses the contents of a `tokenizer.json`. Its truncation and padding are ignored, as in transformers. They are
    /// settings of the training, and would change a prompt without notice.
    ///
    /// # Errors
    /// Other contents than a `tokenizer.json`.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        Self::new(read(bytes).context("not the contents of a tokenizer.json")?.0)
    }

    fn new(library: tokenizers::Tokenizer) -> Result<Self> {
        let steps = Arc::new(Steps::of(&library)?);
        Ok(Self { library: Arc::new(library), steps, end: None, known: Arc::default() })
    }

    /// Warns if tokenizer.json and tokenizer_config.json disagree about the first token of a text. As in transformers
    /// 5, tokenizer.json is followed.
    fn check_first_token(&self, declared: &Declared) {
        let (Some(wanted), Some(bos)) = (declared.add_bos, declared.named("bos_token")) else { return };
        let Ok(ids) = self.encode("") else { return };
        let adds = self.token_to_id(bos).is_some_and(|bos| ids.first() == Some(&bos));
        if adds != wanted {
            let does = if adds { "puts it" } else { "puts nothing" };
            warn!(
                "tokenizer_config.json has add_bos_token {wanted}, and tokenizer.json {does} in front of a text: as in \
                 transformers 5, tokenizer.json counts; write {bos:?} yourself, or leave out special tokens"
            );
        }
    }

    /// Returns a tokenizer that needs no file. It has GPT-2's byte alphabet without merges, so every byte of a text is
    /// one of 256 tokens. It is used for models with random weights and for tests.
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

    /// Returns the token ids of a text, with the special tokens that the tokenizer's own template adds.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.ids(text, true)
    }

    /// Returns the token ids of a rendered chat, which already contains all its special tokens.
    pub fn encode_rendered(&self, text: &str) -> Result<Vec<u32>> {
        self.ids(text, false)
    }

    fn ids(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>> {
        // The library panics for some files. The text is then refused like any other text that cannot be tokenized.
        let encode = || {
            let encoding = self.steps.encode(&self.library, text)?;
            let encoding = self.library.post_process(encoding, None, add_special_tokens);
            Ok(encoding.map_err(|e| failed!("{e}"))?.get_ids().to_vec())
        };
        caught(encode).context("cannot tokenize the prompt")
    }

    /// Refuses a text that is certainly longer than `context` tokens. It looks only at the bytes and tokenizes nothing.
    /// A text that passes may still be too long.
    pub fn check_length(&self, text: &str, context: usize) -> Result<(), TooLong> {
        // If a tokenizer has a bound, each of its tokens stands for at least one byte.
        if text.len() <= context {
            return Ok(());
        }
        let longest = self.known.longest.get_or_init(|| bound::Longest::of(&self.library));
        longest.map_or(Ok(()), |longest| longest.check(text, context))
    }

    /// Returns the text of token ids, without special tokens. Bytes that are not UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.decode_with(ids, true)
    }

    /// Returns the text of token ids, with or without special tokens.
    pub fn decode_with(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String> {
        caught(|| self.library.decode(ids, skip_special_tokens).map_err(|e| failed!("{e}")))
            .context("cannot decode tokens")
    }

    /// Returns the number of tokens, including added ones.
    pub fn vocab_size(&self) -> usize {
        self.library.get_vocab_size(true)
    }

    /// Returns the id of the token with exactly this text.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.library.token_to_id(token)
    }

    /// Returns whether one of these texts is a special token, which [`decode`](Self::decode) leaves out.
    pub fn hides(&self, texts: &[&str]) -> bool {
        let added = self.library.get_added_tokens_decoder();
        added.values().any(|token| token.special && texts.contains(&token.content.as_str()))
    }

    /// Returns the token that ends a text, if the checkpoint's tokenizer declares one.
    pub fn end_token(&self) -> Option<u32> {
        self.end
    }

    /// Returns the bytes of each token.
    ///
    /// # Errors
    /// The tokenizer's tokens are not bytes of the text, or an id is too large.
    pub fn token_bytes(&self) -> Result<&TokenBytes, String> {
        let bytes = self.known.bytes.get_or_init(|| TokenBytes::of(&self.library));
        bytes.as_ref().map_err(String::clone)
    }
}

/// Reads the contents of a tokenizer.json within limits.
fn read(bytes: &[u8]) -> Result<(tokenizers::Tokenizer, Steps)> {
    caught(|| {
        Parts::read(bytes)?.check()?;
        let mut tokenizer = tokenizers::Tokenizer::from_bytes(bytes).map_err(|e| failed!("{e}"))?;
        tokenizer.with_truncation(None).map_err(|e| failed!("{e}"))?.with_padding(None);
        template::check(&tokenizer)?;
        let steps = Steps::of(&tokenizer)?;
        Ok((tokenizer, steps))
    })
}

/// Returns a panic of the library as an error. The message of the panic is not written to the terminal.
fn caught<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    panic_utils::catch_unwind(AssertUnwindSafe(|| Ok(work()))).unwrap_or_else(|panic| {
        let text = panic.to_string();
        let first = text.lines().next().unwrap_or_default();
        let panic = first.strip_prefix("panic: ").unwrap_or(first);
        Err(failed!("the tokenizers library panicked ({panic}); check tokenizer.json"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn special_tokens_are_hidden_and_others_are_not() {
        let mut json = serde_json::to_value(&*Tokenizer::bytes().unwrap().library).unwrap();
        let token = |id: u32, content: &str, special: bool| {
            serde_json::json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": special})
        };
        json["added_tokens"] = serde_json::json!([token(256, "<|end|>", true), token(257, "<think>", false)]);
        let t = Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap();
        assert!(t.hides(&["<think>", "<|end|>"]) && !t.hides(&["<think>", "<|start|>"]) && !t.hides(&[]));
        assert_eq!(t.decode(&[256, 257]).unwrap(), "<think>");
    }

    #[test]
    fn not_a_tokenizer_is_an_error() {
        assert!(Tokenizer::from_bytes(b"{}").is_err());
        assert!(Tokenizer::from_bytes(b"\xff").is_err());
    }

    /// The library panics on this stride, and this padding would take all memory.
    #[test]
    fn truncation_and_padding_of_the_file_are_left_out() {
        let mut json = serde_json::to_value(&*Tokenizer::bytes().unwrap().library).unwrap();
        json["truncation"] = serde_json::json!(
            {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 8}
        );
        json["padding"] = serde_json::json!({"strategy": {"Fixed": 1_000_000_000}, "direction": "Right",
            "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0, "pad_token": "a"});
        let t = Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap();
        let text = "longer than eight tokens";
        assert_eq!(t.decode(&t.encode(text).unwrap()).unwrap(), text);
    }
}
