//! The metadata of a GGUF file that hold the tokenizer: a byte-level BPE, its special tokens and the chat template.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, bail};
use moe_engine::tokenizer::{Tokenizer, gguf_rule};
use serde_json::Value;

use super::file::Meta;
use crate::source::Source;

/// The kinds of tokens, by their numbers in `tokenizer.ggml.token_type`.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;

/// Special tokens by their names in tokenizer_config.json, and the keys of their ids.
const NAMED: [(&str, &str); 4] = [
    ("bos_token", "tokenizer.ggml.bos_token_id"),
    ("eos_token", "tokenizer.ggml.eos_token_id"),
    ("unk_token", "tokenizer.ggml.unknown_token_id"),
    ("pad_token", "tokenizer.ggml.padding_token_id"),
];
/// Where further tokens that end a text are named.
const FURTHER_ENDS: [&str; 2] = ["tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"];

/// Settings of sampling in generation_config.json and in files.
const SAMPLING: [(&str, &str); 4] = [
    ("temperature", "general.sampling.temp"),
    ("top_k", "general.sampling.top_k"),
    ("top_p", "general.sampling.top_p"),
    ("min_p", "general.sampling.min_p"),
];

/// Returns the metadata of the tokenizer, of the chat template and of sampling.
///
/// # Errors
/// There is no tokenizer, it is no byte-level BPE of a known rule, or its tokens do not fit the embedding.
pub fn tokenizer(source: &Source) -> Result<Vec<(String, Meta)>> {
    let path = source.dir.join("tokenizer.json");
    let label = || path.display().to_string();
    let text = std::fs::read(&path)
        .with_context(|| format!("cannot read {}: a GGUF file holds the tokenizer", path.display()))?;
    let json: Value =
        serde_json::from_slice(&text).with_context(|| format!("{} is not JSON", path.display()))?;
    let rule = gguf_rule(&json).with_context(label)?;
    let tokens = Tokens::read(&json, source.model.decoder().vocab_size).with_context(label)?;
    let settings = optional(&source.dir.join("tokenizer_config.json"))?;
    let generation = optional(&source.dir.join("generation_config.json"))?;
    let mut metadata = vec![
        ("tokenizer.ggml.model".to_string(), Meta::Text("gpt2".to_string())),
        ("tokenizer.ggml.pre".to_string(), Meta::Text(rule.to_string())),
        ("tokenizer.ggml.tokens".to_string(), Meta::Texts(tokens.texts.clone())),
        ("tokenizer.ggml.token_type".to_string(), Meta::I32s(tokens.kinds.clone())),
        ("tokenizer.ggml.merges".to_string(), Meta::Texts(merges(&json).with_context(label)?)),
    ];
    let special = special(source, &settings, &generation, &tokens);
    for (key, id) in &special {
        metadata.push(((*key).to_string(), Meta::U32(*id)));
    }
    let added = Tokenizer::from_dir(&source.dir)?.encode("")?;
    let adds = |key: &str, id: Option<&u32>| id.is_some() && special.get(key) == id;
    let first = adds("tokenizer.ggml.bos_token_id", added.first());
    let last = adds("tokenizer.ggml.eos_token_id", added.last()) && (added.len() > 1 || !first);
    metadata.push(("tokenizer.ggml.add_bos_token".to_string(), Meta::Bool(first)));
    metadata.push(("tokenizer.ggml.add_eos_token".to_string(), Meta::Bool(last)));
    if let Some(template) = template(&source.dir, &settings)? {
        metadata.push(("tokenizer.chat_template".to_string(), Meta::Text(template)));
    }
    metadata.extend(sampling(&generation));
    Ok(metadata)
}

/// Fails if the tokenizer of a file gives other tokens than the one of the source.
///
/// # Errors
/// A text is tokenised in another way, or a tokenizer cannot be read.
pub fn check(source: &Source, file: &Path) -> Result<()> {
    let [wanted, got] = [source.dir.as_path(), file].map(Tokenizer::from_dir);
    let [wanted, got] = [wanted?, got?];
    let json: Value = serde_json::from_slice(&std::fs::read(source.dir.join("tokenizer.json"))?)?;
    let added = json["added_tokens"].as_array().into_iter().flatten();
    let added: Vec<_> = added.filter_map(|token| token["content"].as_str()).collect();
    let all = format!("a{}b", added.join("c"));
    for text in SAMPLES.iter().copied().chain([all.as_str(), ""]) {
        let [wanted, got] = [wanted.encode(text)?, got.encode(text)?];
        if wanted != got {
            bail!(
                "a GGUF file cannot hold this tokenizer: of {text:?} it makes the tokens {wanted:?}, and what the file \
                 would say makes {got:?}"
            )
        }
    }
    Ok(())
}

/// Texts with words, numbers, marks, spaces, line ends, code and several scripts.
const SAMPLES: [&str; 4] = [
    "The router sends 12345 tokens to 8 of 128 experts, doesn't it?  It's DONE.\n\n\tYes!!\r\n  3.14159",
    "fn main() { let x = [1, 2]; log(\"{x:?} //\"); } // $HOME/a_b-c@d.e #1",
    "na\u{ef}ve caf\u{e9} e\u{301}\u{2019}s \u{4e2d}\u{6587}\u{3001}\u{3042}\u{30a2} \u{417}\u{434}\u{440}\u{430}\u{432}",
    "\u{1f600}\u{1f468}\u{200d}\u{1f469} \u{661}\u{662} \u{bd} \u{a0}x   ",
];

/// The tokens of a vocabulary, with tokens that fill it up to the rows of the embedding.
struct Tokens {
    ids: BTreeMap<String, u32>,
    texts: Vec<String>,
    kinds: Vec<i32>,
}

impl Tokens {
    fn read(json: &Value, rows: usize) -> Result<Self> {
        let mut ids = BTreeMap::new();
        let mut texts: Vec<Option<String>> = vec![None; rows];
        let mut kinds = vec![UNUSED; rows];
        let vocabulary =
            json["model"]["vocab"].as_object().context("`model.vocab`: expected tokens with ids")?;
        let usual = vocabulary.iter().map(|(text, id)| (text.as_str(), id, NORMAL));
        let added = json["added_tokens"].as_array().into_iter().flatten().map(|token| {
            let kind = if token["special"] == true { CONTROL } else { USER_DEFINED };
            (token["content"].as_str().unwrap_or_default(), &token["id"], kind)
        });
        for (text, id, kind) in usual.chain(added) {
            let at = id.as_u64().and_then(|id| usize::try_from(id).ok()).filter(|id| *id < rows);
            let at = at.with_context(|| {
                format!("token {text:?}: expected an id below {rows}, the rows of the embedding, got {id}")
            })?;
            if let Some(other) = texts[at].replace(text.to_string()).filter(|other| other != text) {
                bail!("the tokens {other:?} and {text:?} have the same id {at}")
            }
            kinds[at] = kind;
            ids.insert(text.to_string(), at as u32);
        }
        let filled = texts.into_iter().enumerate();
        let texts = filled.map(|(id, text)| text.unwrap_or_else(|| format!("[PAD{id}]"))).collect();
        Ok(Self { ids, texts, kinds })
    }
}

/// Returns the merges, each as two tokens with a space between them.
fn merges(json: &Value) -> Result<Vec<String>> {
    let merges = json["model"]["merges"].as_array().context("`model.merges`: expected a list")?;
    let text = |merge: &Value| match merge {
        Value::String(text) => Some(text.clone()),
        pair => Some(format!("{} {}", pair[0].as_str()?, pair[1].as_str()?)),
    };
    let texts = merges.iter().map(|merge| {
        text(merge).with_context(|| format!("`model.merges`: expected two tokens, got {merge}"))
    });
    texts.collect()
}

/// Returns the ids of special tokens by their keys.
fn special(
    source: &Source,
    settings: &Value,
    generation: &Value,
    tokens: &Tokens,
) -> BTreeMap<&'static str, u32> {
    let mut special = BTreeMap::new();
    for (name, key) in NAMED {
        let token = settings[name].as_str().or(settings[name]["content"].as_str());
        if let Some(id) = token.and_then(|token| tokens.ids.get(token)) {
            special.insert(key, *id);
        }
    }
    let ends = [&generation["eos_token_id"], &source.config["eos_token_id"]];
    let ends = ends.into_iter().find(|ends| !ends.is_null()).cloned().unwrap_or_default();
    let ends = match ends {
        Value::Array(ends) => ends,
        one => vec![one],
    };
    let mut keys = vec![NAMED[1].1];
    keys.extend(FURTHER_ENDS);
    for id in ends.iter().filter_map(|id| u32::try_from(id.as_u64()?).ok()) {
        let is_known = keys.iter().any(|key| special.get(key) == Some(&id));
        if let Some(key) = keys.iter().find(|key| !is_known && !special.contains_key(**key)) {
            special.insert(*key, id);
        }
    }
    special
}

/// Returns the chat template: a file of its own, or the one in tokenizer_config.json that is called `default`.
fn template(dir: &Path, settings: &Value) -> Result<Option<String>> {
    let file = dir.join("chat_template.jinja");
    if file.is_file() {
        let text =
            std::fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        return Ok(Some(text));
    }
    let templates = &settings["chat_template"];
    let named = templates.as_array().into_iter().flatten().find(|template| template["name"] == "default");
    let text = templates.as_str().or_else(|| named?["template"].as_str());
    Ok(text.map(str::to_string))
}

fn sampling(generation: &Value) -> Vec<(String, Meta)> {
    if generation["do_sample"] == false {
        return Vec::new();
    }
    let value = |key: &str| {
        let value = &generation[key];
        let whole = value.as_u64().filter(|_| key == "top_k").and_then(|x| i32::try_from(x).ok());
        whole.map(|x| Meta::U32(x.cast_unsigned())).or_else(|| Some(Meta::F32(value.as_f64()? as f32)))
    };
    SAMPLING.iter().filter_map(|(key, to)| Some(((*to).to_string(), value(key)?))).collect()
}

/// Reads a JSON file that need not exist.
fn optional(path: &Path) -> Result<Value> {
    if !path.is_file() {
        return Ok(Value::Null);
    }
    let text = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    serde_json::from_slice(&text).with_context(|| format!("{} is not JSON", path.display()))
}
