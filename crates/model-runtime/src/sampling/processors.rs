//! The logits processors: what a request's parameters and its tokens so far do to a row of logits
//! before the temperature. They can change which token is the likeliest.
//!
//! Order of operations (vLLM's `v1/sample/sampler.py`): a mask (of a grammar, of bad words), allowed tokens, minimum
//! of tokens, logit bias, then repetition, frequency and presence penalty.

use super::row::SampleRow;

/// Whether the row's logits must be edited at all.
pub(super) fn any(row: &SampleRow) -> bool {
    let p = row.params;
    let excludes = row.mask.is_some() || p.allowed_token_ids.is_some() || !row.banned.is_empty();
    excludes || !p.logit_bias.is_empty() || penalises(row)
}

/// Applies all of them to `logits`, [V]. Ids outside of it are passed over.
pub(super) fn apply(logits: &mut [f32], row: &SampleRow) {
    if let Some(mask) = row.mask {
        keep_masked(logits, mask);
    }
    if let Some(allowed) = &row.params.allowed_token_ids {
        keep(logits, allowed);
    }
    for &id in row.banned {
        edit(logits, id, |_| f32::NEG_INFINITY);
    }
    for &(id, bias) in &row.params.logit_bias {
        edit(logits, id, |x| saturate(x, x + bias));
    }
    if penalises(row) {
        penalise(logits, row);
    }
}

/// Excludes the tokens whose bit is not set. Most words of a mask are all of one kind.
fn keep_masked(logits: &mut [f32], mask: &[u32]) {
    let words = mask.iter().copied().chain(std::iter::repeat(0));
    for (logits, word) in logits.chunks_mut(32).zip(words) {
        match word {
            u32::MAX => {}
            0 => logits.fill(f32::NEG_INFINITY),
            _ => {
                let excluded = logits.iter_mut().enumerate().filter(|(bit, _)| word >> bit & 1 == 0);
                excluded.for_each(|(_, logit)| *logit = f32::NEG_INFINITY);
            }
        }
    }
}

/// Excludes every other token.
fn keep(logits: &mut [f32], allowed: &[u32]) {
    let kept: Vec<(u32, f32)> =
        allowed.iter().filter_map(|&id| Some((id, *logits.get(id as usize)?))).collect();
    logits.fill(f32::NEG_INFINITY);
    for (id, logit) in kept {
        edit(logits, id, |_| logit);
    }
}

fn penalises(row: &SampleRow) -> bool {
    let p = row.params;
    let of_output = p.frequency_penalty != 0.0 || p.presence_penalty != 0.0;
    p.repetition_penalty != 1.0 || of_output && !row.output.is_empty()
}

/// The three penalties, each token once; O(prompt + output + V).
fn penalise(logits: &mut [f32], row: &SampleRow) {
    let p = row.params;
    let prompt = if p.repetition_penalty == 1.0 { &[] } else { row.prompt };
    // Per token: 0 if it does not occur, 1 if only the prompt has it, else 1 plus its number in the output.
    let mut uses = vec![0u32; logits.len()];
    for &id in prompt {
        if let Some(n) = uses.get_mut(id as usize) {
            *n = 1;
        }
    }
    for &id in row.output {
        if let Some(n) = uses.get_mut(id as usize) {
            *n = (*n).max(1) + 1;
        }
    }
    for &id in prompt.iter().chain(row.output) {
        // The number is taken out, so that the token's next occurrence changes nothing.
        let uses = uses.get_mut(id as usize).map_or(0, std::mem::take);
        if uses == 0 {
            continue;
        }
        let count = (uses - 1) as f32;
        let presence = if uses > 1 { p.presence_penalty } else { 0.0 };
        edit(logits, id, |x| {
            let repeated = if x > 0.0 { x / p.repetition_penalty } else { x * p.repetition_penalty };
            saturate(x, repeated - p.frequency_penalty * count - presence)
        });
    }
}

fn edit(logits: &mut [f32], id: u32, f: impl FnOnce(f32) -> f32) {
    if let Some(logit) = logits.get_mut(id as usize) {
        *logit = f(*logit);
    }
}

/// The logit after an edit. A finite logit stays finite, so that no parameter can exclude a token or look like an
/// overflow of the model. An excluded token stays excluded, and NaN stays NaN, so that it is reported as an error
/// later.
fn saturate(before: f32, after: f32) -> f32 {
    if before.is_finite() { after.clamp(f32::MIN, f32::MAX) } else { before }
}
