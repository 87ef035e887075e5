//! Log-probabilities of tokens, from the logits as the model gave them (vLLM's `raw_logprobs`).

use serde::{Deserialize, Serialize};

use super::error::SamplingError;
use super::sampler::argmax;
use super::select::{self, key, top};
use super::weights::{UNIT, Weights};

/// A token and its probability under the model.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprob {
    /// The token.
    pub token_id: u32,
    /// Natural logarithm of its probability at temperature 1; -inf where the logit is.
    pub logprob: f32,
    /// Its place in the order (higher logit, lower id); 1 is the likeliest.
    pub rank: u32,
}

/// Log-probabilities at one position.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprobs {
    /// The token that was sampled, or the token of the prompt.
    pub chosen: TokenLogprob,
    /// The likeliest tokens, likeliest first. The chosen one may be among them.
    pub top: Vec<TokenLogprob>,
}

/// The log-probabilities of `token` and of the `n` likeliest (all if there are fewer) under
/// `logits`, `[V]`: log softmax in f32, with an error below 1e-6 times the larger of 1 and the result.
///
/// For prompt log-probabilities, `logits` come from the position before the token's.
///
/// Among equal logits the rank counts the lower id first, so that it agrees with the list. vLLM counts every equal
/// logit against a token that is not in the list.
pub fn token_logprobs(logits: &[f32], token: u32, n: usize) -> Result<TokenLogprobs, SamplingError> {
    let (_, max) = argmax(logits)?;
    let Some(&logit) = logits.get(token as usize) else {
        let name = "log-probabilities";
        let vocab_size = logits.len();
        return Err(SamplingError::UnknownToken { name, token_id: token, vocab_size });
    };
    let weights = Weights { max, temperature: 1.0, min_p: 0.0 };
    let scale = Scale::new(max, logits.iter().map(|&x| weights.of(x)).sum());
    let own = key(logit, token);
    let before = (0u32..).zip(logits).map(|(i, &x)| (key(x, i) > own) as u32).sum::<u32>();
    Ok(TokenLogprobs { chosen: scale.entry(token, logit, before + 1), top: scale.list(&top(logits, n)) })
}

/// The log-probabilities of a token, from the values that a device computed for its row of logits.
#[cfg(feature = "cuda")]
pub fn device_logprobs(
    row: moe_kernels::cuda::SampleLogprobs,
    token: u32,
) -> Result<TokenLogprobs, SamplingError> {
    match row.status {
        0 => {}
        1 => return Err(SamplingError::NotFinite { token_id: row.rank, value: f32::NAN }),
        _ => return Err(SamplingError::Empty),
    }
    let mut top = row.top;
    top.sort_unstable_by(|a, b| b.cmp(a));
    let scale = Scale::new(row.max, row.total);
    Ok(TokenLogprobs { chosen: scale.entry(token, row.logit, row.rank), top: scale.list(&top) })
}

/// The values that turn a logit into a log-probability.
struct Scale {
    max: f64,
    log_total: f64,
}

impl Scale {
    /// Makes the scale from the largest logit and the sum of all weights at temperature 1.
    fn new(max: f32, total: u64) -> Self {
        Self { max: max as f64, log_total: (total as f64 / UNIT).ln() }
    }

    fn entry(&self, token_id: u32, logit: f32, rank: u32) -> TokenLogprob {
        TokenLogprob { token_id, logprob: (logit as f64 - self.max - self.log_total) as f32, rank }
    }

    /// Keys from the likeliest down.
    fn list(&self, keys: &[u64]) -> Vec<TokenLogprob> {
        let ranked = (1u32..).zip(keys);
        ranked.map(|(rank, &key)| self.entry(select::id(key), select::logit(key), rank)).collect()
    }
}
