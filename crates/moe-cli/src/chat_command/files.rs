//! `/save` and `/load`: a conversation as a file of OpenAI's JSON messages.

use std::fs::{self, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde_json::Value;

use crate::messages;

/// Writes messages; an existing file only if it may be replaced.
pub fn save(path: &str, messages: &[Value], replace: bool) -> Result<()> {
    let command = if replace { "save!" } else { "save" };
    ensure!(!path.is_empty(), "/{command} needs the name of a file");
    let text = serde_json::to_string_pretty(messages)? + "\n";
    let mut options = OpenOptions::new();
    options.write(true).create_new(!replace).create(replace).truncate(replace);
    let file = options.open(path).map_err(|e| match e.kind() {
        ErrorKind::AlreadyExists => anyhow!("{path} is there already; /save! {path} replaces it"),
        _ => anyhow!("cannot write {path}: {e}"),
    });
    file?.write_all(text.as_bytes()).with_context(|| format!("cannot write {path}"))
}

/// Reads messages: a list of them, or an object with such a list as `messages`.
pub fn load(path: &str) -> Result<Vec<Value>> {
    ensure!(!path.is_empty(), "/load needs the name of a file");
    let wrong = |what: String| anyhow!("{path} is no conversation: {what}");
    let bytes = fs::read(Path::new(path)).with_context(|| format!("cannot read {path}"))?;
    let value: Value = serde_json::from_slice(&bytes).map_err(|e| wrong(e.to_string()))?;
    let list = match value {
        Value::Array(list) => list,
        Value::Object(mut object) => match object.remove("messages") {
            Some(Value::Array(list)) => list,
            _ => return Err(wrong("expected a list of messages under \"messages\"".into())),
        },
        _ => return Err(wrong("expected a list of messages".into())),
    };
    if list.is_empty() {
        bail!(wrong("it has no message".into()));
    }
    for (i, message) in list.iter().enumerate() {
        let checked = match message.clone() {
            Value::Object(mut message) => messages::for_template(&mut message),
            _ => Err("expected an object".into()),
        };
        checked.map_err(|e| wrong(format!("message {}: {e}", i + 1)))?;
    }
    Ok(list)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_is_saved_is_loaded_and_not_replaced_by_accident() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("talk.json");
        let path = path.to_str().unwrap();
        let call = json!({"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}});
        let said = [
            json!({"role": "user", "content": "é\n"}),
            json!({"role": "assistant", "content": null, "tool_calls": [call]}),
        ];
        save(path, &said, false).unwrap();
        assert_eq!(load(path).unwrap(), said);
        let error = save(path, &said[..1], false).unwrap_err().to_string();
        assert!(error.contains("/save! "), "{error}");
        assert_eq!(load(path).unwrap(), said, "it is as it was");
        save(path, &said[..1], true).unwrap();
        assert_eq!(load(path).unwrap(), said[..1]);
        assert!(save("", &said, false).is_err() && save("/no/such/folder/x", &said, false).is_err());
    }

    #[test]
    fn what_is_no_conversation_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().to_str().unwrap();
        for (text, word) in [
            ("", "EOF"),
            ("[{]", "line 1"),
            ("5", "list of messages"),
            ("{}", "\"messages\""),
            ("[]", "no message"),
            ("[{\"role\": \"user\", \"content\": \"x\"}, 5]", "message 2: expected an object"),
            ("[{\"content\": \"x\"}]", "message 1: each needs a role"),
            ("{\"messages\": [{\"role\": \"user\", \"content\": 5}]}", "content must be"),
        ] {
            fs::write(path, text).unwrap();
            let error = load(path).unwrap_err().to_string();
            assert!(error.contains(word) && error.contains(path), "{text}: {error}");
        }
        let object = r#"{"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}"#;
        fs::write(path, object).unwrap();
        assert_eq!(load(path).unwrap().len(), 1);
        assert!(load("/no/such/file").unwrap_err().to_string().contains("/no/such/file"));
    }
}
