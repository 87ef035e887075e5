//! The likeliest tokens of a row in a total order: higher logit first, then lower id.

/// A token as an integer that orders as (logit, lower id first). -0 and 0 are the same logit.
pub(super) fn key(logit: f32, id: u32) -> u64 {
    let bits = (logit + 0.0).to_bits();
    let ordered = if bits >> 31 == 0 { bits | 1 << 31 } else { !bits };
    (ordered as u64) << 32 | !id as u64
}

/// The token of a key.
pub(super) fn id(key: u64) -> u32 {
    !(key as u32)
}

/// The logit of a key.
pub(super) fn logit(key: u64) -> f32 {
    let ordered = (key >> 32) as u32;
    f32::from_bits(if ordered >> 31 == 0 { !ordered } else { ordered & !(1 << 31) })
}

/// The keys of the `n` likeliest tokens, likeliest first, or of all if there are fewer.
///
/// One pass with a bounded buffer: keys above the best lower bound known so far are collected, and when the buffer is
/// full its lower half is removed.
pub(super) fn top(logits: &[f32], n: usize) -> Vec<u64> {
    let n = n.min(logits.len());
    if n == 0 {
        return Vec::new();
    }
    let capacity = (2 * n).max(64);
    let mut keys: Vec<u64> = Vec::with_capacity(capacity.min(logits.len()));
    let mut floor = 0;
    for (i, &logit) in (0u32..).zip(logits) {
        let key = key(logit, i);
        if key <= floor {
            continue;
        }
        keys.push(key);
        if keys.len() == capacity {
            let (_, &mut smallest, _) = keys.select_nth_unstable_by(n - 1, |a, b| b.cmp(a));
            floor = smallest;
            keys.truncate(n);
        }
    }
    keys.sort_unstable_by(|a, b| b.cmp(a));
    keys.truncate(n);
    keys
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn top_is_a_sorted_prefix(
            logits in prop::collection::vec(prop::sample::select(vec![-1.5f32, -0.0, 0.0, 2.0, 1e-40, f32::NEG_INFINITY, 7.25]), 0..400),
            n in 0usize..420,
        ) {
            let mut want: Vec<u32> = (0..logits.len() as u32).collect();
            want.sort_by(|&a, &b| logits[b as usize].total_cmp(&(logits[a as usize])).then(a.cmp(&b)));
            // total_cmp tells -0 from 0; the definition does not.
            want.sort_by(|&a, &b| logits[b as usize].partial_cmp(&logits[a as usize]).unwrap().then(a.cmp(&b)));
            want.truncate(n);
            prop_assert!(top(&logits, n).into_iter().all(|key| logit(key) == logits[id(key) as usize]));
            let got: Vec<u32> = top(&logits, n).into_iter().map(id).collect();
            prop_assert_eq!(got, want);
        }
    }
}
