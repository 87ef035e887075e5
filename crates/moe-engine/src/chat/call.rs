//! A tool call as models write it: JSON between `<tool_call>` and `</tool_call>` (Hermes).

use serde_json::Value;

use super::raw;

pub(crate) const CALL: &str = "<tool_call>";
pub(crate) const END_CALL: &str = "</tool_call>";

/// What a model wants to call.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolCall {
    /// The function.
    pub name: String,
    /// Its arguments, as JSON: the digits of its numbers are those that the model wrote.
    pub arguments: String,
}

/// Where the closing tag of the call that `text` opens is; `None` if it has not come yet. One in a string belongs to the
/// string.
pub(super) fn end(text: &str) -> Option<usize> {
    let begin = text.find(CALL)? + CALL.len();
    let mut in_string = false;
    let mut escaped = false;
    for (at, byte) in text.bytes().enumerate().skip(begin) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            // No string of JSON goes over a line: this is none.
            0..0x20 if in_string => return any_end(text),
            b'<' if !in_string && text[at..].starts_with(END_CALL) => return Some(at),
            _ => {}
        }
    }
    None
}

/// Where the first closing tag behind the opening one is, in a string or not.
pub(super) fn any_end(text: &str) -> Option<usize> {
    let begin = text.find(CALL)? + CALL.len();
    text[begin..].find(END_CALL).map(|at| begin + at)
}

/// The call behind an opening tag, if it is one.
pub(super) fn read(text: &str) -> Option<ToolCall> {
    let (_, json) = text.split_once(CALL)?;
    let call: Value = serde_json::from_str(json).ok()?;
    let arguments = match call.get("arguments") {
        None | Some(Value::Null) => "{}".to_string(),
        Some(Value::String(text)) if text.trim().is_empty() => "{}".to_string(),
        Some(Value::String(text)) => text.clone(),
        Some(Value::Object(_)) => raw::compact(raw::field(json, "arguments")?),
        Some(_) => return None,
    };
    Some(ToolCall { name: call.get("name")?.as_str()?.to_string(), arguments })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_keep_their_digits() {
        let of = |arguments: &str| {
            let call = read(&format!("<tool_call>\n{{\"name\": \"f\", \"arguments\": {arguments}}}\n"));
            call.map(|call| call.arguments)
        };
        let long = r#"{"x":12345678901234567890123,"y":[-0.10,1E5],"z":"\u00e9 ,"}"#;
        assert_eq!(
            of(r#"{"x": 12345678901234567890123, "y": [-0.10, 1E5], "z": "\u00e9 ,"}"#).as_deref(),
            Some(long)
        );
        for none in ["\"\"", "\" \\n\"", "null", "{ }"] {
            assert_eq!(of(none).as_deref(), Some("{}"), "{none}");
        }
        assert_eq!(of(r#""{\"x\": 1}""#).as_deref(), Some("{\"x\": 1}"));
        assert_eq!((of("5"), of("[]"), of("{")), (None, None, None));
    }

    #[test]
    fn a_closing_tag_in_a_string_closes_nothing() {
        let ends = |text: &str| end(text).map(|at| text[at..].to_string());
        let call = r#"<tool_call>{"name": "f", "arguments": {"x": "a</tool_call>\"</tool_call>b"}}"#;
        assert_eq!(ends(call), None);
        assert_eq!(ends(&format!("{call}</tool_call> y")).as_deref(), Some("</tool_call> y"));
        assert_eq!(
            ends("<tool_call>{\"x\": \"a</tool_call>\n y").as_deref(),
            Some("</tool_call>\n y"),
            "no string"
        );
    }
}
