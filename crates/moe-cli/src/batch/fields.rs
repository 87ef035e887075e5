//! The fields of a request's body, each read with its required type.
//!
//! `null` counts as absent, as in the APIs. An error about a wrong type names the field, the expected type and the
//! value. Fields that are not read are ignored.

use model_runtime::sampling::SamplingError;
use moe_engine::engine::RequestError;
use serde_json::{Map, Value};

use crate::setting_names::as_flags;

/// What is wrong with one line of the input: an error as the HTTP API would answer it.
#[derive(Clone, Debug, PartialEq)]
pub struct ApiError {
    /// HTTP status: 400 for an error of the request, 404 for another model, 500 for an error of this program.
    pub status: u16,
    /// The field at fault.
    pub param: Option<String>,
    /// What is wrong, and what is expected.
    pub message: String,
}

impl ApiError {
    /// An error of the request as a whole.
    pub fn bad(message: impl Into<String>) -> Self {
        Self { status: 400, param: None, message: message.into() }
    }

    /// An error of one field.
    pub fn field(name: &str, message: impl std::fmt::Display) -> Self {
        Self { status: 400, param: Some(name.to_string()), message: format!("{name}: {message}") }
    }
}

impl From<RequestError> for ApiError {
    fn from(e: RequestError) -> Self {
        let param = match &e {
            RequestError::Parameter { name, .. } => Some(*name),
            RequestError::Sampling(
                SamplingError::Parameter { name, .. }
                | SamplingError::NoTokens { name }
                | SamplingError::UnknownToken { name, .. },
            ) => Some(*name),
            RequestError::StructuredOutput(_) => Some("structured_output"),
            RequestError::EmptyPrompt
            | RequestError::PromptTooLong { .. }
            | RequestError::UnknownToken { .. } => Some("prompt"),
            RequestError::KvCacheTooSmall { .. } => Some("max_tokens"),
            _ => None,
        };
        Self { status: 400, param: param.map(str::to_string), message: as_flags(&e.to_string()).into_owned() }
    }
}

/// The fields of a JSON object.
#[derive(Clone, Copy)]
pub struct Fields<'a>(pub &'a Map<String, Value>);

impl<'a> Fields<'a> {
    /// The field as it is; `None` if it is absent or null.
    pub fn value(&self, name: &str) -> Option<&'a Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    fn read<T>(
        &self,
        name: &str,
        expected: &str,
        convert: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.value(name) else { return Ok(None) };
        let wrong = || ApiError::field(name, format!("expected {expected}, got {}", short(value)));
        convert(value).map(Some).ok_or_else(wrong)
    }

    /// A number.
    pub fn float(&self, name: &str) -> Result<Option<f32>, ApiError> {
        // A number that f32 cannot hold would be shown as infinite, which is not what the user wrote.
        let fits = |x: &f64| (*x as f32).is_finite();
        if self.value(name).and_then(Value::as_f64).is_some_and(|x| !fits(&x)) {
            return self.read(name, "a number of at most 3.4e38", |_| None);
        }
        self.read(name, "a number", |v| v.as_f64().map(|x| x as f32))
    }

    /// An integer.
    pub fn integer(&self, name: &str) -> Result<Option<i64>, ApiError> {
        self.read(name, "an integer", |v| v.as_i64().or_else(|| whole(v)))
    }

    /// A number of things.
    pub fn size(&self, name: &str) -> Result<Option<usize>, ApiError> {
        self.read(name, "an integer from 0", |v| usize::try_from(unsigned(v)?).ok())
    }

    /// A seed: any integer of 64 bits.
    pub fn seed(&self, name: &str) -> Result<Option<u64>, ApiError> {
        let signed = |v: &Value| v.as_i64().or_else(|| whole(v));
        let bits = |v: &Value| v.as_u64().or_else(|| signed(v).map(|seed| seed as u64));
        self.read(name, "an integer of 64 bits", bits)
    }

    /// true or false.
    pub fn bool(&self, name: &str) -> Result<Option<bool>, ApiError> {
        self.read(name, "true or false", Value::as_bool)
    }

    /// A text.
    pub fn text(&self, name: &str) -> Result<Option<&'a str>, ApiError> {
        self.read(name, "a string", Value::as_str)
    }

    /// One text or a list of texts.
    pub fn texts(&self, name: &str) -> Result<Option<Vec<String>>, ApiError> {
        self.read(name, "a string or a list of strings", |v| match v {
            Value::String(text) => Some(vec![text.clone()]),
            Value::Array(list) => list.iter().map(|t| t.as_str().map(str::to_string)).collect(),
            _ => None,
        })
    }

    /// A list of token ids.
    pub fn token_ids(&self, name: &str) -> Result<Option<Vec<u32>>, ApiError> {
        self.read(name, "a list of token ids", token_ids)
    }

    /// An object.
    pub fn object(&self, name: &str) -> Result<Option<&'a Map<String, Value>>, ApiError> {
        self.read(name, "an object", Value::as_object)
    }

    /// A list of objects.
    pub fn objects(&self, name: &str) -> Result<Option<Vec<Value>>, ApiError> {
        self.read(name, "a list of objects", |v| {
            v.as_array().filter(|list| list.iter().all(Value::is_object)).cloned()
        })
    }
}

/// The integer value of a float such as 16.0, which many clients write. For larger floats the intended integer is
/// uncertain.
fn whole(value: &Value) -> Option<i64> {
    const EXACT: f64 = (1u64 << 53) as f64;
    let number = value.as_f64().filter(|number| number.fract() == 0.0 && number.abs() <= EXACT)?;
    Some(number as i64)
}

fn unsigned(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| whole(value)?.try_into().ok())
}

/// Token ids of a JSON list of integers.
pub fn token_ids(value: &Value) -> Option<Vec<u32>> {
    value.as_array()?.iter().map(|id| unsigned(id).and_then(|id| u32::try_from(id).ok())).collect()
}

/// A value for a message: its JSON, cut where it is long.
pub fn short(value: &Value) -> String {
    const LONGEST: usize = 60;
    let text = value.to_string();
    match text.char_indices().nth(LONGEST) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn types_are_checked_and_null_is_absent() {
        let body =
            json!({"a": 1, "b": -2, "c": 0.5, "d": "x", "e": ["x", "y"], "f": null, "g": [1, 2], "h": true});
        let f = Fields(body.as_object().unwrap());
        assert_eq!(
            (f.size("a").unwrap(), f.integer("b").unwrap(), f.float("c").unwrap()),
            (Some(1), Some(-2), Some(0.5))
        );
        assert_eq!(f.texts("d").unwrap().unwrap(), ["x"]);
        assert_eq!(f.texts("e").unwrap().unwrap(), ["x", "y"]);
        assert_eq!((f.size("f").unwrap(), f.size("absent").unwrap()), (None, None));
        assert_eq!(f.token_ids("g").unwrap(), Some(vec![1, 2]));
        assert_eq!((f.bool("h").unwrap(), f.seed("b").unwrap()), (Some(true), Some(-2i64 as u64)));
        for error in [
            f.size("b").unwrap_err(),
            f.size("c").unwrap_err(),
            f.texts("g").unwrap_err(),
            f.token_ids("e").unwrap_err(),
            f.bool("a").unwrap_err(),
            f.objects("g").unwrap_err(),
        ] {
            assert_eq!(error.status, 400);
            assert!(error.message.contains("expected"), "{error:?}");
        }
        let body = json!({"a": 16.0, "b": -2.0, "c": 16.5, "d": 1e18});
        let whole = Fields(body.as_object().unwrap());
        assert_eq!((whole.size("a").unwrap(), whole.integer("b").unwrap()), (Some(16), Some(-2)));
        assert_eq!(whole.seed("b").unwrap(), Some(-2i64 as u64));
        assert!(whole.size("b").is_err() && whole.size("c").is_err() && whole.integer("d").is_err());
        let huge = json!({"x": 1e300});
        let error = Fields(huge.as_object().unwrap()).float("x").unwrap_err();
        assert!(error.message.contains("1e+300") || error.message.contains("1e300"), "{error:?}");
        let error = f.float("d").unwrap_err();
        assert_eq!(
            (error.param.as_deref(), error.message.as_str()),
            (Some("d"), "d: expected a number, got \"x\"")
        );
    }

    #[test]
    fn long_values_are_cut_at_a_character() {
        assert_eq!(short(&json!("é".repeat(100))).chars().count(), 61);
    }
}
