//! The output of commands: text and JSON to stdout, which a reader such as `head` may close, or to a file.

use std::io::IsTerminal;
use std::path::Path;

use anyhow::{Context, Result};
use moe_engine::engine::{FinishReason, StopReason};
use moe_engine::terminal::{visible, visible_json};
use serde::Serialize;
use serde_json::Value;

use crate::error::usage;

pub use moe_engine::terminal::print;

/// Writes a text from files or from the model to stdout, unchanged. At a terminal, control characters are escaped.
pub fn print_foreign(text: &str) -> Result<bool> {
    Ok(match std::io::stdout().is_terminal() {
        true => print(&visible(text)),
        false => print(text),
    }?)
}

/// Writes JSON to stdout, with further escapes at a terminal.
fn print_json(text: &str) -> Result<bool> {
    Ok(match std::io::stdout().is_terminal() {
        true => print(&visible_json(text)),
        false => print(text),
    }?)
}

/// Checks that a file can be written, so that no run is lost because of it. `flag` names it in errors. Existing
/// contents stay until the result is written.
pub fn check_writable(flag: &str, path: &Path) -> Result<()> {
    let opened = std::fs::OpenOptions::new().append(true).create(true).open(path);
    opened.map(drop).map_err(|e| usage(format!("{flag} {}: cannot write it: {e}", path.display())))
}

/// Writes a result as JSON to a file, or to stdout.
pub fn write_json(path: Option<&Path>, value: &impl Serialize) -> Result<()> {
    write_json_lines(path, &(serde_json::to_string_pretty(value)? + "\n")).map(drop)
}

/// Writes JSON to a file, or to stdout; returns false if the reader of stdout has closed it.
pub fn write_json_lines(path: Option<&Path>, text: &str) -> Result<bool> {
    let Some(path) = path else { return print_json(text) };
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(true)
}

/// `finish_reason` in the form of OpenAI's API, and vLLM's `stop_reason`.
pub fn finish_reason(finish: Option<&FinishReason>) -> (&'static str, Value) {
    match finish {
        Some(FinishReason::Stop(StopReason::Token(id))) => ("stop", (*id).into()),
        Some(FinishReason::Stop(StopReason::Text(text))) => ("stop", text.clone().into()),
        Some(FinishReason::Stop(_)) => ("stop", Value::Null),
        Some(FinishReason::Length) => ("length", Value::Null),
        Some(_) | None => ("abort", Value::Null),
    }
}
