//! Finds the end of a tool call: the first closing tag that is neither in a string of JSON nor in an argument.

use super::parsers::{ArgumentTags, CallBody, CallParser};
use super::raw;

/// Returns where the closing tag of a call begins, or where its JSON ends if the form has no closing tag. The body of
/// the call begins at `begin`. Returns `None` if the end has not arrived yet.
pub(super) fn end(parser: &CallParser, text: &str, begin: usize) -> Option<usize> {
    match &parser.body {
        CallBody::Object | CallBody::Named { .. } => after_strings(parser, text, begin),
        CallBody::Arguments(tags) => after_arguments(parser, tags, text, begin),
        CallBody::Untagged => untagged(text, begin),
        CallBody::Channel => None,
    }
}

/// Returns the end of the first closing tag, even if the tag is in a string. Returns `None` if there is no closing tag.
pub(super) fn any_end(parser: &CallParser, text: &str, begin: usize) -> Option<usize> {
    match parser.close {
        "" => Some(begin),
        close => text[begin..].find(close).map(|at| begin + at + close.len()),
    }
}

/// Returns the first closing tag that is not in a string.
fn after_strings(parser: &CallParser, text: &str, begin: usize) -> Option<usize> {
    let mut in_string = false;
    let mut escaped = false;
    let first = parser.close.as_bytes()[0];
    for (at, &byte) in text.as_bytes().iter().enumerate().skip(begin) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            // A string of JSON cannot contain control characters such as line ends. So this is not JSON, and the first
            // closing tag counts.
            0..0x20 if in_string => return text[begin..].find(parser.close).map(|at| begin + at),
            byte if byte == first && !in_string && text[at..].starts_with(parser.close) => return Some(at),
            _ => {}
        }
    }
    None
}

/// Returns the first closing tag that is not in an argument.
fn after_arguments(parser: &CallParser, tags: &ArgumentTags, text: &str, begin: usize) -> Option<usize> {
    let mut from = begin;
    loop {
        let close = text[from..].find(parser.close).map(|at| from + at);
        let argument = text[from..].find(tags.key.open).map(|at| from + at);
        match (argument, close) {
            (Some(argument), close) if close.is_none_or(|close| argument < close) => {
                from = argument + text[argument..].find(tags.value.close)? + tags.value.close.len();
            }
            (_, close) => return close,
        }
    }
}

/// Returns the end of the JSON after `[TOOL_CALLS]`. Text that is neither a name nor JSON is not a call, so it ends at
/// once.
fn untagged(text: &str, begin: usize) -> Option<usize> {
    let body = &text[begin..];
    let json = body.len() - body.trim_start().len();
    if body[json..].starts_with('[') {
        return raw::closed_len(&body[json..]).map(|len| begin + json + len);
    }
    let is_head = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | '[' | ']' | ' ' | '\n');
    match body.find(|c| !is_head(c)) {
        Some(at) if body[at..].starts_with('{') => raw::closed_len(&body[at..]).map(|len| begin + at + len),
        Some(_) => Some(begin),
        None => None,
    }
}
