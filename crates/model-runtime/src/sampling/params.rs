//! What a request may ask of sampling, and the errors of a request that asks for more.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::error::SamplingError;
use crate::config::{Config, ConfigError, limits};

/// Below this temperature, sampling is greedy.
const GREEDY_BELOW: f32 = 1e-5;

/// How the next token of a request is chosen. Names, meanings and ranges are vLLM's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SamplingParams {
    /// Divides the logits; below 1e-5 the likeliest token is taken, and min-p, top-k, top-p and
    /// seed do not count. From there up to 0.01 it counts as 0.01.
    pub temperature: f32,
    /// Keeps this many of the likeliest tokens; 0 keeps all.
    pub top_k: usize,
    /// Keeps the likeliest tokens up to this total probability; in (0, 1].
    pub top_p: f32,
    /// Keeps tokens of at least this probability relative to the likeliest; in [0, 1].
    pub min_p: f32,
    /// Divides the positive and multiplies the other logits of tokens that the prompt or the
    /// output holds; above 0, and 1 changes nothing.
    pub repetition_penalty: f32,
    /// Subtracted from the logits of tokens that the output holds; in [-2, 2].
    pub presence_penalty: f32,
    /// Subtracted from the logit of a token once for each time that the output holds it; in
    /// [-2, 2].
    pub frequency_penalty: f32,
    /// Added to the logits of these tokens; finite. A token that is named twice gets both.
    pub logit_bias: Vec<(u32, f32)>,
    /// Only these tokens can be sampled; `None` allows all, an empty list is refused.
    pub allowed_token_ids: Option<Vec<u32>>,
    /// Key of the random numbers.
    pub seed: u64,
    /// `Some(n)` asks for the log-probabilities of the sampled token and of the n likeliest;
    /// `usize::MAX` means all tokens.
    pub logprobs: Option<usize>,
}

impl Default for SamplingParams {
    /// Greedy sampling.
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            allowed_token_ids: None,
            seed: 0,
            logprobs: None,
        }
    }
}

impl SamplingParams {
    /// The defaults of `generation_config.json`. Sampling is greedy if the file says nothing about it or has
    /// `do_sample` false.
    pub fn from_generation_config(config: &Config) -> Result<Self, ConfigError> {
        let float = |key: &str, default: f32| -> Result<f32, ConfigError> {
            Ok(config.float_or(&[key], default as f64)? as f32)
        };
        // A config that asks for sampling without a temperature means 1.
        let samples = config.bool_or(&["do_sample"], config.has("temperature"))?;
        let params = Self {
            temperature: if samples { float("temperature", 1.0)? } else { 0.0 },
            top_k: top_k(config)?,
            top_p: float("top_p", 1.0)?,
            min_p: float("min_p", 0.0)?,
            repetition_penalty: float("repetition_penalty", 1.0)?,
            ..Self::default()
        };
        params.check_numbers().map_err(|e| config.invalid("sampling parameters", "valid values", e))?;
        Ok(params)
    }

    /// Whether the likeliest token is always taken.
    pub fn is_greedy(&self) -> bool {
        self.temperature < GREEDY_BELOW
    }

    /// Whether logits change with the tokens that the sequence holds.
    pub fn has_penalties(&self) -> bool {
        (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)
    }

    /// Fails for a parameter out of its range and for token ids of `vocab_size` or more.
    pub fn validate(&self, vocab_size: usize) -> Result<(), SamplingError> {
        self.check_numbers()?;
        let known = |name, ids: &[u32]| match ids.iter().find(|&&id| id as usize >= vocab_size) {
            Some(&token_id) => Err(SamplingError::UnknownToken { name, token_id, vocab_size }),
            None => Ok(()),
        };
        for &(id, bias) in &self.logit_bias {
            known("logit_bias", &[id])?;
            check("logit_bias", "finite numbers", bias, bias.is_finite())?;
        }
        if let Some(ids) = &self.allowed_token_ids {
            known("allowed_token_ids", ids)?;
            if ids.is_empty() {
                return Err(SamplingError::NoTokens { name: "allowed_token_ids" });
            }
        }
        Ok(())
    }

    fn check_numbers(&self) -> Result<(), SamplingError> {
        let t = self.temperature;
        let r = self.repetition_penalty;
        let penalty = |name, x: f32| check(name, "from -2 to 2", x, (-2.0..=2.0).contains(&x));
        check("temperature", "a finite number of at least 0", t, t.is_finite() && t >= 0.0)?;
        check("top_p", "above 0 and at most 1", self.top_p, self.top_p > 0.0 && self.top_p <= 1.0)?;
        check("min_p", "from 0 to 1", self.min_p, (0.0..=1.0).contains(&self.min_p))?;
        check("repetition_penalty", "a finite number above 0", r, r.is_finite() && r > 0.0)?;
        penalty("presence_penalty", self.presence_penalty)?;
        penalty("frequency_penalty", self.frequency_penalty)
    }
}

/// The top-k of a config; -1 keeps all, too, as in vLLM.
fn top_k(config: &Config) -> Result<usize, ConfigError> {
    match config.object().get("top_k").and_then(Value::as_i64) {
        Some(-1) => Ok(0),
        _ => config.size_or(&["top_k"], 0, limits::VOCAB_OR_NONE),
    }
}

fn check(name: &'static str, expected: &'static str, got: f32, ok: bool) -> Result<(), SamplingError> {
    match ok {
        true => Ok(()),
        false => Err(SamplingError::Parameter { name, expected, got }),
    }
}
