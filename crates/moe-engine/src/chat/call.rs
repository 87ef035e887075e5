//! Reads tool calls within a text: where a call ends, and its contents, in every form of [`parsers`](super::parsers).

use serde_json::Value;

use super::arguments::Schemas;
use super::call_ends;
use super::parsers::{ArgumentTags, CallBody, CallParser};
use super::raw;

/// A call that a model asks for.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolCall {
    /// The name of the function.
    pub name: String,
    /// Its arguments as JSON. Numbers keep the digits that the model wrote.
    pub arguments: String,
    /// The id of the call, if the model gives one.
    pub id: Option<String>,
}

impl ToolCall {
    /// A call of a function with these arguments, which are JSON.
    pub fn new(name: impl Into<String>, arguments: impl Into<String>) -> Self {
        Self { name: name.into(), arguments: arguments.into(), id: None }
    }
}

/// The result of reading a text that begins with the opening tag of calls.
pub(super) enum Unit {
    /// The end of the calls has not come yet.
    Unfinished,
    /// The calls, which end at this byte of the text.
    Calls(Vec<ToolCall>, usize),
    /// The text up to this byte is not a call.
    Text(usize),
}

/// Reads the calls at the beginning of `text`. Line ends may come before the opening tag.
pub(super) fn next(parser: &CallParser, schemas: &Schemas, text: &str) -> Unit {
    let Some(begin) = begin(parser, text) else { return Unit::Unfinished };
    let Begin::Call(begin) = begin else { return Unit::Text(begin.at()) };
    let Some(end) = call_ends::end(parser, text, begin) else { return Unit::Unfinished };
    let whole = end + parser.close.len();
    match read(parser, schemas, &text[begin..end]) {
        Some(calls) => Unit::Calls(calls, whole),
        // The body is not a call, so a closing tag within one of its strings ends it, too.
        None => Unit::Text(call_ends::any_end(parser, text, begin).unwrap_or(whole)),
    }
}

/// Reads the calls at the beginning of `text`, to which no more text will be added. The closing tag of a call may be
/// missing.
pub(super) fn last(parser: &CallParser, schemas: &Schemas, text: &str) -> Unit {
    let Some(Begin::Call(begin)) = begin(parser, text) else { return Unit::Text(text.len()) };
    match read(parser, schemas, &text[begin..]) {
        Some(calls) => Unit::Calls(calls, text.len()),
        // A string that never ends may contain the closing tag.
        None => Unit::Text(call_ends::any_end(parser, text, begin).unwrap_or(text.len())),
    }
}

enum Begin {
    /// The body of a call begins at this byte.
    Call(usize),
    /// A section begins, but no call follows. The text up to this byte is not a call.
    Text(usize),
}

impl Begin {
    fn at(&self) -> usize {
        match self {
            Self::Call(at) | Self::Text(at) => *at,
        }
    }
}

/// Skips line ends, the tag of the section if there is one, and the tag of a call. Returns `None` if the tags are
/// incomplete.
fn begin(parser: &CallParser, text: &str) -> Option<Begin> {
    let mut rest = text.trim_start_matches('\n');
    if let Some(section) = &parser.section
        && let Some(inner) = rest.strip_prefix(section.open)
    {
        let after = text.len() - inner.len();
        rest = inner.trim_start();
        if !rest.starts_with(parser.open) && !parser.open.starts_with(rest) {
            return Some(Begin::Text(after));
        }
    }
    let body = rest.strip_prefix(parser.open)?;
    Some(Begin::Call(text.len() - body.len()))
}

/// Returns the calls in a body, or `None` if the body is not a call.
fn read(parser: &CallParser, schemas: &Schemas, body: &str) -> Option<Vec<ToolCall>> {
    match &parser.body {
        CallBody::Object => Some(vec![object(body)?]),
        CallBody::Named { before, between, after, numbered } => {
            let body = body.trim().strip_prefix(before)?;
            let (name, json) = body.split_once(between.trim())?;
            let json = json.trim().strip_suffix(after.trim()).unwrap_or(json);
            let name = name.trim();
            let arguments = arguments(json)?;
            match numbered {
                true => Some(vec![numbered_call(name, arguments)?]),
                false => Some(vec![ToolCall::new(function_name(name)?, arguments)]),
            }
        }
        CallBody::Arguments(tags) => Some(vec![tagged(tags, schemas, body)?]),
        CallBody::Untagged => untagged(body),
        CallBody::Channel => None,
    }
}

/// Returns the name if a function can have it.
fn function_name(name: &str) -> Option<&str> {
    let fits = |c: char| !c.is_whitespace() && !c.is_control() && !matches!(c, '<' | '>' | '{' | '}');
    Some(name).filter(|name| !name.is_empty() && name.chars().all(fits))
}

/// Reads a call that is written as a JSON object.
fn object(json: &str) -> Option<ToolCall> {
    let call: Value = serde_json::from_str(json).ok()?;
    let arguments = match call.get("arguments") {
        None | Some(Value::Null) => "{}".to_string(),
        Some(Value::String(text)) if text.trim().is_empty() => "{}".to_string(),
        Some(Value::String(text)) => text.clone(),
        Some(Value::Object(_)) => raw::compact(raw::json_field(json, "arguments")?),
        Some(_) => return None,
    };
    Some(ToolCall::new(call.get("name")?.as_str()?, arguments))
}

/// Returns arguments that are a JSON object. A blank text means that there are no arguments.
pub(super) fn arguments(json: &str) -> Option<String> {
    if json.trim().is_empty() {
        return Some("{}".into());
    }
    let value: Value = serde_json::from_str(json).ok()?;
    value.is_object().then(|| raw::compact(json))
}

/// Makes the call of a name such as `functions.f:0`, which is also the id of the call.
fn numbered_call(id: &str, arguments: String) -> Option<ToolCall> {
    let (name, number) = id.rsplit_once(':').unwrap_or((id, ""));
    let name = name.strip_prefix("functions.").unwrap_or(name);
    let is_number = number.bytes().all(|byte| byte.is_ascii_digit());
    let name = function_name(name).filter(|_| is_number)?;
    Some(ToolCall { id: Some(id.into()), ..ToolCall::new(name, arguments) })
}

/// Reads a call whose arguments are in tags.
fn tagged(tags: &ArgumentTags, schemas: &Schemas, body: &str) -> Option<ToolCall> {
    let body = body.trim_start().strip_prefix(tags.function.open.trim_start())?;
    let (name, mut rest) = match tags.function.close {
        "" => body.split_at(body.find(tags.key.open).unwrap_or(body.len())),
        close => body.split_once(close)?,
    };
    let name = function_name(name.trim())?;
    let mut arguments = Vec::new();
    while let Some(inner) = rest.trim_start().strip_prefix(tags.key.open) {
        let (key, after) = inner.split_once(tags.key.close)?;
        let after = match tags.value.open {
            "" => after,
            open => after.trim_start().strip_prefix(open)?,
        };
        let (value, after) = after.split_once(tags.value.close)?;
        let value = if tags.lines { without_lines(value) } else { value };
        let key = key.trim();
        arguments.push(format!("{}:{}", Value::from(key), schemas.json(name, key, value)));
        rest = after;
    }
    let end = tags.end.trim();
    // The last tag may be missing at the end of the text.
    let rest = rest.trim();
    rest.strip_prefix(end)
        .unwrap_or(rest)
        .trim()
        .is_empty()
        .then(|| ToolCall::new(name, format!("{{{}}}", arguments.join(","))))
}

/// Removes the line ends that the form puts around a value.
fn without_lines(value: &str) -> &str {
    let value = value.strip_prefix('\n').unwrap_or(value);
    value.strip_suffix('\n').unwrap_or(value)
}

/// Reads the calls after `[TOOL_CALLS]`. They are a list of objects, or `f{..}`, or `f[ARGS]{..}`, with `[CALL_ID]..`
/// before the arguments if the call has an id.
fn untagged(body: &str) -> Option<Vec<ToolCall>> {
    let body = body.trim();
    if body.starts_with('[') {
        return raw::items(body)?.into_iter().map(object_with_id).collect();
    }
    let (head, json) = body.split_at(body.find('{')?);
    let head = head.trim_end().strip_suffix("[ARGS]").unwrap_or(head);
    let (name, id) = match head.split_once("[CALL_ID]") {
        Some((name, id)) => (name, Some(id.trim().to_string())),
        None => (head, None),
    };
    let name = function_name(name.trim())?;
    Some(vec![ToolCall { id, ..ToolCall::new(name, arguments(json)?) }])
}

/// Reads a call that is a JSON object and may have an id.
fn object_with_id(json: &str) -> Option<ToolCall> {
    let id = raw::json_field(json, "id").and_then(|id| serde_json::from_str(id).ok());
    Some(ToolCall { id, ..object(json)? })
}
