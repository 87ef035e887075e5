//! Reads typed values from a JSON object. Errors name the key with its path.

use serde_json::{Map, Value};

use crate::error::QuantError;

/// The largest number of characters of a value in an error.
const SHOWN: usize = 80;

/// A JSON object and its path, such as `quantization_config.config_groups.group_0`.
#[derive(Clone)]
pub(crate) struct Header<'a> {
    map: &'a Map<String, Value>,
    path: String,
}

impl<'a> Header<'a> {
    pub fn new(value: &'a Value, path: impl Into<String>) -> Result<Self, QuantError> {
        let path = path.into();
        match value {
            Value::Object(map) => Ok(Self { map, path }),
            other => Err(value_error(path, "an object", other)),
        }
    }

    /// Returns the first of these keys that exists and is not null.
    pub fn find(&self, keys: &[&str]) -> Option<(String, &'a Value)> {
        let found =
            keys.iter().find_map(|key| self.map.get(*key).filter(|v| !v.is_null()).map(|v| (*key, v)));
        found.map(|(key, value)| (self.key(key), value))
    }

    pub fn has(&self, key: &str) -> bool {
        self.find(&[key]).is_some()
    }

    /// Returns the path of a key.
    pub fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.path)
    }

    pub fn entries(&self) -> impl Iterator<Item = (&'a String, &'a Value)> + use<'a> {
        self.map.iter()
    }

    pub fn bool(&self, key: &str) -> Result<Option<bool>, QuantError> {
        self.typed(&[key], "true or false", Value::as_bool)
    }

    pub fn int(&self, keys: &[&str]) -> Result<Option<(String, i64)>, QuantError> {
        let key = self.find(keys).map(|(key, _)| key);
        let value = self.typed(keys, "a whole number", Value::as_i64)?;
        Ok(key.zip(value))
    }

    pub fn str(&self, keys: &[&str]) -> Result<Option<&'a str>, QuantError> {
        self.typed(keys, "a string", Value::as_str)
    }

    pub fn object(&self, key: &str) -> Result<Option<Header<'a>>, QuantError> {
        self.find(&[key]).map(|(path, value)| Header::new(value, path)).transpose()
    }

    /// Reads the strings of a list, or of a list of lists. A single string counts as a list of one. Without the key the
    /// result is empty.
    pub fn strings(&self, keys: &[&str]) -> Result<Vec<&'a str>, QuantError> {
        let Some((path, value)) = self.find(keys) else { return Ok(Vec::new()) };
        let mut found = Vec::new();
        match flatten(value, &mut found) {
            true => Ok(found),
            false => Err(value_error(path, "a list of strings", value)),
        }
    }

    /// Checks that the key is missing or has one of these words as its value, in upper or lower case.
    pub fn only(&self, keys: &[&str], accepted: &[&str]) -> Result<(), QuantError> {
        let Some((path, value)) = self.find(keys) else { return Ok(()) };
        let word = value.as_str().map(str::to_lowercase);
        if word.is_some_and(|word| accepted.contains(&word.as_str())) {
            return Ok(());
        }
        Err(QuantError::unsupported(
            format!("`{path}` = {}", shown(value)),
            format!("{} works", accepted.join(" or ")),
        ))
    }

    fn typed<T>(
        &self,
        keys: &[&str],
        expected: &str,
        get: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, QuantError> {
        let Some((path, value)) = self.find(keys) else { return Ok(None) };
        get(value).map(Some).ok_or_else(|| value_error(path, expected, value))
    }
}

fn flatten<'a>(value: &'a Value, found: &mut Vec<&'a str>) -> bool {
    match value {
        Value::String(one) => {
            found.push(one);
            true
        }
        Value::Array(many) => many.iter().all(|v| match v {
            Value::Array(inner) => inner.iter().all(|v| v.as_str().map(|s| found.push(s)).is_some()),
            v => v.as_str().map(|s| found.push(s)).is_some(),
        }),
        _ => false,
    }
}

/// Returns the error `key: expected .., got ..`.
pub(crate) fn value_error(key: impl Into<String>, expected: impl Into<String>, got: &Value) -> QuantError {
    QuantError::Value { key: key.into(), expected: expected.into(), got: shown(got) }
}

/// Returns a value as JSON, without its end if it is long.
pub(crate) fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}
