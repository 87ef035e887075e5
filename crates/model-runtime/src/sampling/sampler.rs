//! One token from one row of logits.

use rayon::prelude::*;

use super::error::SamplingError;
use super::nucleus;
use super::params::SamplingParams;
use super::random::random_bits;
use super::select::{self, key, top};
use super::weights::Weights;

/// vLLM raises smaller temperatures to this one.
const SMALLEST_TEMPERATURE: f32 = 1e-2;
/// Tokens whose weights are summed together.
const BLOCK: usize = 1024;
/// The smallest number of blocks that a thread sums: 20 us of work.
const PART: usize = 8;
/// Running maxima that are computed at the same time, so that the compiler vectorises the search.
const LANES: usize = 16;

/// Temperature, min-p, top-k, top-p and the sample (steps 4 to 8 of [`sample_row`](super::sample_row)) on
/// logits that are final otherwise, for output position `position`.
pub(super) fn sample(logits: &[f32], params: &SamplingParams, position: u64) -> Result<u32, SamplingError> {
    let (likeliest, max) = argmax(logits)?;
    if params.is_greedy() {
        return Ok(likeliest);
    }
    let temperature = params.temperature.max(SMALLEST_TEMPERATURE);
    let weights = Weights { max, temperature, min_p: params.min_p };
    let random = random_bits(params.seed, position);
    let sampled = if params.top_k > 0 && params.top_k < logits.len() {
        draw_top_k(logits, params, &weights, random)
    } else if params.top_p < 1.0 {
        let smallest = nucleus::smallest_key(logits, params.top_p, &weights);
        sample_weighted(logits, |i, x| if key(x, i) >= smallest { weights.of(x) } else { 0 }, random)
    } else {
        sample_weighted(logits, |_, x| weights.of(x), random)
    };
    Ok(sampled.unwrap_or(likeliest))
}

/// The likeliest token and its logit; the lower id of equals.
pub(super) fn argmax(logits: &[f32]) -> Result<(u32, f32), SamplingError> {
    let mut maxima = [f32::NEG_INFINITY; LANES];
    let mut invalid = [false; LANES];
    let (rows, rest) = logits.as_chunks::<LANES>();
    for row in rows {
        for (lane, &x) in row.iter().enumerate() {
            maxima[lane] = if x > maxima[lane] { x } else { maxima[lane] };
            invalid[lane] |= is_invalid(x);
        }
    }
    let max = maxima.iter().chain(rest).fold(f32::NEG_INFINITY, |m, &x| if x > m { x } else { m });
    if invalid.contains(&true) || rest.iter().any(|&x| is_invalid(x)) {
        let bad = (0u32..).zip(logits).find(|&(_, &x)| is_invalid(x));
        let (token_id, value) = bad.map_or((0, f32::NAN), |(i, &x)| (i, x));
        return Err(SamplingError::NotFinite { token_id, value });
    }
    match logits.iter().position(|&x| x == max) {
        Some(i) if max > f32::NEG_INFINITY => Ok((i as u32, max)),
        _ => Err(SamplingError::Empty),
    }
}

/// NaN or +inf: -inf is how a token is excluded.
#[inline(always)]
fn is_invalid(logit: f32) -> bool {
    logit.is_nan() || logit == f32::INFINITY
}

/// The sample among the `top_k` likeliest tokens and, of these, the nucleus of `top_p`.
fn draw_top_k(logits: &[f32], params: &SamplingParams, weights: &Weights, random: u64) -> Option<u32> {
    let token = |key| {
        let id = select::id(key);
        (id, logits.get(id as usize).map_or(0, |&x| weights.of(x)))
    };
    let mut kept: Vec<(u32, u64)> = top(logits, params.top_k).into_iter().map(token).collect();
    if params.top_p < 1.0 {
        let wanted = params.top_p as f64 * kept.iter().map(|(_, w)| w).sum::<u64>() as f64;
        let mut before = 0u64;
        kept.retain(|(_, weight)| {
            let keep = (before as f64) < wanted;
            before += weight;
            keep
        });
    }
    kept.sort_unstable();
    let total = kept.iter().map(|(_, w)| w).sum();
    at_share(kept, share(total, random))
}

/// The sample over the whole vocabulary with these weights: block sums lead to the block of the sampled token. It uses
/// the pool's threads, because a decode step of one sequence has nothing else for them to do.
fn sample_weighted(logits: &[f32], weight: impl Fn(u32, f32) -> u64 + Sync, random: u64) -> Option<u32> {
    let blocks = || (0u32..).step_by(BLOCK).zip(logits.chunks(BLOCK));
    let weights =
        |(first, block)| -> _ { (first..).zip(block).map(|(i, &x): (u32, &f32)| (i, weight(i, x))) };
    let sum = |(i, block)| weights((i as u32 * BLOCK as u32, block)).map(|(_, w)| w).sum();
    let sums: Vec<u64> = logits.par_chunks(BLOCK).enumerate().with_min_len(PART).map(sum).collect();
    let mut share = share(sums.iter().sum(), random);
    for (block, sum) in blocks().zip(sums) {
        if share < sum {
            return at_share(weights(block), share);
        }
        share -= sum;
    }
    None
}

/// The part of the total that 64 random bits stand for; below the total.
fn share(total: u64, random: u64) -> u64 {
    ((random as u128 * total as u128) >> 64) as u64
}

/// The first token at which the running weight exceeds `share`.
fn at_share(tokens: impl IntoIterator<Item = (u32, u64)>, mut share: u64) -> Option<u32> {
    for (id, weight) in tokens {
        if share < weight {
            return Some(id);
        }
        share -= weight;
    }
    None
}
