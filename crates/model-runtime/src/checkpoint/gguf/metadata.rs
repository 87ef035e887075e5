//! Typed access to the metadata of a GGUF file.

use super::file::Gguf;
use super::values::{List, Value};
use crate::checkpoint::CheckpointError;

impl Gguf {
    /// Fails if a number below the architecture's name is not finite: JSON has no such number, so that it would count
    /// as absent.
    pub(super) fn check_finite(&self, architecture: &str) -> Result<(), CheckpointError> {
        let prefix = format!("{architecture}.");
        let entries = self.headers.first().into_iter().flat_map(|header| &header.metadata);
        for (key, value) in entries.filter(|(key, _)| key.starts_with(&prefix)) {
            if let Value::Float(number) = value
                && !number.is_finite()
            {
                return Err(self.error(format!("`{key}`: expected a finite number, got {number}")));
            }
        }
        Ok(())
    }

    /// The value of a key, in the first part.
    pub(super) fn value(&self, key: &str) -> Option<&Value> {
        self.headers.first()?.metadata.get(key)
    }

    /// Every key.
    pub(super) fn keys(&self) -> impl Iterator<Item = &str> {
        self.headers.first().into_iter().flat_map(|header| header.metadata.keys()).map(String::as_str)
    }

    /// A text, if it is there.
    ///
    /// # Errors
    /// A value of another type.
    pub fn text(&self, key: &str) -> Result<Option<&str>, CheckpointError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Text(text)) => Ok(Some(text)),
            Some(other) => Err(self.unexpected(key, "a text", other)),
        }
    }

    /// A whole number, if it is there.
    ///
    /// # Errors
    /// A value of another type.
    pub fn unsigned(&self, key: &str) -> Result<Option<u64>, CheckpointError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        value.unsigned().map(Some).ok_or_else(|| self.unexpected(key, "a whole number", value))
    }

    /// A number, if it is there.
    ///
    /// # Errors
    /// A value of another type.
    pub fn float(&self, key: &str) -> Result<Option<f64>, CheckpointError> {
        match self.value(key) {
            None => Ok(None),
            Some(value) => {
                let number = value.json().and_then(|json| json.as_f64());
                number.map(Some).ok_or_else(|| self.unexpected(key, "a number", value))
            }
        }
    }

    /// A truth value, if it is there.
    ///
    /// # Errors
    /// A value of another type.
    pub fn flag(&self, key: &str) -> Result<Option<bool>, CheckpointError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(other) => Err(self.unexpected(key, "true or false", other)),
        }
    }

    /// A list of texts, if it is there.
    ///
    /// # Errors
    /// A value of another type.
    pub fn texts(&self, key: &str) -> Result<Option<Vec<&str>>, CheckpointError> {
        self.list(key, "a list of texts", |list, file| list.texts(file))
    }

    /// A list of whole numbers, if it is there.
    ///
    /// # Errors
    /// A value of another type.
    pub fn integers(&self, key: &str) -> Result<Option<Vec<i64>>, CheckpointError> {
        self.list(key, "a list of whole numbers", |list, file| {
            let whole = |value: Value| match value {
                Value::Unsigned(x) => i64::try_from(x).ok(),
                Value::Signed(x) => Some(x),
                Value::Bool(x) => Some(i64::from(x)),
                _ => None,
            };
            list.numbers(file)?.into_iter().map(whole).collect()
        })
    }

    /// A list of numbers, if it is there.
    ///
    /// # Errors
    /// A value of another type.
    pub fn floats(&self, key: &str) -> Result<Option<Vec<f64>>, CheckpointError> {
        self.list(key, "a list of finite numbers", |list, file| {
            list.numbers(file)?.into_iter().map(|value| value.json()?.as_f64()).collect()
        })
    }

    fn list<'s, T>(
        &'s self,
        key: &str,
        expected: &str,
        read: impl FnOnce(&List, &'s [u8]) -> Option<Vec<T>>,
    ) -> Result<Option<Vec<T>>, CheckpointError> {
        match (self.value(key), self.files.first()) {
            (Some(Value::List(list)), Some(file)) => {
                let wrong =
                    || self.error(format!("`{key}`: expected {expected}, got one of {:?}", list.kind));
                read(list, file.bytes()).map(Some).ok_or_else(wrong)
            }
            (Some(other), _) => Err(self.unexpected(key, expected, other)),
            (None, _) => Ok(None),
        }
    }

    /// The error of a value of another type.
    pub(super) fn unexpected(&self, key: &str, expected: &str, got: &Value) -> CheckpointError {
        let got = match got.json() {
            Some(json) => json.to_string().chars().take(80).collect(),
            None => "a list".to_string(),
        };
        self.error(format!("`{key}`: expected {expected}, got {got}"))
    }
}
