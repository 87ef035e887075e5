//! The bytes that each token stands for in a text.
//!
//! A vocabulary writes tokens as text. It uses either GPT-2's alphabet, with one character for each byte, or pieces in
//! which one character stands for a space and `<0x0A>` for a byte. The decoder of the tokenizer determines which of the
//! two it is.

use std::collections::BTreeSet;

use serde_json::Value;

/// The first id that is too large for tables of tokens.
const MAX_IDS: usize = 0xff_ffff;

/// How a vocabulary writes bytes.
enum Alphabet {
    /// One character stands for each byte.
    Bytes,
    /// The token is text in which this string stands for a space. Single bytes are written as `<0x0A>`.
    Pieces(String),
}

/// The bytes of all tokens, one after the other.
pub struct TokenBytes {
    bytes: Vec<u8>,
    /// The index where the bytes of each id begin. The bytes of id i end where the bytes of i + 1 begin, so there is
    /// one entry more than there are ids.
    starts: Vec<u32>,
    special: BTreeSet<u32>,
    /// The ids, sorted by their bytes.
    sorted: Vec<u32>,
}

impl TokenBytes {
    /// Returns the bytes of a tokenizer's tokens.
    ///
    /// # Errors
    /// The tokenizer's tokens are not bytes of the text, or an id is too large.
    pub(super) fn of(tokenizer: &tokenizers::Tokenizer) -> Result<Self, String> {
        let decoder = tokenizer.get_decoder().map(serde_json::to_value).transpose();
        let decoder = decoder.map_err(|e| format!("the tokenizer's decoder cannot be read: {e}"))?;
        let alphabet = alphabet(&decoder.unwrap_or_default()).ok_or(
            "it needs a tokenizer whose tokens are bytes of the text (byte-level, or with byte fallback), and this \
             one's decoder is of another kind",
        )?;
        let vocab = tokenizer.get_vocab(true);
        let len = vocab.values().map(|&id| id as usize + 1).max().unwrap_or(0);
        if len >= MAX_IDS {
            return Err(format!(
                "the tokenizer has the token id {}, and ids below {MAX_IDS} are taken",
                len - 1
            ));
        }
        let mut words = vec![Vec::new(); len];
        for (token, id) in vocab {
            words[id as usize] = alphabet.bytes(&token);
        }
        let mut special = BTreeSet::new();
        for (id, token) in tokenizer.get_added_tokens_decoder() {
            if let Some(word) = words.get_mut(id as usize) {
                *word = token.content.into_bytes();
                if token.special {
                    special.insert(id);
                }
            }
        }
        Self::joined(&words, special)
    }

    fn joined(words: &[Vec<u8>], special: BTreeSet<u32>) -> Result<Self, String> {
        let bytes = words.concat();
        if u32::try_from(bytes.len()).is_err() {
            return Err(format!("the tokens of the vocabulary are {} bytes together", bytes.len()));
        }
        let ends = words.iter().scan(0, |end, word| {
            *end += word.len() as u32;
            Some(*end)
        });
        let starts = std::iter::once(0).chain(ends).collect();
        let mut sorted: Vec<u32> = (0..words.len() as u32).collect();
        sorted.sort_by_key(|&id| &words[id as usize]);
        Ok(Self { bytes, starts, special, sorted })
    }

    /// Returns the first id that is not in this table.
    pub fn len(&self) -> usize {
        self.starts.len() - 1
    }

    /// Returns whether there is no token.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the bytes of a token. For a special token they are its text. For an id without a token there are none.
    pub fn get(&self, id: u32) -> &[u8] {
        let at = id as usize;
        let end = id as usize + 1;
        match (self.starts.get(at), self.starts.get(end)) {
            (Some(&start), Some(&end)) => &self.bytes[start as usize..end as usize],
            _ => &[],
        }
    }

    /// Returns the ids of the tokens whose bytes begin with these.
    pub fn beginning_with(&self, bytes: &[u8]) -> &[u32] {
        let start = self.sorted.partition_point(|&id| self.get(id) < bytes);
        let len = self.sorted[start..].partition_point(|&id| self.get(id).starts_with(bytes));
        &self.sorted[start..start + len]
    }

    /// Returns whether a token is special. Texts may leave out special tokens.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.contains(&id)
    }

    /// Returns the bytes of all tokens in the order of their ids.
    pub fn iter(&self) -> impl Iterator<Item = &[u8]> {
        (0..self.len() as u32).map(|id| self.get(id))
    }
}

/// Returns the alphabet that a decoder reads.
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
    /// Returns the bytes of a token. A token with a character outside of GPT-2's alphabet is plain text, as in the
    /// decoder.
    fn bytes(&self, token: &str) -> Vec<u8> {
        match self {
            Self::Bytes => {
                token.chars().map(byte_of).collect::<Option<_>>().unwrap_or_else(|| token.as_bytes().to_vec())
            }
            Self::Pieces(space) => {
                let hex = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
                let byte = hex.filter(|hex| hex.len() == 2).and_then(|hex| u8::from_str_radix(hex, 16).ok());
                byte.map_or_else(|| token.replace(space.as_str(), " ").into_bytes(), |byte| vec![byte])
            }
        }
    }
}

/// Returns the byte that a character of GPT-2's alphabet stands for. Bytes that are visible characters of Latin-1 stand
/// for themselves. The others follow in order from U+0100.
fn byte_of(c: char) -> Option<u8> {
    let itself = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    match u8::try_from(c) {
        Ok(byte) => Some(byte).filter(itself),
        Err(_) => (0..=255).filter(|byte| !itself(byte)).nth((c as usize).checked_sub(0x100)?),
    }
}
