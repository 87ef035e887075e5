//! Reads windows of a text as tokens, for calibration and for the loss.

use std::path::Path;

use anyhow::{Context, Result, bail};
use moe_engine::tokenizer::Tokenizer;

use crate::settings::TextSettings;

/// Returns windows of the text. They do not overlap and are spread evenly over the text.
///
/// # Errors
/// The model has no tokenizer, the file is not text, the text has too few tokens for the windows, the model does not
/// have an id, or a window is longer than the model's context.
pub fn windows(model: &Path, settings: &TextSettings, vocab: usize, context: usize) -> Result<Vec<Vec<u32>>> {
    let TextSettings { file, samples, length } = settings;
    if *samples == 0 || *length < 2 {
        bail!(
            "`samples` and `length`: expected at least 1 window of at least 2 tokens, got {samples} of {length}"
        )
    }
    if *length > context {
        bail!("`length` {length}: the model's context has {context} tokens; take at most that")
    }
    let text =
        std::fs::read_to_string(file).with_context(|| format!("cannot read the text {}", file.display()))?;
    let tokens = Tokenizer::from_dir(model)?.encode(&text)?;
    let needed = samples.saturating_mul(*length);
    if tokens.len() < needed {
        bail!(
            "{}: expected at least {needed} tokens (`samples` {samples} of `length` {length}), got {}; take fewer, or more text",
            file.display(),
            tokens.len()
        )
    }
    if let Some(id) = tokens.iter().find(|id| **id as usize >= vocab) {
        bail!(
            "the tokenizer gives the id {id}, but the model's vocabulary has {vocab}; it belongs to another model"
        )
    }
    let all = tokens.len() / length;
    Ok((0..*samples).map(|at| tokens[at * all / samples * length..][..*length].to_vec()).collect())
}
