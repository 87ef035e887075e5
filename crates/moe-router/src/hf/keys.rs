//! Reads typed values of a JSON configuration, whose keys may have several spellings.
//!
//! `null` means that a key is absent, as transformers writes it. Two spellings of one setting may both be present, but
//! their values must agree, because loaders differ in which one they use.

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::error::{RouterError, refuse};

type Result<T> = std::result::Result<T, RouterError>;

/// The keys of one configuration object. Each reader accepts several spellings of a setting, and fails if the value has
/// another type or two spellings disagree.
#[derive(Clone, Copy, Debug)]
pub struct Keys<'a>(&'a Map<String, Value>);

impl<'a> Keys<'a> {
    /// The keys of a model's `config.json`; for multimodal models, the keys of its `text_config`.
    ///
    /// # Errors
    /// A value that is not an object.
    pub fn of(config: &'a Value) -> Result<Self> {
        let Value::Object(map) = config else {
            return Err(wrong_type("the model's configuration", "a JSON object", config));
        };
        match map.get("text_config") {
            Some(Value::Object(text)) => Ok(Self(text)),
            _ => Ok(Self(map)),
        }
    }

    /// Returns the first of several spellings that is present. All that are present must agree.
    fn find(&self, names: &[&'static str]) -> Result<Option<(&'static str, &'a Value)>> {
        let mut found: Option<(&'static str, &Value)> = None;
        for &name in names {
            let Some(value) = self.0.get(name).filter(|v| !v.is_null()) else { continue };
            match found {
                None => found = Some((name, value)),
                Some((first, first_value)) if first_value != value => refuse!(
                    Contradiction,
                    "{first} = {} contradicts {name} = {}; keep one of the two",
                    brief(first_value),
                    brief(value)
                ),
                Some(_) => {}
            }
        }
        Ok(found)
    }

    /// A value of this type, with the spelling that gave it.
    fn typed<T: Deserialize<'a>>(
        &self,
        names: &[&'static str],
        expected: &str,
    ) -> Result<Option<(&'static str, T)>> {
        let Some((name, value)) = self.find(names)? else { return Ok(None) };
        match T::deserialize(value) {
            Ok(typed) => Ok(Some((name, typed))),
            Err(_) => Err(wrong_type(name, expected, value)),
        }
    }

    /// A non-negative integer.
    ///
    /// # Errors
    /// Another type; two spellings that disagree.
    pub fn count(&self, names: &[&'static str]) -> Result<Option<usize>> {
        Ok(self.typed(names, "a non-negative integer")?.map(|(_, n)| n))
    }

    /// Returns a non-negative integer that has no default in every model.
    ///
    /// # Errors
    /// An absent key without a `default`; another type; two spellings that disagree.
    pub fn required(&self, names: &[&'static str], default: Option<usize>) -> Result<usize> {
        Ok(self.required_named(names, default)?.1)
    }

    /// [`required`](Self::required) with the spelling that gave it; the first one for a default.
    pub(super) fn required_named(
        &self,
        names: &[&'static str],
        default: Option<usize>,
    ) -> Result<(&'static str, usize)> {
        let stored = self.typed(names, "a non-negative integer")?;
        match stored.or(names.first().copied().zip(default)) {
            Some(named) => Ok(named),
            None => Err(RouterError::Missing { keys: names.to_vec() }),
        }
    }

    /// A number, narrowed to f32.
    ///
    /// # Errors
    /// Another type; two spellings that disagree.
    pub fn number(&self, name: &'static str) -> Result<Option<f32>> {
        Ok(self.typed(&[name], "a number")?.map(|(_, x): (_, f64)| x as f32))
    }

    /// A boolean, with the spelling that gave it.
    ///
    /// # Errors
    /// Another type; two spellings that disagree.
    pub fn flag(&self, names: &[&'static str]) -> Result<Option<(&'static str, bool)>> {
        self.typed(names, "true or false")
    }

    /// A string; an empty one means absent.
    ///
    /// # Errors
    /// Another type; two spellings that disagree.
    pub fn text(&self, name: &'static str) -> Result<Option<&'a str>> {
        Ok(self.typed(&[name], "a string")?.map(|(_, text)| text).filter(|text: &&str| !text.is_empty()))
    }

    /// The string at `index` of an array of strings.
    ///
    /// # Errors
    /// Another type, or a shorter array.
    pub fn text_at(&self, name: &'static str, index: usize) -> Result<Option<&'a str>> {
        let Some((name, value)) = self.find(&[name])? else { return Ok(None) };
        match value.as_array().and_then(|a| a.get(index)).and_then(Value::as_str) {
            Some(text) => Ok(Some(text)),
            None => Err(wrong_type(name, "an array with a string for every layer", value)),
        }
    }
}

fn wrong_type(key: &str, expected: &str, value: &Value) -> RouterError {
    RouterError::Value { key: key.to_string(), expected: expected.to_string(), got: brief(value) }
}

/// Returns the value as JSON, cut so that a message stays on one line.
fn brief(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((at, _)) => format!("{}...", &text[..at]),
        None => text,
    }
}
