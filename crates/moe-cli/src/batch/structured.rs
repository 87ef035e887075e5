//! Structured output of a body: OpenAI's `response_format`, and the names that vLLM has used for it.

use moe_engine::structured::StructuredOutput;
use serde_json::Value;

use super::fields::{ApiError, Fields, short};

/// The structured output that a body requests under one of the names.
pub struct RequestedOutput {
    /// The name.
    pub field: &'static str,
    /// `None` if the text is free.
    pub output: Option<StructuredOutput>,
}

/// The names in addition to `response_format`.
const FIELDS: [&str; 5] =
    ["guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"];

/// The requested structured output; `None` if the body has none.
pub fn asked(body: &Fields) -> Result<Option<RequestedOutput>, ApiError> {
    let mut asked = response_format(body)?;
    for field in FIELDS {
        let Some(value) = body.value(field) else { continue };
        let output = match field {
            "structured_outputs" => structured_outputs(body)?,
            _ => one(field, field.trim_start_matches("guided_"), value)?,
        };
        if let Some(RequestedOutput { field: other, output: Some(_) }) = asked {
            return Err(ApiError::field(
                field,
                format!("{other} asks for something, too: leave one of them out"),
            ));
        }
        asked = Some(RequestedOutput { field, output: Some(output) });
    }
    Ok(asked)
}

fn response_format(body: &Fields) -> Result<Option<RequestedOutput>, ApiError> {
    const FIELD: &str = "response_format";
    const TYPES: &str = "expected the type \"text\", \"json_object\" or \"json_schema\"";
    let Some(format) = body.object(FIELD)? else { return Ok(None) };
    let output = match format.get("type").and_then(Value::as_str) {
        Some("text") => None,
        Some("json_object") => Some(StructuredOutput::JsonObject),
        Some("json_schema") => {
            let schema = format.get("json_schema").and_then(|named| named.get("schema"));
            let missing = || ApiError::field(FIELD, "json_schema: expected an object with a schema");
            Some(json(FIELD, schema.ok_or_else(missing)?)?)
        }
        _ => {
            let got = format.get("type").map_or_else(|| "none".to_string(), short);
            return Err(ApiError::field(FIELD, format!("{TYPES}, got {got}")));
        }
    };
    Ok(Some(RequestedOutput { field: FIELD, output }))
}

/// vLLM's object with all kinds, of which one is given. Clients send null or false for the others.
fn structured_outputs(body: &Fields) -> Result<StructuredOutput, ApiError> {
    const FIELD: &str = "structured_outputs";
    let given = body.object(FIELD)?.into_iter().flatten();
    let given: Vec<_> = given.filter(|(_, value)| !value.is_null() && **value != false).collect();
    let [(kind, value)] = given[..] else {
        let expected = "expected one of json, regex, choice, grammar, json_object";
        return Err(ApiError::field(FIELD, format!("{expected}; got {}", given.len())));
    };
    one(FIELD, kind, value)
}

/// The structured output of one kind.
fn one(field: &'static str, kind: &str, value: &Value) -> Result<StructuredOutput, ApiError> {
    let wrong = |expected: &str| {
        let place = if field.ends_with(kind) { String::new() } else { format!("{kind}: ") };
        ApiError::field(field, format!("{place}expected {expected}, got {}", short(value)))
    };
    let text = || value.as_str().map(str::to_string).ok_or_else(|| wrong("a string"));
    match kind {
        "json" => json(field, value),
        "regex" => text().map(StructuredOutput::Regex),
        "grammar" => text().map(StructuredOutput::Grammar),
        "choice" => {
            let texts: Option<Vec<String>> = value
                .as_array()
                .and_then(|texts| texts.iter().map(|text| text.as_str().map(str::to_string)).collect());
            texts.map(StructuredOutput::Choice).ok_or_else(|| wrong("a list of strings"))
        }
        "json_object" if value.is_boolean() => Ok(StructuredOutput::JsonObject),
        "json_object" => Err(wrong("true or false")),
        _ => Err(ApiError::field(field, format!("{kind} is not supported; leave it out"))),
    }
}

/// A schema as JSON, or as the text of a schema.
fn json(field: &'static str, value: &Value) -> Result<StructuredOutput, ApiError> {
    match value {
        Value::Object(_) | Value::Bool(_) => Ok(StructuredOutput::JsonSchema(value.to_string())),
        Value::String(text) => Ok(StructuredOutput::JsonSchema(text.clone())),
        other => Err(ApiError::field(field, format!("expected a JSON schema, got {}", short(other)))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn of(body: Value) -> Result<Option<(&'static str, Option<StructuredOutput>)>, String> {
        let asked = asked(&Fields(body.as_object().unwrap())).map_err(|e| {
            let param = e.param.unwrap();
            assert!(e.status == 400 && e.message.starts_with(&format!("{param}: ")), "{}", e.message);
            e.message
        })?;
        Ok(asked.map(|asked| (asked.field, asked.output)))
    }

    #[test]
    fn every_name_is_understood() {
        let schema = json!({"type": "integer"});
        let text = StructuredOutput::JsonSchema(schema.to_string());
        let cases = [
            (json!({"response_format": {"type": "json_object"}}), StructuredOutput::JsonObject),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": true, "schema": schema}}}),
                text.clone(),
            ),
            (json!({"guided_json": schema}), text.clone()),
            (json!({"guided_json": schema.to_string(), "guided_regex": null}), text.clone()),
            (
                json!({"guided_regex": "a+", "response_format": {"type": "text"}}),
                StructuredOutput::Regex("a+".into()),
            ),
            (json!({"guided_choice": ["a", "b"]}), StructuredOutput::Choice(vec!["a".into(), "b".into()])),
            (json!({"guided_grammar": "start: \"a\""}), StructuredOutput::Grammar("start: \"a\"".into())),
            (json!({"structured_outputs": {"json": schema, "regex": null, "json_object": false}}), text),
            (json!({"structured_outputs": {"regex": "a+"}}), StructuredOutput::Regex("a+".into())),
            (json!({"structured_outputs": {"choice": ["a"]}}), StructuredOutput::Choice(vec!["a".into()])),
            (json!({"structured_outputs": {"grammar": "g"}}), StructuredOutput::Grammar("g".into())),
            (json!({"structured_outputs": {"json_object": true}}), StructuredOutput::JsonObject),
        ];
        for (body, want) in cases {
            assert_eq!(of(body.clone()).unwrap().unwrap().1, Some(want), "{body}");
        }
        assert_eq!(
            of(json!({"response_format": {"type": "text"}})).unwrap(),
            Some(("response_format", None))
        );
        assert_eq!(of(json!({"guided_json": null})).unwrap(), None);
    }

    #[test]
    fn what_is_wrong_is_said_of_the_field() {
        let cases = [
            (json!({"response_format": {"type": "xml"}}), "response_format: expected the type \"text\""),
            (json!({"response_format": {}}), "got none"),
            (json!({"response_format": "json_object"}), "response_format: expected an object"),
            (json!({"response_format": {"type": "json_schema"}}), "expected an object with a schema"),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}),
                "expected a JSON schema, got 5",
            ),
            (json!({"guided_json": 5}), "guided_json: expected a JSON schema, got 5"),
            (json!({"guided_regex": 5}), "guided_regex: expected a string, got 5"),
            (json!({"guided_choice": "a"}), "guided_choice: expected a list of strings, got \"a\""),
            (json!({"guided_choice": ["a", 5]}), "expected a list of strings"),
            (json!({"guided_grammar": []}), "guided_grammar: expected a string"),
            (json!({"structured_outputs": {}}), "got 0"),
            (json!({"structured_outputs": []}), "structured_outputs: expected an object"),
            (json!({"structured_outputs": {"regex": "a", "choice": ["a"]}}), "got 2"),
            (
                json!({"structured_outputs": {"regex": 5}}),
                "structured_outputs: regex: expected a string, got 5",
            ),
            (json!({"structured_outputs": {"json_object": 1}}), "json_object: expected true or false"),
            (json!({"structured_outputs": {"structural_tag": "x"}}), "structural_tag is not supported"),
            (
                json!({"guided_json": {}, "guided_regex": "a"}),
                "guided_regex: guided_json asks for something, too",
            ),
            (
                json!({"response_format": {"type": "json_object"}, "guided_choice": ["a"]}),
                "response_format asks",
            ),
        ];
        for (body, want) in cases {
            let error = of(body.clone()).unwrap_err();
            assert!(error.contains(want), "{body}: {error}");
        }
    }
}
