//! Converts arguments that a model writes as text to JSON. The schema of the function gives the type of each argument.

use std::collections::{BTreeSet, HashMap};

use serde_json::Value;

use super::raw;

/// The schemas of functions, by their names.
#[derive(Clone, Debug, Default)]
pub struct Schemas(HashMap<String, Value>);

impl Schemas {
    /// Makes the schemas from pairs of a function and the JSON schema of its arguments. A schema that is not JSON
    /// allows every type.
    pub fn new<'a>(functions: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let read = |(name, schema): (&str, &str)| {
            let schema = serde_json::from_str(schema).unwrap_or_default();
            (name.to_string(), schema)
        };
        Self(functions.into_iter().map(read).collect())
    }

    /// Returns an argument of a function as JSON. If the text is JSON of a type that the schema allows, and not a
    /// string, the argument is this JSON. Otherwise the argument is a string, if the schema allows one or the text is
    /// not JSON.
    pub(super) fn json(&self, function: &str, key: &str, text: &str) -> String {
        let types = self.types(function, key);
        let of = |name: &str| types.is_empty() || types.contains(name);
        let string = || Value::from(text).to_string();
        let written = text.trim();
        // Models that write Python use other words for these values.
        let word = match written {
            "True" => "true",
            "False" => "false",
            "None" => "null",
            word => word,
        };
        let word = if types.is_empty() || types.iter().copied().eq(["string"]) { written } else { word };
        match serde_json::from_str::<Value>(word) {
            Ok(value) if kinds(&value).iter().any(|kind| of(kind)) && !value.is_string() => {
                raw::compact(word)
            }
            Ok(Value::String(_)) | Err(_) => string(),
            // The JSON has a type that the schema does not allow. It becomes a string if a string is allowed, and
            // otherwise stays as it was written.
            Ok(_) if of("string") => string(),
            Ok(_) => raw::compact(word),
        }
    }

    /// The types that an argument may have; an empty set means any type.
    pub(crate) fn types(&self, function: &str, key: &str) -> BTreeSet<&str> {
        let mut types = BTreeSet::new();
        if let Some(root) = self.0.get(function)
            && let Some(schema) = root["properties"].get(key)
        {
            add_types(root, schema, &mut types, 8);
        }
        types
    }
}

/// The names that JSON schemas have for the type of a value.
fn kinds(value: &Value) -> &'static [&'static str] {
    match value {
        Value::Null => &["null"],
        Value::Bool(_) => &["boolean"],
        Value::Number(n) if n.is_f64() => &["number"],
        Value::Number(_) => &["integer", "number"],
        Value::String(_) => &["string"],
        Value::Array(_) => &["array"],
        Value::Object(_) => &["object"],
    }
}

/// Adds the types that a schema allows, through at most `depth` levels of references and alternatives.
fn add_types<'s>(root: &'s Value, schema: &'s Value, types: &mut BTreeSet<&'s str>, depth: usize) {
    if depth == 0 {
        return;
    }
    if let Some(target) = schema["$ref"].as_str().and_then(|to| root.pointer(to.strip_prefix('#')?)) {
        add_types(root, target, types, depth - 1);
    }
    match &schema["type"] {
        Value::String(name) => drop(types.insert(name)),
        Value::Array(names) => types.extend(names.iter().filter_map(Value::as_str)),
        _ => {
            let values = schema["enum"].as_array().into_iter().flatten().chain(schema.get("const"));
            values.for_each(|value| types.extend(kinds(value)));
        }
    }
    for name in ["anyOf", "oneOf", "allOf"] {
        let parts = schema[name].as_array().into_iter().flatten();
        parts.for_each(|part| add_types(root, part, types, depth - 1));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_argument_is_of_the_type_that_its_schema_says() {
        let schema = json!({"$defs": {"n": {"type": "integer"}}, "properties": {
            "s": {"type": "string"}, "i": {"type": "integer"}, "b": {"type": "boolean"}, "o": {"type": "object"},
            "e": {"enum": ["1", "two"]}, "r": {"$ref": "#/$defs/n"}, "l": {"type": ["array", "null"]},
            "u": {"anyOf": [{"type": "number"}, {"type": "string"}]}, "any": {}}});
        let schema = schema.to_string();
        let schemas = Schemas::new([("f", schema.as_str())]);
        for (key, text, want) in [
            ("s", "5", "\"5\""),
            ("s", " a \"b\"\n", "\" a \\\"b\\\"\\n\""),
            ("s", "{\"a\": 1}", "\"{\\\"a\\\": 1}\""),
            ("i", " 12345678901234567890123 ", "12345678901234567890123"),
            ("i", "five", "\"five\""),
            ("b", "True", "true"),
            ("o", "{ \"x\": [1, 2] }", "{\"x\":[1,2]}"),
            ("o", "[1]", "[1]"),
            ("e", "1", "\"1\""),
            ("r", "7", "7"),
            ("l", "None", "null"),
            ("l", "[\"a\"]", "[\"a\"]"),
            ("u", "1.50", "1.50"),
            ("u", "true", "\"true\""),
            ("any", "5", "5"),
            ("any", "None", "\"None\""),
            ("unknown", "x y", "\"x y\""),
            ("unknown", "\"quoted\"", "\"\\\"quoted\\\"\""),
        ] {
            assert_eq!(schemas.json("f", key, text), want, "{key}: {text}");
        }
        assert_eq!(Schemas::default().json("g", "s", "5"), "5", "without a schema a number is one");
        assert_eq!(Schemas::new([("f", "{")]).json("f", "s", "5"), "5");
    }
}
