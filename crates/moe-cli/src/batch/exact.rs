//! Schemas with integers of more than 64 bits.
//!
//! A JSON value stores such an integer as a float, so `{"const": 12345678901234567890123}` would request a different
//! number. These schemas are kept as the text in the line.

use serde_json::{Map, Value};

/// The fields of a body that contain a schema.
const PLACES: [&[&str]; 3] = [
    &["body", "guided_json"],
    &["body", "structured_outputs", "json"],
    &["body", "response_format", "json_schema", "schema"],
];
/// Number of digits of the smallest integer that might not fit.
const DIGITS: usize = 19;

/// Replaces the value of each schema that has a large integer by its text. `line` is the text of `object`.
pub fn keep_large_integers(line: &str, object: &mut Map<String, Value>) {
    if !has_large_integer(line) {
        return;
    }
    for place in PLACES {
        let Some(text) = place.iter().try_fold(line, |text, name| member(text, name)) else { continue };
        let [first, rest @ ..] = place else { continue };
        let Some(parent) = object.get_mut(*first) else { continue };
        let value = rest.iter().try_fold(parent, |value, name| value.get_mut(*name));
        if let Some(value) = value.filter(|value| value.is_object() && has_large_integer(text)) {
            *value = Value::String(text.to_string());
        }
    }
}

fn has_large_integer(text: &str) -> bool {
    text.as_bytes()
        .chunk_by(|a, b| a.is_ascii_digit() == b.is_ascii_digit())
        .any(|run| run.len() >= DIGITS && run[0].is_ascii_digit())
}

/// The text of a member of an object. If a name occurs twice, the last one counts. The text must be JSON.
fn member<'t>(object: &'t str, name: &str) -> Option<&'t str> {
    let mut rest = object.trim_ascii_start().strip_prefix('{')?;
    let mut found = None;
    loop {
        rest = rest.trim_ascii_start().trim_start_matches(',').trim_ascii_start();
        if !rest.starts_with('"') {
            return found;
        }
        let (key, after) = rest.split_at_checked(value_length(rest))?;
        let value = after.trim_ascii_start().strip_prefix(':')?.trim_ascii_start();
        let (text, after) = value.split_at_checked(value_length(value))?;
        if serde_json::from_str::<String>(key).is_ok_and(|key| key == name) {
            found = Some(text);
        }
        rest = after;
    }
}

/// The number of bytes of the value at the beginning of a text.
fn value_length(text: &str) -> usize {
    let mut depth = 0usize;
    let mut in_string = false;
    let mut escaped = false;
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => {
                in_string = !in_string;
                if !in_string && depth == 0 {
                    return at + 1;
                }
            }
            _ if in_string => (),
            b'{' | b'[' => depth += 1,
            b'}' | b']' if depth == 1 => return at + 1,
            b'}' | b']' | b',' if depth == 0 => return at,
            b'}' | b']' => depth -= 1,
            _ => (),
        }
    }
    text.len()
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
