//! Log-probabilities of tokens, from the logits as the model gave them (vLLM's `raw_logprobs`).

use serde::{Deserialize, Serialize};

use super::SamplingError;
use super::sampler::argmax;
use super::select::{self, key, top};
use super::weights::{UNIT, Weights};

/// A token and how likely the model holds it.
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
    /// The token that was sampled, or that the prompt holds.
    pub chosen: TokenLogprob,
    /// The likeliest tokens, likeliest first. The chosen one may be among them.
    pub top: Vec<TokenLogprob>,
}

/// The log-probabilities of `token` and of the `n` likeliest (all if there are fewer) under
/// `logits`, `[V]`: log softmax in f32, with an error below 1e-6 times the larger of 1 and the result.
///
/// For prompt log-probabilities, `logits` are those of the position before the token's.
///
/// A rank counts equal logits in the order of ids, so that it agrees with the list; vLLM counts
/// every equal against a token that is not in the list.
pub fn token_logprobs(logits: &[f32], token: u32, n: usize) -> Result<TokenLogprobs, SamplingError> {
    let (_, max) = argmax(logits)?;
    let Some(&logit) = logits.get(token as usize) else {
        let (name, vocab_size) = ("log-probabilities", logits.len());
        return Err(SamplingError::UnknownToken { name, token_id: token, vocab_size });
    };
    let weights = Weights { max, temperature: 1.0, min_p: 0.0 };
    let total: u64 = logits.iter().map(|&x| weights.of(x)).sum();
    let log_total = (total as f64 / UNIT).ln();
    let entry = |token_id, logit: f32, rank| {
        let logprob = (logit as f64 - max as f64 - log_total) as f32;
        TokenLogprob { token_id, logprob, rank }
    };
    let own = key(logit, token);
    let before = (0u32..).zip(logits).map(|(i, &x)| (key(x, i) > own) as u32).sum::<u32>();
    let listed = |(rank, key)| {
        let id = select::id(key);
        entry(id, logits.get(id as usize).copied().unwrap_or(f32::NEG_INFINITY), rank)
    };
    Ok(TokenLogprobs {
        chosen: entry(token, logit, before + 1),
        top: (1u32..).zip(top(logits, n)).map(listed).collect(),
    })
}
