//! What commands write: text and JSON to stdout, which a reader such as `head` may close, or a file.

use std::io::IsTerminal;
use std::path::Path;

use anyhow::{Context, Result};
use moe_engine::engine::{FinishReason, StopReason};
use moe_engine::terminal::{visible, visible_json};
use moe_engine::usage;
use serde::Serialize;
use serde_json::Value;

pub use moe_engine::terminal::print;

/// Writes a text of files or of the model to stdout, byte by byte as it is but at a terminal, which must not obey it.
pub fn print_foreign(text: &str) -> Result<bool> {
    match std::io::stdout().is_terminal() {
        true => print(&visible(text)),
        false => print(text),
    }
}

/// Writes JSON to stdout, at a terminal with further escapes.
fn print_json(text: &str) -> Result<bool> {
    match std::io::stdout().is_terminal() {
        true => print(&visible_json(text)),
        false => print(text),
    }
}

/// Checks that a file can be written, so that no run is lost for it; `flag` names it. What is there stays until then.
pub fn check_writable(flag: &str, path: &Path) -> Result<()> {
    let opened = std::fs::OpenOptions::new().append(true).create(true).open(path);
    opened.map(drop).map_err(|e| usage(format!("{flag} {}: cannot write it: {e}", path.display())))
}

/// Writes a result as JSON to a file, or to stdout.
pub fn write_json(path: Option<&Path>, value: &impl Serialize) -> Result<()> {
    write_json_lines(path, &(serde_json::to_string_pretty(value)? + "\n")).map(drop)
}

/// Writes JSON to a file, or to stdout; false if the reader of stdout has seen enough.
pub fn write_json_lines(path: Option<&Path>, text: &str) -> Result<bool> {
    let Some(path) = path else { return print_json(text) };
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(true)
}

/// `finish_reason` as OpenAI's API says it, and vLLM's `stop_reason`.
pub fn finish_reason(finish: Option<&FinishReason>) -> (&'static str, Value) {
    match finish {
        Some(FinishReason::Stop(StopReason::EndOfSequence)) => ("stop", Value::Null),
        Some(FinishReason::Stop(StopReason::Token(id))) => ("stop", (*id).into()),
        Some(FinishReason::Stop(StopReason::Text(text))) => ("stop", text.clone().into()),
        Some(FinishReason::Length) => ("length", Value::Null),
        Some(FinishReason::Cancelled | FinishReason::TimedOut | FinishReason::Failed(_)) | None => {
            ("abort", Value::Null)
        }
    }
}
