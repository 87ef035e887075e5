//! The parts of an answer, as they are returned piece by piece.

use super::call::ToolCall;

/// A piece of an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Part {
    /// More of the reasoning.
    Reasoning(String),
    /// More of the text.
    Text(String),
    /// A whole tool call.
    Call(ToolCall),
}

/// Adds a piece, unless its text is empty.
pub(super) fn give(parts: &mut Vec<Part>, part: Part) {
    match &part {
        Part::Reasoning(text) | Part::Text(text) if text.is_empty() => {}
        _ => parts.push(part),
    }
}
