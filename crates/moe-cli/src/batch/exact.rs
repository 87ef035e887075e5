//! Schemas with integers of more than 64 bits.
//!
//! A JSON value stores such an integer as a float, so `{"const": 12345678901234567890123}` would request a different
//! number. These schemas are kept as the text in the line.

use moe_engine::chat::{has_long_integer, json_field};
use serde_json::{Map, Value};

/// The fields of a body that contain a schema.
const PLACES: [&[&str]; 3] = [
    &["body", "guided_json"],
    &["body", "structured_outputs", "json"],
    &["body", "response_format", "json_schema", "schema"],
];

/// Replaces the value of each schema that has a large integer by its text. `line` is the text of `object`.
pub fn keep_large_integers(line: &str, object: &mut Map<String, Value>) {
    if !has_long_integer(line) {
        return;
    }
    for place in PLACES {
        let Some(text) = place.iter().try_fold(line, |text, name| json_field(text, name)) else { continue };
        let [first, rest @ ..] = place else { continue };
        let Some(parent) = object.get_mut(*first) else { continue };
        let value = rest.iter().try_fold(parent, |value, name| value.get_mut(*name));
        if let Some(value) = value.filter(|value| value.is_object() && has_long_integer(text)) {
            *value = Value::String(text.to_string());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schemas_keep_their_digits() {
        let schema = r#"{"enum": [12345678901234567890123, "}\""]}"#;
        let lines = [
            format!(r#"{{"a": ["}}", {{"b": 1}}], "body": {{"guided_json": 1, "guided_json": {schema} }}}}"#),
            format!(
                r#"{{"body": {{"x": "\\", "structured_outputs": {{"regex": null, "json":{schema}}}}}, "z": 5}}"#
            ),
            format!(
                r#"{{"body":{{"response_format": {{"json_schema": {{"name": "n", "schema": {schema}}}}}}}}}"#
            ),
        ];
        for line in &lines {
            let Value::Object(mut object) = serde_json::from_str(line).unwrap() else { panic!() };
            keep_large_integers(line, &mut object);
            let kept = Value::Object(object).to_string();
            assert!(kept.contains("12345678901234567890123"), "{kept}");
        }
        let small =
            r#"{"body": {"guided_json": {"const": 5}}, "custom_id": "123456789012345678901234567890"}"#;
        let Value::Object(mut object) = serde_json::from_str(small).unwrap() else { panic!() };
        let before = object.clone();
        keep_large_integers(small, &mut object);
        assert_eq!(object, before, "a schema without large integers stays a value");
    }
}
