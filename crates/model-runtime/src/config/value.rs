//! The typed view of a config's JSON object.

use std::path::Path;
use std::sync::Arc;

use candle_core::DType;
use moe_quant::QuantConfig;
use serde_json::{Map, Value};

use super::error::ConfigError;
use super::file::read_file;
use super::limits::Bounds;

/// Files in which a folder may have the header of a quantised checkpoint, if config.json has none: of older GPTQ
/// checkpoints and of ModelOpt's.
const QUANTISATION_FILES: [&str; 2] = ["quantize_config.json", "hf_quant_config.json"];

/// A JSON object with the name of its file, read through typed getters. Cloning is cheap.
///
/// A key that is absent and a key that is `null` are the same. Every getter takes aliases: the first name that is
/// present counts, and other aliases that are present must have the same value.
///
/// ```
/// use model_runtime::config::{Config, limits};
/// let config = Config::parse(r#"{"num_local_experts": 8, "rope_theta": 1e6}"#, "config.json")?;
/// assert_eq!(config.size(&["num_experts", "num_local_experts"], limits::EXPERTS)?, 8);
/// assert_eq!(config.float_or(&["rope_theta"], 1e4)?, 1e6);
/// let e = config.size(&["hidden_size"], limits::WIDTH).unwrap_err().to_string();
/// assert!(e.contains("config.json: `hidden_size` is missing"));
/// # Ok::<(), model_runtime::config::ConfigError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Config {
    file: Arc<str>,
    /// Path of this object inside the file, ending in a dot, or empty at the root.
    prefix: String,
    object: Arc<Map<String, Value>>,
    /// Whether the object was made from the metadata of a GGUF file.
    of_gguf: bool,
}

impl Config {
    /// Reads a JSON file that holds an object. If the config of a model with several parts describes its text part
    /// under `text_config` and not at the root, the keys of the text part are read as if they were at the root. From
    /// the root come only the keys that concern the whole, as in transformers: what kind of model it is, whether the
    /// projection to the vocabulary is tied, and where the text part does not say them, quantisation, dtype and the ids
    /// of special tokens.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let file = path.display().to_string();
        let bytes = read_file(path).map_err(|e| ConfigError::File(format!("cannot read {file}: {e}")))?;
        Self::from_json(serde_json::from_slice(&bytes), file)
    }

    /// Parses a JSON object; `file` names it in messages.
    pub fn parse(text: &str, file: &str) -> Result<Self, ConfigError> {
        Self::from_json(serde_json::from_str(text), file.to_string())
    }

    /// A config that the metadata of a GGUF file describe; `file` names it in messages.
    pub(crate) fn of_gguf(object: Map<String, Value>, file: &str) -> Self {
        Self { file: file.into(), prefix: String::new(), object: Arc::new(object), of_gguf: true }
    }

    fn from_json(parsed: serde_json::Result<Value>, file: String) -> Result<Self, ConfigError> {
        match parsed {
            Ok(Value::Object(object)) => {
                let object = Arc::new(with_text_keys(object));
                Ok(Self { file: file.into(), prefix: String::new(), object, of_gguf: false })
            }
            Ok(other) => {
                let got = shorten(other.to_string());
                Err(ConfigError::File(format!("{file}: expected a JSON object, got {got}")))
            }
            Err(e) => Err(ConfigError::File(format!("{file}: not valid JSON: {e}"))),
        }
    }

    /// This config with another value of a key.
    pub fn with(&self, key: &str, value: impl Into<Value>) -> Self {
        let mut object = Map::clone(&self.object);
        object.insert(key.to_string(), value.into());
        Self { object: Arc::new(object), ..self.clone() }
    }

    /// The raw object, for keys that no getter covers.
    pub fn object(&self) -> &Map<String, Value> {
        &self.object
    }

    /// Whether a key is present and not null.
    pub fn has(&self, key: &str) -> bool {
        self.object.get(key).is_some_and(|v| !v.is_null())
    }

    /// A nested object, if present.
    pub fn section(&self, keys: &[&str]) -> Result<Option<Config>, ConfigError> {
        let Some((key, value)) = self.find(keys)? else { return Ok(None) };
        let Value::Object(object) = value else { return Err(self.invalid(key, "an object", value)) };
        let prefix = format!("{}{key}.", self.prefix);
        Ok(Some(Self { prefix, object: Arc::new(object.clone()), ..self.clone() }))
    }

    /// A size; absent is an error.
    pub fn size(&self, keys: &[&str], bounds: Bounds) -> Result<usize, ConfigError> {
        self.opt_size(keys, bounds.clone())?.ok_or_else(|| self.missing(keys, describe(&bounds)))
    }

    /// A size with a default.
    pub fn size_or(&self, keys: &[&str], default: usize, bounds: Bounds) -> Result<usize, ConfigError> {
        Ok(self.opt_size(keys, bounds)?.unwrap_or(default))
    }

    /// A size, if present. Floats without a fraction are accepted.
    pub fn opt_size(&self, keys: &[&str], bounds: Bounds) -> Result<Option<usize>, ConfigError> {
        self.get(keys, &describe(&bounds), |value| as_size(value, &bounds))
    }

    /// A finite number; absent is an error.
    pub fn float(&self, keys: &[&str]) -> Result<f64, ConfigError> {
        self.opt_float(keys)?.ok_or_else(|| self.missing(keys, "a number".into()))
    }

    /// A finite number with a default.
    pub fn float_or(&self, keys: &[&str], default: f64) -> Result<f64, ConfigError> {
        Ok(self.opt_float(keys)?.unwrap_or(default))
    }

    /// A finite number, if present.
    pub fn opt_float(&self, keys: &[&str]) -> Result<Option<f64>, ConfigError> {
        self.get(keys, "a finite number", |value| value.as_f64().filter(|x| x.is_finite()))
    }

    /// A number above zero; absent means the default.
    pub fn positive_float_or(&self, keys: &[&str], default: f64) -> Result<f64, ConfigError> {
        let positive = |value: &Value| value.as_f64().filter(|x| x.is_finite() && *x > 0.0);
        Ok(self.get(keys, "a finite number above 0", positive)?.unwrap_or(default))
    }

    /// A boolean with a default.
    pub fn bool_or(&self, keys: &[&str], default: bool) -> Result<bool, ConfigError> {
        Ok(self.get(keys, "true or false", Value::as_bool)?.unwrap_or(default))
    }

    /// Whether this config is of a GGUF file and has a key that is true there. Such keys say in which order the files
    /// of a family hold their values. A config.json has no such key, and one of that name is not read.
    ///
    /// # Errors
    /// A value of another type.
    pub fn is_in_gguf(&self, key: &str) -> Result<bool, ConfigError> {
        Ok(self.of_gguf && self.bool_or(&[key], false)?)
    }

    /// A string; absent is an error.
    pub fn string(&self, keys: &[&str]) -> Result<&str, ConfigError> {
        self.opt_string(keys)?.ok_or_else(|| self.missing(keys, "a string".into()))
    }

    /// A string, if present.
    pub fn opt_string(&self, keys: &[&str]) -> Result<Option<&str>, ConfigError> {
        self.get(keys, "a string", Value::as_str)
    }

    /// A list of strings; absent is an empty list.
    pub fn strings(&self, keys: &[&str]) -> Result<Vec<&str>, ConfigError> {
        let strings = |value| Value::as_array(value)?.iter().map(Value::as_str).collect();
        Ok(self.get(keys, "a list of strings", strings)?.unwrap_or_default())
    }

    /// A list of sizes; absent is an empty list.
    pub fn sizes(&self, keys: &[&str], bounds: Bounds) -> Result<Vec<usize>, ConfigError> {
        let sizes = |value: &Value| value.as_array()?.iter().map(|size| as_size(size, &bounds)).collect();
        Ok(self.get(keys, &format!("a list, each {}", describe(&bounds)), sizes)?.unwrap_or_default())
    }

    /// Token ids given as one integer or a list of them, if present.
    pub fn token_ids(&self, keys: &[&str]) -> Result<Option<Vec<u32>>, ConfigError> {
        let id = |v: &Value| v.as_u64().and_then(|id| u32::try_from(id).ok());
        self.get(keys, "a token id or a list of them", |value| match value {
            Value::Array(list) => list.iter().map(id).collect(),
            one => Some(vec![id(one)?]),
        })
    }

    /// The dtype under `dtype` or `torch_dtype`, if present: f32, bf16 or f16.
    pub fn dtype(&self) -> Result<Option<DType>, ConfigError> {
        let Some((key, value)) = self.find(&["dtype", "torch_dtype"])? else { return Ok(None) };
        match value.as_str().map(|s| s.strip_prefix("torch.").unwrap_or(s)) {
            Some("float32") => Ok(Some(DType::F32)),
            Some("bfloat16") => Ok(Some(DType::BF16)),
            Some("float16") => Ok(Some(DType::F16)),
            Some("auto") => Ok(None),
            _ => Err(self.invalid(key, "\"float32\", \"bfloat16\" or \"float16\"", value)),
        }
    }

    /// How the checkpoint is quantised: the header in this config.json; `None` if it has none.
    ///
    /// # Errors
    /// A method or option that is not read; a header that contradicts itself.
    pub fn quantisation(&self) -> Result<Option<QuantConfig>, ConfigError> {
        QuantConfig::from_json(&Value::Object((*self.object).clone())).map_err(|e| self.error(e))
    }

    /// How the checkpoint in a folder is quantised. Some makers write the header to a file of its own,
    /// `quantize_config.json` or `hf_quant_config.json`.
    ///
    /// # Errors
    /// The errors of [`quantisation`](Self::quantisation); a file that cannot be read.
    pub fn quantisation_in(&self, dir: &Path) -> Result<Option<QuantConfig>, ConfigError> {
        let header = self.quantisation()?;
        let separate = QUANTISATION_FILES.map(|name| (name, dir.join(name)));
        let found = separate.iter().find(|(_, path)| path.is_file());
        let (None, Some((name, path))) = (&header, found) else { return Ok(header) };
        let file = Config::read(path)?;
        let root = name.trim_end_matches(".json");
        let header = QuantConfig::from_header(root, &Value::Object((*file.object).clone()));
        header.map(Some).map_err(|e| file.error(e))
    }

    /// An error about a value of this config; `expected` completes "expected ...".
    pub fn invalid(&self, key: &str, expected: &str, got: impl std::fmt::Display) -> ConfigError {
        ConfigError::Value {
            file: self.file.to_string(),
            key: format!("{}{key}", self.prefix),
            expected: expected.to_string(),
            got: shorten(got.to_string()),
        }
    }

    /// An error about a feature that the program lacks; `advice` follows the sentence.
    pub fn unsupported(&self, what: impl std::fmt::Display, advice: &str) -> ConfigError {
        ConfigError::Unsupported {
            file: self.file.to_string(),
            what: what.to_string(),
            advice: advice.to_string(),
        }
    }

    pub(super) fn error(&self, problem: impl std::fmt::Display) -> ConfigError {
        ConfigError::Refused { file: self.file.to_string(), problem: problem.to_string() }
    }

    fn missing(&self, keys: &[&str], expected: String) -> ConfigError {
        let names: Vec<String> = keys.iter().map(|k| format!("{}{k}", self.prefix)).collect();
        ConfigError::Missing { file: self.file.to_string(), keys: names.join("` or `"), expected }
    }

    /// The value under the first alias that is present, if `convert` takes it; `expected` says what it takes.
    fn get<'s, T>(
        &'s self,
        keys: &[&str],
        expected: &str,
        convert: impl Fn(&'s Value) -> Option<T>,
    ) -> Result<Option<T>, ConfigError> {
        let Some((key, value)) = self.find(keys)? else { return Ok(None) };
        convert(value).map(Some).ok_or_else(|| self.invalid(key, expected, value))
    }

    /// The first alias that is present, after checking that the others agree with it.
    pub(super) fn find<'k>(&self, keys: &[&'k str]) -> Result<Option<(&'k str, &Value)>, ConfigError> {
        let mut found: Option<(&'k str, &Value)> = None;
        for &key in keys {
            let Some(value) = self.object.get(key).filter(|v| !v.is_null()) else { continue };
            match found {
                None => found = Some((key, value)),
                Some((first, v)) if v != value => {
                    let prefix = &self.prefix;
                    return Err(self.error(format!(
                        "`{prefix}{first}` and `{prefix}{key}` are the same setting but differ; remove one of them"
                    )));
                }
                Some(_) => {}
            }
        }
        Ok(found)
    }
}

/// A whole number within bounds; `8.0` counts as 8.
fn as_size(value: &Value, bounds: &Bounds) -> Option<usize> {
    let whole = |x: &f64| *x >= 0.0 && x.fract() == 0.0 && *x <= MOST_IN_A_FLOAT;
    let size = value.as_u64().or_else(|| value.as_f64().filter(whole).map(|x| x as u64))?;
    usize::try_from(size).ok().filter(|size| bounds.contains(size))
}

/// Above 2^53 a float does not say which integer it means.
const MOST_IN_A_FLOAT: f64 = (1u64 << 53) as f64;

fn describe(bounds: &Bounds) -> String {
    format!("an integer from {} to {}", bounds.start(), bounds.end())
}

/// Keys whose value at the root is used, even if the text part has the key.
const OF_THE_WHOLE: [&str; 3] = ["model_type", "architectures", "tie_word_embeddings"];
/// Keys of the root that are used where the text part has no key of the same group.
const OF_THE_PARTS: [&[&str]; 5] = [
    &["quantization_config", "compression_config"],
    &["dtype", "torch_dtype"],
    &["bos_token_id"],
    &["eos_token_id"],
    &["pad_token_id"],
];

/// The keys of a config, or the keys of its text part if the root has no layers of its own.
fn with_text_keys(mut root: Map<String, Value>) -> Map<String, Value> {
    let has = |object: &Map<String, Value>, key: &str| object.get(key).is_some_and(|value| !value.is_null());
    if has(&root, "num_hidden_layers") || !root.get("text_config").is_some_and(Value::is_object) {
        return root;
    }
    let Some(Value::Object(mut text)) = root.remove("text_config") else { return root };
    for key in ["model_type", "architectures"] {
        text.remove(key);
    }
    let groups = OF_THE_PARTS.iter().filter(|group| !group.iter().any(|key| has(&text, key)));
    let keys: Vec<&str> = groups.flat_map(|group| group.iter().copied()).chain(OF_THE_WHOLE).collect();
    for key in keys {
        if let Some(value) = root.remove(key).filter(|value| !value.is_null()) {
            text.insert(key.to_string(), value);
        }
    }
    text
}

/// Values are quoted in messages, but a message is not a dump.
fn shorten(text: String) -> String {
    const LONGEST: usize = 120;
    if text.chars().count() <= LONGEST {
        return text;
    }
    text.chars().take(LONGEST).chain("...".chars()).collect()
}
