//! Sampling the next token, as vLLM defines it and reproducible to the bit.
//!
//! Order of operations (vLLM's `v1/sample/sampler.py` and `logits_processor/builtin.py`):
//! temperature, min-p, top-k, top-p, draw. A temperature below 1e-5 is greedy. Ties go to the
//! lower token id everywhere.
//!
//! Logits processors that can change a greedy choice (penalties, logit bias, minimum tokens) edit
//! a row of logits before it comes here; log-probabilities read it before that.
//!
//! A draw depends on the row of logits, the request's seed and the output position alone. The
//! random number is Philox4x32-10 with the seed as key and the position as counter; token weights
//! are fixed-point integers ([`sample`]), so that sums do not depend on their order and every
//! machine draws the same token from the same logits.

mod nucleus;
mod random;
mod sampler;
mod select;
mod weights;

use candle_core::bail;
use rayon::prelude::*;

use moe_kernels::{Exec, View};

use crate::config::{Config, ConfigError};
use crate::hash::{fnv1a, mix};

pub use random::random_bits;
pub use sampler::sample;

/// Below this temperature, sampling is greedy.
const GREEDY_BELOW: f32 = 1e-5;
/// vLLM raises smaller temperatures to this one.
const SMALLEST_TEMPERATURE: f32 = 1e-2;

/// How the next token of a request is chosen. Names and meanings are vLLM's.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Divides the logits; below 1e-5 the likeliest token is taken and nothing else counts. From
    /// there up to 0.01 it counts as 0.01.
    pub temperature: f32,
    /// Keeps this many of the likeliest tokens; 0 keeps all.
    pub top_k: usize,
    /// Keeps the likeliest tokens up to this total probability; in (0, 1].
    pub top_p: f32,
    /// Keeps tokens of at least this probability relative to the likeliest; in [0, 1].
    pub min_p: f32,
    /// Key of the random numbers.
    pub seed: u64,
}

impl Default for SamplingParams {
    /// Greedy.
    fn default() -> Self {
        Self { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 0 }
    }
}

/// Why no token can be sampled.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SamplingError {
    /// A parameter is out of its range.
    #[error("{name} must be {expected}, got {got}")]
    Parameter {
        /// The parameter.
        name: &'static str,
        /// Its range.
        expected: &'static str,
        /// The value.
        got: f32,
    },
    /// A logit is NaN or +inf.
    #[error(
        "the logit of token {token_id} is {value}: the weights hold values that are not finite, or activations \
         overflowed; check the weights or use a wider dtype"
    )]
    NotFinite {
        /// The first such token.
        token_id: u32,
        /// Its logit.
        value: f32,
    },
    /// Every logit is -inf, or there is none.
    #[error("no token can be sampled: every logit is -inf")]
    Empty,
}

impl From<SamplingError> for candle_core::Error {
    fn from(e: SamplingError) -> Self {
        Self::msg(e)
    }
}

impl SamplingParams {
    /// The defaults that `generation_config.json` gives; greedy where it says nothing of sampling
    /// or has `do_sample` false.
    pub fn from_generation_config(config: &Config) -> Result<Self, ConfigError> {
        let mut params = Self::default();
        let float = |key: &str, default: f32| -> Result<f32, ConfigError> {
            Ok(config.float_or(&[key], default as f64)? as f32)
        };
        params.top_k = config.size_or(&["top_k"], 0, crate::config::limits::VOCAB_OR_NONE)?;
        (params.top_p, params.min_p) = (float("top_p", 1.0)?, float("min_p", 0.0)?);
        // A config that asks for sampling without a temperature means 1.
        let samples = config.bool_or(&["do_sample"], config.has("temperature"))?;
        params.temperature = if samples { float("temperature", 1.0)? } else { 0.0 };
        params.validate().map_err(|e| config.invalid("sampling parameters", "valid values", e))?;
        Ok(params)
    }

    /// Whether the likeliest token is always taken.
    pub fn is_greedy(&self) -> bool {
        self.temperature < GREEDY_BELOW
    }

    /// Fails for a parameter out of its range.
    pub fn validate(&self) -> Result<(), SamplingError> {
        let check = |name, expected, got: f32, ok: bool| match ok {
            true => Ok(()),
            false => Err(SamplingError::Parameter { name, expected, got }),
        };
        let t = self.temperature;
        check("temperature", "a finite number of at least 0", t, t.is_finite() && t >= 0.0)?;
        check("top_p", "above 0 and at most 1", self.top_p, self.top_p > 0.0 && self.top_p <= 1.0)?;
        check("min_p", "from 0 to 1", self.min_p, (0.0..=1.0).contains(&self.min_p))
    }
}

/// The seed of a request that brings none: a hash of the run's seed and the request's name, its
/// `custom_id` or its index in decimal digits.
pub fn request_seed(seed: u64, name: &str) -> u64 {
    mix(seed ^ mix(fnv1a(name.as_bytes())))
}

/// One row of logits to sample from.
#[derive(Clone, Copy, Debug)]
pub struct SampleRow<'a> {
    /// The request's parameters.
    pub params: &'a SamplingParams,
    /// Output position: how many tokens the request has generated before.
    pub position: u64,
}

/// Samples one token for each row of `logits`, [R, V] f32, rows in parallel. A row that cannot be
/// sampled does not affect the others.
pub fn sample_rows(
    logits: View,
    rows: &[SampleRow],
    ex: &Exec,
) -> candle_core::Result<Vec<Result<u32, SamplingError>>> {
    let &[r, v] = logits.dims() else {
        bail!("sampling: expected logits [R, V], got dims {:?}", logits.dims())
    };
    if r != rows.len() || v == 0 {
        bail!("sampling: expected logits of {} rows, got dims {:?}", rows.len(), logits.dims())
    }
    let draw = |(logits, row): (&[f32], &SampleRow)| sample(logits, row.params, row.position);
    let logits = logits.cpu::<f32>()?;
    Ok(ex.install(|| logits.par_chunks(v).zip(rows.par_iter()).map(draw).collect()))
}
