//! Limits what a tokenizer.json may contain. The library accepts everything that is well-formed: steps on which it
//! panics, tables that state a wrong size, and lists of any depth.

use serde::Deserialize;
use serde_json::Value;
use tokenizers::NormalizerWrapper;

use super::steps;
use crate::error::{Context, Result, bail, ensure};

/// The largest number of steps of a kind, and the deepest nesting of lists.
const MAX_STEPS: usize = 64;
const MAX_NESTING: usize = 4;
/// The largest number of bytes of all patterns together. The patterns of today's models have a few hundred.
const MAX_PATTERNS: usize = 8 << 10;
/// The largest number of bytes by which a table of characters replaces one character. Unicode needs 33.
const MAX_REPLACEMENT: usize = 64;
/// The largest number of characters of a word that a WordPiece model reads. BERT has 100.
const MAX_WORD: u64 = 1000;
/// The largest factor by which a decoder may make a token longer.
const MAX_DECODED: usize = 64;
/// The largest number of bytes of the added tokens after the normalizers.
const MAX_ADDED: usize = 16 << 20;

/// The parts of a tokenizer.json, except its vocabulary, which may be large.
#[derive(Deserialize)]
pub(super) struct Parts {
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(default)]
    decoder: Value,
    #[serde(default)]
    added_tokens: Vec<Added>,
    #[serde(default)]
    model: Model,
}

#[derive(Deserialize)]
struct Added {
    content: String,
    #[serde(default)]
    normalized: bool,
}

#[derive(Default, Deserialize)]
struct Model {
    max_input_chars_per_word: Option<u64>,
}

impl Parts {
    /// Reads the parts from the contents of a file.
    pub fn read(bytes: &[u8]) -> Result<Self> {
        serde_json::from_slice(bytes).map_err(Into::into)
    }

    /// Refuses parts on which the library would panic, or would run for ever, while it reads the file.
    pub fn check(&self) -> Result<()> {
        let mut patterns = 0;
        for (name, part) in [
            ("normalizer", &self.normalizer),
            ("pre_tokenizer", &self.pre_tokenizer),
            ("post_processor", &self.post_processor),
            ("decoder", &self.decoder),
        ] {
            let mut steps = Vec::new();
            leaves(part, 0, &mut steps).context(name)?;
            ensure!(
                steps.len() <= MAX_STEPS,
                "{name}: it has {} steps, and at most {MAX_STEPS} are taken",
                steps.len()
            );
            steps.iter().try_for_each(|step| check_step(step, &mut patterns)).context(name)?;
            if name == "decoder" {
                check_decoder(&steps).context(name)?;
            }
        }
        if let Some(word) = self.model.max_input_chars_per_word {
            ensure!(
                word <= MAX_WORD,
                "model: max_input_chars_per_word is {word}, and at most {MAX_WORD} is taken"
            );
        }
        self.check_added()
    }

    /// Checks the added tokens. The normalizers change them while the file is read, so no text may become too large
    /// there.
    fn check_added(&self) -> Result<()> {
        if self.normalizer.is_null() {
            return Ok(());
        }
        let normalizer: NormalizerWrapper =
            serde_json::from_value(self.normalizer.clone()).context("normalizer")?;
        let steps = steps::Steps::of_normalizer(&normalizer).context("normalizer")?;
        let mut size = 0;
        for token in self.added_tokens.iter().filter(|token| token.normalized) {
            let normalized = steps.normalized(&token.content);
            size += normalized.with_context(|| format!("added_tokens: the token {:?}", token.content))?;
            ensure!(size <= MAX_ADDED, "added_tokens: they come to more than {MAX_ADDED} bytes");
        }
        Ok(())
    }
}

/// Collects the steps of a part. A step may be a list of other steps.
fn leaves<'a>(part: &'a Value, depth: usize, found: &mut Vec<&'a Value>) -> Result<()> {
    ensure!(depth <= MAX_NESTING, "its lists are nested more than {MAX_NESTING} deep");
    let lists = ["normalizers", "pretokenizers", "processors", "decoders"];
    match lists.iter().find_map(|list| part[*list].as_array()) {
        Some(steps) => steps.iter().try_for_each(|step| leaves(step, depth + 1, found)),
        None => {
            found.push(part);
            Ok(())
        }
    }
}

fn check_step(step: &Value, patterns: &mut usize) -> Result<()> {
    if let Some(table) = step["precompiled_charsmap"].as_str() {
        check_charsmap(table).context("precompiled_charsmap")?;
    }
    if step["type"] == "FixedLength" {
        ensure!(step["length"] != 0, "FixedLength: the length is 0, and pieces have at least 1 character");
    }
    if !step["pattern"].is_object() {
        return Ok(());
    }
    let text = step["pattern"]["Regex"].as_str().or(step["pattern"]["String"].as_str());
    *patterns += text.unwrap_or_default().len();
    ensure!(*patterns <= MAX_PATTERNS, "its patterns are more than {MAX_PATTERNS} bytes");
    // The library compiles the pattern again, without a limit.
    steps::pattern(&step["pattern"]).map(drop)
}

/// Checks a table of characters. It consists of a number of bytes, a trie of this size, and texts that end in zeros.
fn check_charsmap(base64: &str) -> Result<()> {
    let bytes = decode(base64).context("it is not base64")?;
    let Some((size, rest)) = bytes.split_first_chunk() else { bail!("it ends before its first 4 bytes") };
    let size = u32::from_le_bytes(*size) as usize;
    ensure!(size <= rest.len(), "it states a trie of {size} bytes, and {} follow", rest.len());
    let texts = &rest[size / 4 * 4..];
    let longest = texts.split(|&byte| byte == 0).map(<[u8]>::len).max().unwrap_or(0);
    ensure!(
        longest <= MAX_REPLACEMENT,
        "it puts {longest} bytes in the place of a character, and at most {MAX_REPLACEMENT} are taken"
    );
    Ok(())
}

/// Decodes base64 with padding.
fn decode(text: &str) -> Option<Vec<u8>> {
    let value = |c: u8| match c {
        b'A'..=b'Z' => Some(c - b'A'),
        b'a'..=b'z' => Some(c - b'a' + 26),
        b'0'..=b'9' => Some(c - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    let mut bits = 0u32;
    let mut held = 0;
    for c in text.trim_end_matches('=').bytes() {
        bits = bits << 6 | u32::from(value(c)?);
        held += 6;
        if held >= 8 {
            held -= 8;
            bytes.push((bits >> held) as u8);
        }
    }
    Some(bytes)
}

/// Checks a decoder. Tokens become text one by one, and no step may make them much longer.
fn check_decoder(steps: &[&Value]) -> Result<()> {
    let mut growth = 1;
    for step in steps {
        let Some(content) = step["content"].as_str().filter(|_| step["pattern"].is_object()) else {
            continue;
        };
        // An expression may match the empty text between two characters.
        let least = step["pattern"]["String"].as_str().map_or(1, str::len).max(1);
        let more = if step["pattern"]["Regex"].is_string() { 1 } else { 0 };
        growth *= content.len().div_ceil(least).max(1) + more;
        ensure!(growth <= MAX_DECODED, "its replacements make a token more than {MAX_DECODED} times larger");
    }
    Ok(())
}
