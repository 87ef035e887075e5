//! Converts the tokenizer in the metadata of a GGUF file to an equivalent `tokenizer.json`.
//!
//! A model with a byte-level BPE (`gpt2`) has in its file the vocabulary, the merges, and the name of the rule that
//! splits a text into words. A SentencePiece model (`llama`) has a score for each token. The rank of a merge is the
//! rank of the score of its result, as in the conversion of such models in transformers.

use std::collections::{HashMap, HashSet};

use model_runtime::checkpoint::Gguf;
use serde_json::{Map, Value, json};

use super::gguf_words::Words;
use crate::error::{Context, Result, bail, ensure};

const MODEL: &str = "tokenizer.ggml.model";
/// Bytes of a token of a SentencePiece model, at most, since every cut of it is looked up. SentencePiece itself makes
/// tokens of up to 16 letters, and models add runs of spaces or lines.
const LONGEST_PIECE: usize = 1024;
/// The letter that SentencePiece writes for a space.
const SPACE: &str = "\u{2581}";

/// The kinds of tokens, by their numbers in `tokenizer.ggml.token_type`.
const UNKNOWN: i64 = 2;
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;
const UNUSED: i64 = 5;

/// The part of the metadata that is used here.
struct Vocabulary<'a> {
    tokens: Vec<&'a str>,
    kinds: Vec<i64>,
}

/// Returns the contents of a `tokenizer.json`, and the token that ends a text.
///
/// # Errors
/// The metadata are incomplete or contradict each other, or the kind of tokenizer or the rule for words is unknown.
pub(super) fn read(gguf: &Gguf) -> Result<(Value, Option<u32>)> {
    let tokens =
        gguf.texts("tokenizer.ggml.tokens")?.context("it has no tokenizer (`tokenizer.ggml.tokens`)")?;
    let kinds = gguf.integers("tokenizer.ggml.token_type")?.unwrap_or_else(|| vec![1; tokens.len()]);
    ensure!(
        kinds.len() == tokens.len(),
        "`tokenizer.ggml.token_type`: expected {} kinds, one for each token, got {}",
        tokens.len(),
        kinds.len()
    );
    let vocabulary = Vocabulary { tokens, kinds };
    let mut tokenizer = match gguf.text(MODEL)? {
        Some("gpt2") => byte_level(gguf, &vocabulary)?,
        Some("llama") => sentence_piece(gguf, &vocabulary)?,
        other => bail!("`{MODEL}`: expected gpt2 or llama, got {:?}", other.unwrap_or_default()),
    };
    tokenizer.insert("version".into(), "1.0".into());
    tokenizer.insert("truncation".into(), Value::Null);
    tokenizer.insert("padding".into(), Value::Null);
    tokenizer.insert("added_tokens".into(), vocabulary.added());
    let end = gguf.unsigned("tokenizer.ggml.eos_token_id")?.and_then(|id| u32::try_from(id).ok());
    Ok((Value::Object(tokenizer), end))
}

/// Returns the text of the token that a key names, if the file has the key.
///
/// # Errors
/// No token has the id.
pub(crate) fn named<'g>(gguf: &'g Gguf, tokens: &[&'g str], key: &str) -> Result<Option<&'g str>> {
    let Some(id) = gguf.unsigned(key)? else { return Ok(None) };
    let token = usize::try_from(id).ok().and_then(|id| tokens.get(id));
    let token = token
        .with_context(|| format!("`{key}`: expected the id of one of {} tokens, got {id}", tokens.len()))?;
    Ok(Some(token))
}

impl Vocabulary<'_> {
    /// Returns the ids by token, without the tokens that only fill up the vocabulary.
    fn ids(&self) -> Result<Map<String, Value>> {
        let mut ids = Map::new();
        for (id, (token, kind)) in self.tokens.iter().zip(&self.kinds).enumerate() {
            if *kind == UNUSED {
                continue;
            }
            if let Some(first) = ids.insert((*token).to_string(), id.into()) {
                bail!("the tokens {first} and {id} have the same text {token:?}");
            }
        }
        Ok(ids)
    }

    /// Returns the tokens that are found in a text before the text is split.
    fn added(&self) -> Value {
        let is_added = |kind: i64| kind == CONTROL || kind == USER_DEFINED;
        let tokens =
            self.tokens.iter().zip(&self.kinds).enumerate().filter(|(_, (_, kind))| is_added(**kind));
        let added = tokens.map(|(id, (token, kind))| {
            json!({"id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": *kind == CONTROL})
        });
        Value::Array(added.collect())
    }
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(object) => object,
        _ => Map::new(),
    }
}

fn byte_level(gguf: &Gguf, vocabulary: &Vocabulary) -> Result<Map<String, Value>> {
    let name = gguf.text("tokenizer.ggml.pre")?.unwrap_or("default");
    let words = Words::find(name)?;
    let merges = gguf.texts("tokenizer.ggml.merges")?.context("it has no `tokenizer.ggml.merges`")?;
    // A letter of the byte alphabet is never a space. So the first space after the first letter separates the two
    // sides.
    let pair = |merge: &str| {
        let at = merge.char_indices().skip(1).find(|(_, letter)| *letter == ' ').map(|(at, _)| at);
        let at =
            at.with_context(|| format!("`tokenizer.ggml.merges`: expected two tokens, got {merge:?}"))?;
        Ok(json!([merge[..at], merge[at + 1..]]))
    };
    let merges = merges.into_iter().map(pair).collect::<Result<Vec<_>>>()?;
    let mut steps: Vec<Value> = words.patterns.iter().map(|pattern| {
        json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false})
    }).collect();
    let bytes =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
    steps.push(bytes.clone());
    let adds_first = gguf.flag("tokenizer.ggml.add_bos_token")?.unwrap_or(words.adds_first);
    Ok(object(json!({
        "normalizer": words.composes.then(|| json!({"type": "NFC"})),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": first_token(gguf, vocabulary, adds_first)?,
        "decoder": bytes,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "ignore_merges": words.ignores_merges, "vocab": vocabulary.ids()?, "merges": merges},
    })))
}

/// Returns the post-processor that puts the first token before a text and the end token after it, if the file asks for
/// them.
fn first_token(gguf: &Gguf, vocabulary: &Vocabulary, adds_first: bool) -> Result<Value> {
    let adds_last = gguf.flag("tokenizer.ggml.add_eos_token")?.unwrap_or(false);
    let token = |adds: bool, key: &str| match adds {
        true => named(gguf, &vocabulary.tokens, key),
        false => Ok(None),
    };
    let first = token(adds_first, "tokenizer.ggml.bos_token_id")?;
    let last = token(adds_last, "tokenizer.ggml.eos_token_id")?;
    if first.is_none() && last.is_none() {
        return Ok(Value::Null);
    }
    let sequence = |id: &str| json!({"Sequence": {"id": id, "type_id": 0}});
    let special = |token: &str| json!({"SpecialToken": {"id": token, "type_id": 0}});
    let around = |inner: Vec<Value>| {
        first.map(special).into_iter().chain(inner).chain(last.map(special)).collect::<Vec<_>>()
    };
    let id = |token: &str| vocabulary.tokens.iter().position(|other| *other == token);
    let named = first.into_iter().chain(last);
    let tokens: Map<String, Value> = named
        .map(|token| (token.to_string(), json!({"id": token, "ids": [id(token)], "tokens": [token]})))
        .collect();
    Ok(json!({"type": "TemplateProcessing", "single": around(vec![sequence("A")]),
        "pair": around(vec![sequence("A"), sequence("B")]), "special_tokens": tokens}))
}

fn sentence_piece(gguf: &Gguf, vocabulary: &Vocabulary) -> Result<Map<String, Value>> {
    let Vocabulary { tokens, kinds } = vocabulary;
    let scores = gguf.floats("tokenizer.ggml.scores")?.context("it has no `tokenizer.ggml.scores`")?;
    ensure!(
        scores.len() == tokens.len(),
        "`tokenizer.ggml.scores`: expected {} scores, one for each token, got {}",
        tokens.len(),
        scores.len()
    );
    let unknown = named(gguf, tokens, "tokenizer.ggml.unknown_token_id")?;
    let unknown =
        unknown.or_else(|| tokens.iter().zip(kinds).find(|(_, kind)| **kind == UNKNOWN).map(|(t, _)| *t));
    let prepends = gguf.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
    let adds_first = gguf.flag("tokenizer.ggml.add_bos_token")?.unwrap_or(true);
    let spaces = json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE});
    let normalizers: Vec<Value> =
        prepends.then(|| json!({"type": "Prepend", "prepend": SPACE})).into_iter().chain([spaces]).collect();
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if prepends {
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    Ok(object(json!({
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": null,
        "post_processor": first_token(gguf, vocabulary, adds_first)?,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {"type": "BPE", "dropout": null, "unk_token": unknown, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
            "vocab": vocabulary.ids()?, "merges": merges(vocabulary, &scores)?},
    })))
}

/// Returns every pair of tokens that form a token together. The pairs with the best scores come first.
///
/// # Errors
/// A token is too long to be a piece of words.
fn merges(Vocabulary { tokens, kinds }: &Vocabulary, scores: &[f64]) -> Result<Vec<Value>> {
    let is_text = |kind: i64| !matches!(kind, UNKNOWN | CONTROL | UNUSED);
    let texts: Vec<usize> = (0..tokens.len()).filter(|id| is_text(kinds[*id])).collect();
    let known: HashMap<&str, usize> = texts.iter().map(|id| (tokens[*id], *id)).collect();
    let mut merges = Vec::new();
    for id in texts {
        let token = tokens[id];
        ensure!(
            token.len() <= LONGEST_PIECE,
            "`tokenizer.ggml.tokens`: expected pieces of at most {LONGEST_PIECE} bytes, got one of {} (token {id})",
            token.len()
        );
        let mut seen = HashSet::new();
        for (at, _) in token.char_indices().skip(1) {
            let sides = known.get(&token[..at]).zip(known.get(&token[at..]));
            if let Some((left, right)) = sides.filter(|(left, right)| seen.insert((**left, **right))) {
                merges.push((scores[id], *left, *right));
            }
        }
    }
    merges.sort_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
    Ok(merges.into_iter().map(|(_, left, right)| json!([tokens[left], tokens[right]])).collect())
}
