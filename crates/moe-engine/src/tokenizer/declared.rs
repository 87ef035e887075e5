//! The tokens that a checkpoint declares in other files than tokenizer.json. They are added in the same way as in
//! transformers 5.24.
//!
//! tokenizer_config.json lists them by id (`added_tokens_decoder`), by name (`eos_token`) or as a list
//! (`extra_special_tokens`). If it lists no tokens by id, the older files special_tokens_map.json and added_tokens.json
//! are read, too.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::Path;

use model_runtime::config::read_file;
use serde_json::{Map, Value};
use tokenizers::AddedToken;

use super::steps::Steps;
use crate::error::{Context, Result, bail, ensure, failed};

const CONFIG: &str = "tokenizer_config.json";
const BY_ID: &str = "added_tokens_decoder";
const EXTRA: &str = "extra_special_tokens";
/// The older name of the same key.
const ADDITIONAL: &str = "additional_special_tokens";
/// The names of the special tokens that every tokenizer may have.
const NAMES: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// The declarations of a checkpoint folder.
#[derive(Default)]
pub(super) struct Declared {
    /// The tokens that are declared with an id, and the file that declares them.
    by_id: BTreeMap<u32, AddedToken>,
    source: &'static str,
    /// The special tokens by their name.
    named: Vec<(String, AddedToken)>,
    /// Other special tokens.
    extra: Vec<AddedToken>,
    /// Whether a text begins with the first token, if the configuration says so.
    pub add_bos: Option<bool>,
}

impl Declared {
    /// Reads the declarations in the files of a folder. None of the files has to exist.
    ///
    /// # Errors
    /// A file cannot be read, or contains something else.
    pub fn read(dir: &Path) -> Result<Self> {
        let path = dir.join(CONFIG);
        let name = || path.display().to_string();
        let mut config = object(&path)?;
        if config.get(EXTRA).is_none_or(is_empty)
            && let Some(additional) = config.remove(ADDITIONAL)
        {
            config.insert(EXTRA.to_string(), additional);
        }
        let mut declared = Self { source: CONFIG, ..Self::default() };
        if let Some(by_id) = config.remove(BY_ID) {
            declared.by_id = tokens_by_id(&by_id).with_context(name)?;
            declared.name(&config).with_context(name)?;
        } else {
            declared.source = "added_tokens.json";
            merge(&mut config, object(&dir.join("special_tokens_map.json"))?);
            declared.name(&config).with_context(name)?;
            let older = dir.join(declared.source);
            declared.number(&object(&older)?).with_context(|| older.display().to_string())?;
        }
        if !config.get(EXTRA).is_some_and(Value::is_array) {
            declared.add_extra(config.get(ADDITIONAL)).with_context(name)?;
        }
        declared.add_bos = config.get("add_bos_token").and_then(Value::as_bool);
        Ok(declared)
    }

    /// Collects the tokens that have a name, and the tokens of the list.
    fn name(&mut self, config: &Map<String, Value>) -> Result<()> {
        let standard = NAMES.iter().filter_map(|name| Some((*name, config.get(*name)?)));
        let own = || {
            let all = config.iter().map(|(name, value)| (name.as_str(), value));
            all.filter(|(name, _)| name.ends_with("_token") && !NAMES.contains(name))
        };
        // These are names that the checkpoint defines itself. Objects of other types may be settings of any kind.
        let objects = own().filter(|(_, value)| value["__type"] == "AddedToken");
        let texts = own().filter(|(_, value)| value.is_string());
        for (name, value) in standard.chain(objects).chain(texts) {
            if let Some(token) = token(value) {
                self.named.push((name.to_string(), AddedToken { special: true, ..token }));
            }
        }
        if let Some(Value::Object(named)) = config.get(EXTRA) {
            let token = |(name, value): (&String, &Value)| Some((name.clone(), token(value)?));
            self.named.extend(named.iter().filter_map(token));
        }
        self.add_extra(config.get(EXTRA))
    }

    /// Adds the tokens of a list.
    fn add_extra(&mut self, list: Option<&Value>) -> Result<()> {
        for value in list.and_then(Value::as_array).into_iter().flatten() {
            let token = token(value).with_context(|| format!("{EXTRA}: expected tokens, got {value}"))?;
            self.extra.push(token);
        }
        Ok(())
    }

    /// Adds the tokens of added_tokens.json, which is an object of ids by text.
    fn number(&mut self, ids: &Map<String, Value>) -> Result<()> {
        for (content, id) in ids {
            let id = id.as_u64().and_then(|id| u32::try_from(id).ok());
            let id = id.with_context(|| format!("{content:?}: expected a token id"))?;
            let standard = self.named.iter().filter(|(name, _)| NAMES.contains(&name.as_str()));
            let mut special = standard.map(|(_, token)| token).chain(&self.extra);
            let special = special.any(|token| token.content == *content);
            let token = AddedToken::from(content.as_str(), special);
            if let Some(other) = self.by_id.insert(id, token) {
                bail!("it gives the id {id} to {content:?} and to {:?}", other.content);
            }
        }
        Ok(())
    }

    fn special(&self) -> impl Iterator<Item = &AddedToken> {
        self.named.iter().map(|(_, token)| token).chain(&self.extra)
    }

    /// Returns the text of the token with a name.
    pub fn named(&self, name: &str) -> Option<&str> {
        self.named.iter().find(|(own, _)| own == name).map(|(_, token)| token.content.as_str())
    }

    /// Adds the tokens that a tokenizer does not have.
    ///
    /// # Errors
    /// A token has another id in the tokenizer, or would get another one.
    pub fn add_to(&self, tokenizer: &mut tokenizers::Tokenizer, steps: &Steps) -> Result<()> {
        let known = tokenizer.get_added_tokens_decoder();
        let is_named = |content: &str| self.named.iter().any(|(_, token)| token.content == content);
        let mut tokens: Vec<AddedToken> = Vec::new();
        for (id, token) in &self.by_id {
            let mut token = token.clone();
            token.special |= is_named(&token.content);
            if known.get(id).is_none_or(|known| !same(known, &token)) {
                tokens.push(token);
            }
        }
        for token in self.special() {
            let has = |other: &AddedToken| other.content == token.content;
            if !known.values().any(has) && !tokens.iter().any(has) {
                tokens.push(token.clone());
            }
        }
        for token in tokens.iter().filter(|token| token.normalized) {
            steps.normalized(&token.content).with_context(|| format!("the token {:?}", token.content))?;
        }
        tokenizer.add_tokens(tokens).map_err(|e| failed!("{e}"))?;
        self.by_id.iter().try_for_each(|(&id, token)| self.check_id(id, token, tokenizer))
    }

    fn check_id(&self, id: u32, token: &AddedToken, tokenizer: &tokenizers::Tokenizer) -> Result<()> {
        let source = self.source;
        let content = &token.content;
        match tokenizer.token_to_id(content) {
            Some(own) => ensure!(
                own == id,
                "{source} gives the token {content:?} the id {id}, and with tokenizer.json it has the id {own}: one of \
                 the two files is of another checkpoint; take the token out of {source}, or add it to tokenizer.json"
            ),
            None => bail!("{source}: the token with the id {id} has no text"),
        }
        Ok(())
    }
}

/// Returns whether two tokens are found in texts in the same way.
fn same(a: &AddedToken, b: &AddedToken) -> bool {
    let flags = |t: &AddedToken| (t.single_word, t.lstrip, t.rstrip, t.normalized, t.special);
    a.content == b.content && flags(a) == flags(b)
}

fn is_empty(value: &Value) -> bool {
    value.is_null()
        || value.as_array().is_some_and(Vec::is_empty)
        || value.as_object().is_some_and(Map::is_empty)
}

/// Reads the object of a file. Returns an empty object if there is no such file.
fn object(path: &Path) -> Result<Map<String, Value>> {
    let bytes = match read_file(path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Map::new()),
        Err(e) => return Err(e).with_context(|| format!("cannot read {}", path.display())),
    };
    serde_json::from_slice(&bytes).with_context(|| format!("{}: expected a JSON object", path.display()))
}

/// Merges the two files. Values of the older file replace values of the configuration, and lists are joined.
fn merge(config: &mut Map<String, Value>, older: Map<String, Value>) {
    for (name, value) in older {
        match (config.get_mut(&name), value) {
            (Some(Value::Array(list)), Value::Array(more)) if name == EXTRA => {
                for value in more {
                    if !list.contains(&value) {
                        list.push(value);
                    }
                }
            }
            (_, value) => drop(config.insert(name, value)),
        }
    }
}

fn tokens_by_id(value: &Value) -> Result<BTreeMap<u32, AddedToken>> {
    let tokens = value.as_object().with_context(|| format!("{BY_ID}: expected an object by token id"))?;
    let token = |(id, value): (&String, &Value)| {
        let parsed = id.parse().ok().zip(token(value).filter(|_| value.is_object()));
        parsed.with_context(|| format!("{BY_ID}: expected tokens by id, got {id:?}: {value}"))
    };
    tokens.iter().map(token).collect()
}

/// Reads a token, which is the text of a special token or an object with flags.
fn token(value: &Value) -> Option<AddedToken> {
    if let Some(content) = value.as_str() {
        return (!content.is_empty()).then(|| AddedToken::from(content, true));
    }
    let flag = |name: &str| value.get(name).and_then(Value::as_bool);
    let token = AddedToken::from(value.get("content")?.as_str()?, flag("special").unwrap_or(false));
    Some(AddedToken {
        single_word: flag("single_word").unwrap_or(token.single_word),
        lstrip: flag("lstrip").unwrap_or(token.lstrip),
        rstrip: flag("rstrip").unwrap_or(token.rstrip),
        normalized: flag("normalized").unwrap_or(token.normalized),
        ..token
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::Tokenizer;
    use super::*;

    /// Loads a checkpoint folder with these files and a byte-level tokenizer, whose ids end at 256 with `<|end|>`.
    fn load(files: &[(&str, Value)]) -> Result<Tokenizer> {
        let dir = tempfile::tempdir().unwrap();
        let tokenizer = crate::testing::byte_level(&[], &[("<|end|>", true)]);
        std::fs::write(dir.path().join("tokenizer.json"), tokenizer.library.to_string(false).unwrap())
            .unwrap();
        for (name, json) in files {
            std::fs::write(dir.path().join(name), json.to_string()).unwrap();
        }
        Tokenizer::from_dir(dir.path())
    }

    fn token(content: &str, special: bool) -> Value {
        json!({"content": content, "lstrip": false, "normalized": false, "rstrip": false, "single_word": false,
            "special": special})
    }

    fn one_token(tokenizer: &Tokenizer, text: &str, id: u32, special: bool) {
        assert_eq!(tokenizer.encode(text).unwrap(), [id], "{text}");
        assert_eq!(tokenizer.decode_with(&[id], false).unwrap(), text);
        assert_eq!(tokenizer.decode(&[id]).unwrap(), if special { "" } else { text });
    }

    /// The expected ids come from transformers 5.24.
    #[test]
    fn tokens_of_the_configuration_are_tokens() {
        let mut video = token("<video>", false);
        video["__type"] = json!("AddedToken");
        let config = json!({"eos_token": "<|end|>", "pad_token": "<pad>", "image_token": "<image>", "odd_token": {},
            "video_token": video, "extra_special_tokens": ["<a>", "<think>"], "add_bos_token": false,
            "added_tokens_decoder": {"258": token("</think>", false), "257": token("<think>", false)}});
        let tokenizer = load(&[("tokenizer_config.json", config)]).unwrap();
        one_token(&tokenizer, "<think>", 257, false);
        one_token(&tokenizer, "</think>", 258, false);
        one_token(&tokenizer, "<pad>", 259, true);
        one_token(&tokenizer, "<video>", 260, true);
        one_token(&tokenizer, "<image>", 261, true);
        one_token(&tokenizer, "<a>", 262, true);
        assert_eq!(tokenizer.end_token(), Some(256));
        let named =
            json!({"extra_special_tokens": {"image": "<image>"}, "additional_special_tokens": ["<more>"]});
        let tokenizer = load(&[("tokenizer_config.json", named)]).unwrap();
        one_token(&tokenizer, "<image>", 257, true);
        one_token(&tokenizer, "<more>", 258, true);
        let both = json!({"extra_special_tokens": ["<e>"], "additional_special_tokens": ["<left out>"]});
        let tokenizer = load(&[("tokenizer_config.json", both)]).unwrap();
        one_token(&tokenizer, "<e>", 257, true);
        assert_eq!(tokenizer.token_to_id("<left out>"), None);
        assert_eq!(load(&[]).unwrap().end_token(), None);
    }

    #[test]
    fn older_files_count_where_the_configuration_has_no_ids() {
        let files = [
            ("tokenizer_config.json", json!({"eos_token": "<old>"})),
            (
                "special_tokens_map.json",
                json!({"eos_token": token("<|end|>", true), "additional_special_tokens": ["<b>"]}),
            ),
            ("added_tokens.json", json!({"<think>": 258, "<b>": 257})),
        ];
        let tokenizer = load(&files).unwrap();
        one_token(&tokenizer, "<b>", 257, false);
        one_token(&tokenizer, "<think>", 258, false);
        assert_eq!(tokenizer.end_token(), Some(256));
        let mut files = files;
        files[0].1 = json!({"added_tokens_decoder": {}});
        assert_eq!(load(&files).unwrap().token_to_id("<think>"), None);
    }

    #[test]
    fn ids_that_contradict_each_other_are_an_error() {
        let error = |files: &[(&str, Value)]| format!("{:#}", load(files).err().unwrap());
        let by_id = |id: &str, content: &str| {
            [("tokenizer_config.json", json!({"added_tokens_decoder": {id: token(content, true)}}))]
        };
        for (files, words) in [
            (by_id("300", "<x>"), ["\"<x>\" the id 300", "has the id 257"]),
            (by_id("256", "<x>"), ["\"<x>\" the id 256", "has the id 257"]),
            (by_id("255", "<|end|>"), ["\"<|end|>\" the id 255", "has the id 256"]),
            (by_id("x", "<x>"), ["added_tokens_decoder", "expected tokens by id"]),
            (by_id("257", ""), ["tokenizer_config.json", "has no text"]),
        ] {
            let error = error(&files);
            assert!(words.iter().all(|word| error.contains(word)), "{error}");
        }
        let error = error(&[("added_tokens.json", json!({"<x>": 257, "<y>": 257}))]);
        assert!(error.contains("added_tokens.json") && error.contains("the id 257"), "{error}");
    }
}
