//! Windows of a text as tokens: what calibration and the loss look at.

use std::path::Path;

use anyhow::{Context, Result, bail};
use moe_engine::tokenizer::Tokenizer;

use crate::settings::TextSettings;

/// Windows of the text that do not overlap, spread evenly over it.
///
/// # Errors
/// A model without a tokenizer; a file that is not text; fewer tokens than windows need; ids that the model does not have;
/// windows longer than its context.
pub fn windows(model: &Path, settings: &TextSettings, vocab: usize, context: usize) -> Result<Vec<Vec<u32>>> {
    let TextSettings { file, samples, length } = settings;
    if *samples == 0 || *length < 2 {
        bail!(
            "--samples and --length: expected at least 1 window of at least 2 tokens, got {samples} of {length}"
        )
    }
    if *length > context {
        bail!("--length {length}: the model's context has {context} tokens; take at most that")
    }
    let text =
        std::fs::read_to_string(file).with_context(|| format!("cannot read the text {}", file.display()))?;
    let tokens = Tokenizer::from_dir(model)?.encode(&text)?;
    let needed = samples.saturating_mul(*length);
    if tokens.len() < needed {
        bail!(
            "{}: expected at least {needed} tokens (--samples {samples} of --length {length}), got {}; take fewer, or more text",
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
