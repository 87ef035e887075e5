//! What commands write: text and JSON to stdout, which a reader such as `head` may close, or a file.

use std::io::{ErrorKind, Write};
use std::path::Path;

use anyhow::{Context, Result};
use moe_engine::engine::{FinishReason, StopReason};
use serde::Serialize;
use serde_json::Value;

/// Writes to stdout and flushes; false if its reader has seen enough, which is no failure of ours.
pub fn print(text: &str) -> Result<bool> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() == ErrorKind::BrokenPipe => Ok(false),
        result => result.map(|()| true).context("cannot write to stdout"),
    }
}

/// Writes a result as JSON to a file, or to stdout.
pub fn write_json(path: Option<&Path>, value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value)? + "\n";
    match path {
        Some(path) => std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display())),
        None => print(&text).map(drop),
    }
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
