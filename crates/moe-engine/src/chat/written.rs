//! Writes reasoning and calls in the form in which a model writes them. Templates need this if they have no variables
//! for these parts of an answer.

use serde_json::Value;

use super::call::ToolCall;
use super::parsers::{ArgumentTags, CallBody, CallParser, ReasoningParser};
use super::raw;

impl ReasoningParser {
    /// Returns the reasoning followed by the text.
    pub fn write(&self, reasoning: &str, text: &str) -> String {
        let Self { open, close, .. } = self;
        match self.channels {
            true => format!("{open}{reasoning}{close}<|start|>assistant<|channel|>final<|message|>{text}"),
            false => format!("{open}\n{reasoning}\n{close}\n\n{text}"),
        }
    }
}

impl CallParser {
    /// Returns calls as they follow a text.
    pub fn write(&self, calls: &[ToolCall]) -> String {
        let one = |(number, call): (usize, &ToolCall)| self.write_one(number, call);
        let calls: Vec<String> = calls.iter().enumerate().map(one).collect();
        let between = match self.body {
            CallBody::Untagged => "",
            CallBody::Channel => "<|start|>assistant",
            CallBody::Named { numbered: true, .. } => "",
            _ => "\n",
        };
        let calls = calls.join(between);
        match (&self.section, &self.body) {
            (Some(tags), CallBody::Arguments(_)) => format!("{}\n{calls}\n{}", tags.open, tags.close),
            (Some(tags), _) => format!("{}{calls}{}", tags.open, tags.close),
            (None, _) => calls,
        }
    }

    fn write_one(&self, number: usize, call: &ToolCall) -> String {
        let Self { open, close, .. } = self;
        let ToolCall { name, arguments, id } = call;
        match &self.body {
            CallBody::Object => {
                let name = Value::from(name.as_str());
                format!("{open}\n{{\"name\":{name},\"arguments\":{arguments}}}\n{close}")
            }
            CallBody::Named { before, between, after, numbered } => {
                let name = match numbered {
                    true => id.clone().unwrap_or_else(|| format!("functions.{name}:{number}")),
                    false => name.clone(),
                };
                format!("{open}{before}{name}{between}{arguments}{after}{close}")
            }
            CallBody::Arguments(tags) => format!("{open}{}{close}", body(tags, name, arguments)),
            CallBody::Untagged => {
                let id = id.iter().map(|id| format!("[CALL_ID]{id}")).collect::<String>();
                format!("{open}{name}{id}[ARGS]{arguments}")
            }
            CallBody::Channel => {
                format!(
                    "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}{close}"
                )
            }
        }
    }
}

/// Returns a call whose arguments are in tags. Strings are written without quotation marks.
fn body(tags: &ArgumentTags, name: &str, arguments: &str) -> String {
    let ArgumentTags { function, key, value, end, line, lines } = tags;
    let mut text = format!("{}{name}{}", function.open, function.close);
    let values: serde_json::Map<String, Value> = serde_json::from_str(arguments).unwrap_or_default();
    for (name, parsed) in &values {
        let written = match parsed {
            Value::String(text) => text.as_str(),
            _ => raw::json_field(arguments, name).unwrap_or_default(),
        };
        let around = if *lines { "\n" } else { "" };
        let between = if value.open.is_empty() { "" } else { "\n" };
        text += &format!("{line}{}{name}{}{between}{}", key.open, key.close, value.open);
        text += &format!("{around}{written}{around}{}", value.close);
    }
    text + end
}
