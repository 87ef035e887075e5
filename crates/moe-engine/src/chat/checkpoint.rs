//! Reads the chat templates and special tokens of a checkpoint. The priorities are those that transformers has:
//! `chat_template.jinja` and `additional_chat_templates/*.jinja` replace the `chat_template` of
//! `tokenizer_config.json`.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::Path;

use model_runtime::checkpoint::Gguf;
use model_runtime::config::read_file;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::error::ChatError;
use crate::tokenizer::gguf::named;

/// The file that holds a tokenizer's settings.
const CONFIG: &str = "tokenizer_config.json";

/// The names of the special tokens that every tokenizer may have.
const STANDARD_TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// The keys of special tokens in GGUF files, and the names that templates use for them.
const GGUF_TOKENS: [(&str, &str); 5] = [
    ("bos_token", "bos"),
    ("eos_token", "eos"),
    ("unk_token", "unknown"),
    ("sep_token", "seperator"),
    ("pad_token", "padding"),
];

/// The chat templates and special tokens of a checkpoint.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ChatFiles {
    /// The templates by name. A single template is called `default`.
    pub templates: BTreeMap<String, String>,
    /// The special tokens by the names of their variables.
    pub special_tokens: Map<String, Value>,
}

impl ChatFiles {
    /// Reads the templates and special tokens of a GGUF file or of a checkpoint folder. None of the files of the folder
    /// has to exist.
    pub fn from_dir(dir: &Path) -> Result<Self, ChatError> {
        read(dir)
    }

    /// Reads one template from a separate file, and the special tokens of a checkpoint folder.
    pub fn from_file(file: &Path, dir: Option<&Path>) -> Result<Self, ChatError> {
        let template = template_file(file)?.ok_or_else(|| fault(file, "no such file"))?;
        Self::from_template(template, dir)
    }

    /// Uses this template with the special tokens of a checkpoint folder.
    pub fn from_template(template: String, dir: Option<&Path>) -> Result<Self, ChatError> {
        let special_tokens = dir.map(read).transpose()?.map(|files| files.special_tokens).unwrap_or_default();
        Ok(Self { templates: BTreeMap::from([("default".to_string(), template)]), special_tokens })
    }

    /// Reads the templates and special tokens from the contents of a `tokenizer_config.json`.
    pub fn from_tokenizer_config(json: &[u8]) -> Result<Self, ChatError> {
        let path = Path::new(CONFIG);
        from_config(path, &object(path, json)?)
    }
}

fn read(dir: &Path) -> Result<ChatFiles, ChatError> {
    if let Some(file) = Gguf::find(dir).map_err(|e| fault(dir, e.to_string()))? {
        return of_gguf(&file).map_err(|e| fault(&file, format!("{e:#}")));
    }
    let path = dir.join(CONFIG);
    let mut config = object(&path, bytes(&path)?.as_deref().unwrap_or(b"{}"))?;
    let map = dir.join("special_tokens_map.json");
    // Older versions of transformers write this file. Newer ones write all of it into the configuration.
    if !config.contains_key("added_tokens_decoder")
        && let Some(bytes) = bytes(&map)?
    {
        config.extend(object(&map, &bytes)?);
    }
    let mut files = from_config(&path, &config)?;
    let own = template_files(dir)?;
    if !own.is_empty() {
        files.templates = own;
    }
    Ok(files)
}

/// Reads the templates and the named tokens from the metadata of a GGUF file. The keys of templates are
/// `tokenizer.chat_template` and `tokenizer.chat_template.NAME`.
fn of_gguf(file: &Path) -> crate::error::Result<ChatFiles> {
    const TEMPLATE: &str = "tokenizer.chat_template";
    let gguf = Gguf::open(file)?;
    let mut files = ChatFiles::default();
    let others = gguf.texts("tokenizer.chat_templates")?.unwrap_or_default();
    for name in std::iter::once("default").chain(others) {
        let key = if name == "default" { TEMPLATE.to_string() } else { format!("{TEMPLATE}.{name}") };
        let template = gguf.text(&key)?.map(str::to_string);
        files.templates.extend(template.map(|template| (name.to_string(), template)));
    }
    let tokens = gguf.texts("tokenizer.ggml.tokens")?.unwrap_or_default();
    for (name, key) in GGUF_TOKENS {
        let token = named(&gguf, &tokens, &format!("tokenizer.ggml.{key}_token_id"))?;
        files.special_tokens.extend(token.map(|token| (name.to_string(), token.into())));
    }
    Ok(files)
}

fn from_config(path: &Path, config: &Map<String, Value>) -> Result<ChatFiles, ChatError> {
    Ok(ChatFiles {
        templates: config_templates(path, config)?,
        special_tokens: special_tokens(path, config)?,
    })
}

fn fault(path: &Path, reason: impl Into<String>) -> ChatError {
    ChatError::File { path: path.to_path_buf(), reason: reason.into() }
}

/// Returns the contents of a file, or `None` if there is no such file.
fn bytes(path: &Path) -> Result<Option<Vec<u8>>, ChatError> {
    match read_file(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        Err(e) => Err(fault(path, format!("cannot be read: {e}"))),
    }
}

fn object(path: &Path, json: &[u8]) -> Result<Map<String, Value>, ChatError> {
    match serde_json::from_slice(json) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err(fault(path, "expected a JSON object")),
        Err(e) => Err(fault(path, format!("not JSON: {e}"))),
    }
}

fn template_file(path: &Path) -> Result<Option<String>, ChatError> {
    let Some(bytes) = bytes(path)? else { return Ok(None) };
    String::from_utf8(bytes).map(Some).map_err(|e| fault(path, format!("not UTF-8: {}", e.utf8_error())))
}

fn template_files(dir: &Path) -> Result<BTreeMap<String, String>, ChatError> {
    let mut templates = BTreeMap::new();
    if let Some(template) = template_file(&dir.join("chat_template.jinja"))? {
        templates.insert("default".to_string(), template);
    }
    let folder = dir.join("additional_chat_templates");
    let unreadable = |e: std::io::Error| fault(&folder, format!("cannot be read: {e}"));
    let entries = match std::fs::read_dir(&folder) {
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(templates),
        entries => entries.map_err(unreadable)?,
    };
    for entry in entries {
        let path = entry.map_err(unreadable)?.path();
        let name = path.file_name().and_then(|name| name.to_str()?.strip_suffix(".jinja"));
        if let Some(name) = name
            && let Some(template) = template_file(&path)?
        {
            templates.insert(name.to_string(), template);
        }
    }
    Ok(templates)
}

/// Reads the `chat_template` of a configuration, which is a text, a list of `{name, template}`, or an object of texts.
fn config_templates(path: &Path, config: &Map<String, Value>) -> Result<BTreeMap<String, String>, ChatError> {
    let templates: Option<BTreeMap<_, _>> = match config.get("chat_template") {
        None | Some(Value::Null) => Some(BTreeMap::new()),
        Some(Value::String(text)) => Some(BTreeMap::from([("default".to_string(), text.clone())])),
        Some(Value::Array(list)) => {
            list.iter().map(|entry| Some((text(entry, "name")?, text(entry, "template")?))).collect()
        }
        Some(named @ Value::Object(map)) => {
            map.keys().map(|name| Some((name.clone(), text(named, name)?))).collect()
        }
        Some(_) => None,
    };
    let expected = "chat_template must be a text, a list of {\"name\", \"template\"}, or an object of texts";
    templates.ok_or_else(|| fault(path, expected))
}

fn text(object: &Value, key: &str) -> Option<String> {
    Some(object.get(key)?.as_str()?.to_string())
}

/// Returns the variables of special tokens for a template: the standard ones, and the tokens for which the checkpoint
/// defines names of its own.
fn special_tokens(path: &Path, config: &Map<String, Value>) -> Result<Map<String, Value>, ChatError> {
    let extra = config.get("extra_special_tokens").and_then(Value::as_object);
    let mut tokens = Map::new();
    for (name, value) in config.iter().chain(extra.into_iter().flatten()) {
        let standard = STANDARD_TOKENS.contains(&name.as_str());
        if !standard && !name.ends_with("_token") {
            continue;
        }
        // A token is a text or an `AddedToken`. The names of other settings may also end in `_token` (`add_bos_token`).
        match value.as_str().or_else(|| value.get("content")?.as_str()) {
            Some(token) => drop(tokens.insert(name.clone(), token.into())),
            None if standard && !value.is_null() => {
                return Err(fault(path, format!("{name} must be a text or an object with `content`")));
            }
            None => {}
        }
    }
    Ok(tokens)
}
