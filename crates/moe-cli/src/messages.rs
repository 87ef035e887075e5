//! Messages of a conversation, in the form of OpenAI's API and in the form that chat templates expect.

use moe_engine::chat::{Answer, AnswerForm, ToolCall, with_long_integers};
use serde_json::{Map, Value, json};

use crate::batch::short;

/// An answer in the form of OpenAI's API. Parts that were not looked for have no field. `id` makes the ids of calls to
/// which the model has given none.
pub fn of_answer(role: &str, answer: &Answer, form: AnswerForm, id: impl Fn(usize) -> String) -> Value {
    let silent = answer.text.is_empty() && (answer.reasoning.is_some() || !answer.calls.is_empty());
    let content = if silent { Value::Null } else { answer.text.as_str().into() };
    let mut message = json!({"role": role, "content": content});
    if form.reasoning.is_some() {
        message["reasoning"] = json!(answer.reasoning);
    }
    if form.calls.is_some() {
        let call = |(i, call): (usize, &ToolCall)| {
            let function = json!({"name": call.name, "arguments": call.arguments});
            let id = call.id.clone().unwrap_or_else(|| id(i));
            json!({"id": id, "type": "function", "function": function})
        };
        message["tool_calls"] = answer.calls.iter().enumerate().map(call).collect();
    }
    message
}

/// A message in the form that templates expect: its content is one text, the arguments of its tool calls are objects,
/// and its reasoning is present under each of its names.
///
/// # Errors
/// What is wrong with the message.
pub fn for_template(message: &mut Map<String, Value>) -> Result<(), String> {
    if !message.get("role").is_some_and(Value::is_string) {
        return Err("each needs a role, which is a string".into());
    }
    let content = match message.get("content") {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => parts.iter().map(part_text).collect::<Result<Vec<_>, _>>()?.join("\n"),
        Some(other) => {
            return Err(format!("content must be a string or a list of parts, got {}", short(other)));
        }
    };
    message.insert("content".into(), content.into());
    all_names_of_reasoning(message);
    let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
    for call in calls.into_iter().flatten() {
        let Some(function) = call.get_mut("function").and_then(Value::as_object_mut) else { continue };
        let arguments = function.entry("arguments").or_insert(Value::Null);
        match arguments {
            Value::Null => *arguments = Value::Object(Map::new()),
            Value::String(text) if text.trim().is_empty() => *arguments = Value::Object(Map::new()),
            Value::String(text) => {
                let parsed = serde_json::from_str(text)
                    .map_err(|e| format!("the arguments of a tool call are not JSON: {e}"))?;
                // Templates write a text unchanged, with all digits that a parsed number would lose.
                *arguments = with_long_integers(text).map_or(parsed, Value::String);
            }
            _ => {}
        }
    }
    Ok(())
}

/// The names of reasoning in messages: vLLM's, its old one, which most templates know, and the name in gpt-oss's
/// template.
pub const REASONING_NAMES: [&str; 3] = ["reasoning", "reasoning_content", "thinking"];

/// Reasoning under all its names.
fn all_names_of_reasoning(message: &mut Map<String, Value>) {
    let names = REASONING_NAMES;
    let text = names.iter().find_map(|name| message.get(*name).filter(|value| value.is_string()).cloned());
    if let Some(text) = text {
        message.extend(names.map(|name| (name.to_string(), text.clone())));
    }
}

/// The text of a part of a message.
fn part_text(part: &Value) -> Result<&str, String> {
    let kind = part.get("type").and_then(Value::as_str);
    let text = part.as_str().or_else(|| part.get("text").and_then(Value::as_str));
    text.filter(|_| matches!(kind, None | Some("text" | "input_text" | "output_text" | "refusal")))
        .ok_or_else(|| format!("the model takes text only, got the part {}", short(part)))
}

/// The message fields that a template knows.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct KnownFields {
    /// One of the names of reasoning.
    pub reasoning: bool,
    /// `tool_calls`.
    pub calls: bool,
}

/// Writes reasoning and calls back into the content, as a model of this form writes them, for templates that do not
/// know these fields.
pub fn write_back(message: &mut Map<String, Value>, knows: KnownFields, form: AnswerForm) {
    let mut content = message.get("content").and_then(Value::as_str).unwrap_or_default().to_string();
    if !knows.reasoning
        && let Some(Value::String(reasoning)) = message.remove("reasoning")
    {
        REASONING_NAMES.iter().for_each(|name| drop(message.remove(*name)));
        let parser = form.reasoning.unwrap_or(AnswerForm::REASONING);
        content = parser.write(&reasoning, &content);
    }
    if !knows.calls
        && let Some(Value::Array(calls)) = message.remove("tool_calls")
    {
        let calls: Vec<ToolCall> = calls.iter().filter_map(written_call).collect();
        let separator = if content.is_empty() || calls.is_empty() { "" } else { "\n" };
        content += &format!("{separator}{}", form.required_calls().write(&calls));
    }
    message.insert("content".into(), content.into());
}

/// A call of a message. Its arguments are a text or a value.
fn written_call(call: &Value) -> Option<ToolCall> {
    let function = call.get("function")?;
    let arguments = match &function["arguments"] {
        Value::String(text) => text.clone(),
        value => value.to_string(),
    };
    let id = call["id"].as_str().map(String::from);
    Some(ToolCall { id, ..ToolCall::new(function["name"].as_str()?, arguments) })
}

#[cfg(test)]
mod tests {
    use moe_engine::chat::{Begun, Schemas};

    use super::*;

    const BOTH: KnownFields = KnownFields { reasoning: true, calls: true };
    const SAID: &str = "<think>\nHm.\n</think>\n\nSure.\n<tool_call>\n{\"name\":\"f\",\"arguments\":{\"x\":1}}\n</tool_call>";

    fn qwen() -> AnswerForm {
        let calls = moe_engine::chat::CallParser::named("hermes");
        AnswerForm { reasoning: moe_engine::chat::ReasoningParser::named("qwen3"), calls }
    }

    fn answer(text: &str, form: AnswerForm) -> Answer {
        Answer::of(text, form, Begun::Nothing, Schemas::default())
    }

    fn object(value: Value) -> Map<String, Value> {
        value.as_object().unwrap().clone()
    }

    #[test]
    fn an_answer_has_openais_fields_and_finds_back_to_its_text() {
        let message = of_answer("assistant", &answer(SAID, qwen()), qwen(), |i| format!("id-{i}"));
        let call =
            json!({"id": "id-0", "type": "function", "function": {"name": "f", "arguments": "{\"x\":1}"}});
        let want = json!({
            "role": "assistant", "content": "Sure.", "reasoning": "Hm.", "tool_calls": [call],
        });
        assert_eq!(message, want);
        let mut message = object(message);
        for_template(&mut message).unwrap();
        assert_eq!(message["tool_calls"][0]["function"]["arguments"], json!({"x": 1}));
        write_back(&mut message, BOTH, qwen());
        assert_eq!(message["content"], "Sure.", "a template that knows the fields gets them");
        assert_eq!(message["reasoning_content"], "Hm.", "under the name that templates know");
        write_back(&mut message, KnownFields::default(), qwen());
        assert_eq!(Value::Object(message), json!({"role": "assistant", "content": SAID}));
    }

    #[test]
    fn arguments_that_are_blank_are_none_and_long_integers_stay_whole() {
        let of = |arguments: &str| {
            let call = json!({"type": "function", "function": {"name": "f", "arguments": arguments}});
            let mut message = object(json!({"role": "assistant", "content": null, "tool_calls": [call]}));
            for_template(&mut message).map(|()| message["tool_calls"][0]["function"]["arguments"].clone())
        };
        for none in ["", " \n", "{}", "null"] {
            let want = if none == "null" { Value::Null } else { json!({}) };
            assert_eq!(of(none).unwrap(), want, "{none:?}");
        }
        assert_eq!(of("{\"x\":18446744073709551616}").unwrap(), "{\"x\": 18446744073709551616}");
        assert_eq!(of("{\"x\":18446744073709551615}").unwrap(), json!({"x": u64::MAX}));
        assert!(of("{").unwrap_err().contains("not JSON"));
    }

    #[test]
    fn reasoning_is_taken_under_each_of_its_names() {
        for name in REASONING_NAMES {
            let mut message = object(json!({"role": "assistant", "content": "x", name: "Hm."}));
            for_template(&mut message).unwrap();
            assert_eq!(REASONING_NAMES.map(|name| message[name].clone()), ["Hm."; 3]);
        }
        let mut message = object(json!({"role": "assistant", "content": "x", "reasoning": null}));
        for_template(&mut message).unwrap();
        assert_eq!(message.get("reasoning_content"), None, "no reasoning");
    }

    #[test]
    fn what_was_not_looked_for_is_no_field() {
        let none = AnswerForm::default();
        let plain = of_answer("assistant", &answer(SAID, none), none, |_| String::new());
        assert_eq!(plain, json!({"role": "assistant", "content": SAID}));
        let message = of_answer("assistant", &answer("<think>Hm.", qwen()), qwen(), |_| String::new());
        let want = json!({"role": "assistant", "content": null, "reasoning": "Hm.", "tool_calls": []});
        assert_eq!(message, want);
        let empty = of_answer("assistant", &Answer::default(), qwen(), |_| String::new());
        assert_eq!((&empty["content"], &empty["reasoning"]), (&json!(""), &Value::Null));
    }
}
