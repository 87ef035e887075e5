//! Top-p over the whole vocabulary, without sorting it.

use super::select::key;
use super::weights::{FARTHEST, Weights};

/// Classes of distance from the likeliest token.
const BUCKETS: usize = 4096;
/// Tokens whose classes are computed together.
const CHUNK: usize = 256;

/// The smallest key ([`select::key`](super::select::key)) of the nucleus: the likeliest tokens up
/// to `top_p` of the total weight.
///
/// One pass adds up the weight of each class of distance. Classes keep the order of tokens, so the edge of the nucleus
/// is in the class in which the running weight reaches its share, and only that class is sorted.
pub(super) fn smallest_key(logits: &[f32], top_p: f32, weights: &Weights) -> u64 {
    let mut mass = vec![0u64; BUCKETS];
    for logits in logits.chunks(CHUNK) {
        // Two loops: the first vectorises, the second cannot.
        let mut classes = [(0u32, 0u64); CHUNK];
        for (class, &x) in classes.iter_mut().zip(logits) {
            *class = (bucket(x, weights), weights.of(x));
        }
        for &(bucket, weight) in classes.iter().take(logits.len()) {
            mass[bucket as usize] += weight;
        }
    }
    let wanted = top_p as f64 * mass.iter().sum::<u64>() as f64;
    let mut before = 0u64;
    let mut edge = BUCKETS as u32 - 1;
    for (b, mass) in (0u32..).zip(&mass) {
        if (before + mass) as f64 >= wanted {
            edge = b;
            break;
        }
        before += mass;
    }
    let in_edge = (0u32..).zip(logits).filter(|&(_, &x)| bucket(x, weights) == edge);
    let mut candidates: Vec<(u64, u64)> = in_edge.map(|(i, &x)| (key(x, i), weights.of(x))).collect();
    candidates.sort_unstable_by(|a, b| b.cmp(a));
    for (key, weight) in candidates {
        before += weight;
        if before as f64 >= wanted {
            return key;
        }
    }
    // The running weight always reaches the share, because the last class is compared with its own sum. If rounding
    // prevented it, all tokens would stay.
    0
}

/// The class of a logit; 0 holds the likeliest token.
#[inline(always)]
fn bucket(logit: f32, weights: &Weights) -> u32 {
    const PER_UNIT: f32 = (BUCKETS - 1) as f32 / FARTHEST;
    (weights.distance(logit) * PER_UNIT) as u32
}
