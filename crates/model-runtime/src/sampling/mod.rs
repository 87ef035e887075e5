//! Sampling the next token, as vLLM defines it and reproducible to the bit.
//!
//! Order of operations (vLLM's `v1/sample/sampler.py` and `logits_processor/builtin.py`):
//! log-probabilities are read; a mask (of a grammar, of bad words), allowed tokens, minimum of tokens, logit bias and
//! penalties edit the logits; then temperature, min-p, top-k, top-p, the sample. A temperature below
//! 1e-5 is greedy. Ties go to the lower token id everywhere.
//!
//! A sample depends on the row of logits, the request's parameters and its own tokens alone. The
//! random number is Philox4x32-10 with the seed as key and the output position as counter; token
//! weights are fixed-point integers ([`sample_row`]), so that sums do not depend on their order
//! and every machine samples the same token from the same logits.

mod edits;
mod error;
mod logprobs;
mod nucleus;
mod params;
mod processors;
mod random;
mod row;
mod sampler;
mod select;
mod weights;

use candle_core::bail;
use rayon::prelude::*;

use moe_kernels::{Exec, ViewMut};

use crate::hash::{fnv1a, mix};

pub use edits::LogitEdits;
pub use error::SamplingError;
#[cfg(feature = "cuda")]
pub use logprobs::device_logprobs;
pub use logprobs::{TokenLogprob, TokenLogprobs, token_logprobs};
pub use params::SamplingParams;
pub use random::random_bits;
pub use row::SampleRow;

/// The seed of a request that brings none: a hash of the run's seed and the request's name, its
/// `custom_id` or its index in decimal digits.
pub fn request_seed(seed: u64, name: &str) -> u64 {
    mix(seed ^ mix(fnv1a(name.as_bytes())))
}

/// A sampled token.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// The token.
    pub token_id: u32,
    /// The log-probabilities, if the request asks for them.
    pub logprobs: Option<TokenLogprobs>,
}

/// Samples a token from `logits`, `[V]`, where -inf excludes a token. The logits are edited in
/// place if the request has penalties, biases or exclusions.
///
/// 1. Log-probabilities, if the request asks for them, are taken from the logits as given.
/// 2. Only the tokens of the mask and the allowed ones stay; the banned ones are excluded.
/// 3. Biases are added. The logit x of a token that occurs in the prompt or n times in the output
///    becomes x / r if positive, else x r (r: repetition penalty); then n times the frequency
///    penalty is subtracted, and the presence penalty if n > 0.
/// 4. Greedy: the likeliest token. Otherwise `e(i) = exp((logit(i) - max) / temperature)`, so
///    the likeliest token has 1; min-p drops tokens with `e(i) < min_p`.
/// 5. The weight of a token is `2^38 e(i)`, rounded to an integer.
/// 6. top-k keeps k tokens in the order (higher logit, lower id).
/// 7. top-p goes through that order and keeps tokens as long as the weight before them is less
///    than `top_p` times the weight of all that are left.
/// 8. With 64 random bits u, the first token in the order of ids at which the running weight
///    exceeds `u * total / 2^64` is sampled.
pub fn sample_row(logits: &mut [f32], row: &SampleRow) -> Result<Sampled, SamplingError> {
    row.params.validate(logits.len())?;
    let wanted = row.params.logprobs;
    let mut raw = None;
    if processors::any(row) {
        raw = wanted.map(|_| logits.to_vec());
        processors::apply(logits, row);
    }
    let token_id = sampler::sample(logits, row.params, row.output.len() as u64)?;
    let raw = raw.as_deref().unwrap_or(logits);
    let logprobs = wanted.map(|n| token_logprobs(raw, token_id, n)).transpose()?;
    Ok(Sampled { token_id, logprobs })
}

/// Samples one token for each row of `logits`, [R, V] f32, rows in parallel; see [`sample_row`].
/// A row that cannot be sampled does not affect the others.
pub fn sample_rows(
    mut logits: ViewMut,
    rows: &[SampleRow],
    ex: &Exec,
) -> candle_core::Result<Vec<Result<Sampled, SamplingError>>> {
    let &[r, v] = logits.dims() else {
        bail!("sampling: expected logits [R, V], got dims {:?}", logits.dims())
    };
    if r != rows.len() || v == 0 {
        bail!("sampling: expected logits of {} rows, got dims {:?}", rows.len(), logits.dims())
    }
    let logits = logits.cpu_mut::<f32>()?;
    let sample = |(logits, row): (&mut [f32], &SampleRow)| sample_row(logits, row);
    Ok(ex.install(|| logits.par_chunks_mut(v).zip(rows.par_iter()).map(sample).collect()))
}
