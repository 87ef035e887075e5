//! The arithmetic of parity: relative errors, argmax, top-k sets and gaps.

/// `||ours - reference|| / ||reference||` in f64; infinite if anything is not finite.
pub fn relative_error(ours: &[f32], reference: &[f32]) -> f64 {
    let mut difference = 0f64;
    let mut norm = 0f64;
    for (&a, &b) in ours.iter().zip(reference) {
        let d = a as f64 - b as f64;
        difference += d * d;
        norm += b as f64 * b as f64;
    }
    let error = (difference / norm.max(f64::MIN_POSITIVE)).sqrt();
    if error.is_finite() && ours.len() == reference.len() { error } else { f64::INFINITY }
}

/// The largest absolute difference; infinite if anything is not finite.
pub fn max_difference(ours: &[f32], reference: &[f32]) -> f64 {
    let differences = ours.iter().zip(reference).map(|(&a, &b)| (a as f64 - b as f64).abs());
    differences.fold(0., |m, d| if d.is_finite() { f64::max(m, d) } else { f64::INFINITY })
}

/// Index of the largest value; the first among equals.
pub fn argmax(row: &[f32]) -> usize {
    let mut best = 0;
    for (i, &x) in row.iter().enumerate() {
        if x > row[best] {
            best = i;
        }
    }
    best
}

/// Whether two id lists hold the same set.
pub fn same_set(a: &[u32], b: &[u32]) -> bool {
    let sorted = |ids: &[u32]| {
        let mut ids = ids.to_vec();
        ids.sort_unstable();
        ids
    };
    sorted(a) == sorted(b)
}

/// How clearly a row of keys separates its k largest from the rest: the k-th minus the
/// (k+1)-th. Infinite if there is no (k+1)-th.
pub fn top_k_gap(keys: &[f32], k: usize) -> f32 {
    let mut sorted = keys.to_vec();
    sorted.sort_unstable_by(|a, b| b.total_cmp(a));
    match (k.checked_sub(1).and_then(|i| sorted.get(i)), sorted.get(k)) {
        (Some(last), Some(next)) => last - next,
        _ => f32::INFINITY,
    }
}

/// Groups of experts, of which the best are kept.
#[derive(Clone, Copy, Debug)]
pub struct Groups {
    /// Number of equal groups of consecutive experts.
    pub count: usize,
    /// How many are kept.
    pub kept: usize,
    /// The score of a group is the sum of this number of its best experts.
    pub summed: usize,
}

impl Groups {
    /// The score of a group with these keys.
    fn score(self, group: &[f32]) -> f32 {
        let mut sorted = group.to_vec();
        sorted.sort_unstable_by(|a, b| b.total_cmp(a));
        sorted.iter().take(self.summed).sum()
    }

    /// [`top_k_gap`] for a selection of k experts from the kept groups: the smaller of two gaps. One is the gap between
    /// groups, divided by the number of keys in their sums. The other is the gap between the experts of the kept
    /// groups.
    pub fn gap(self, keys: &[f32], k: usize) -> f32 {
        let size = (keys.len() / self.count.max(1)).max(1);
        let mut by_score: Vec<&[f32]> = keys.chunks(size).collect();
        by_score.sort_by(|a, b| self.score(b).total_cmp(&self.score(a)));
        let scores: Vec<f32> = by_score.iter().map(|group| self.score(group)).collect();
        let members: Vec<f32> = by_score.iter().take(self.kept).copied().flatten().copied().collect();
        (top_k_gap(&scores, self.kept) / self.summed as f32).min(top_k_gap(&members, k))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_relative_and_nan_never_passes() {
        assert_eq!(relative_error(&[3., 4.], &[3., 4.]), 0.);
        assert!((relative_error(&[3., 5.], &[3., 4.]) - 0.2).abs() < 1e-12);
        assert_eq!(relative_error(&[f32::NAN, 4.], &[3., 4.]), f64::INFINITY);
        assert_eq!(relative_error(&[3.], &[3., 4.]), f64::INFINITY);
        assert_eq!(max_difference(&[1., f32::NAN], &[1., 1.]), f64::INFINITY);
        assert_eq!(max_difference(&[1., 3.], &[1., 1.]), 2.);
    }

    #[test]
    fn sets_and_gaps() {
        assert!(same_set(&[3, 1], &[1, 3]) && !same_set(&[3, 1], &[1, 2]));
        assert_eq!(top_k_gap(&[0.1, 0.5, 0.25], 1), 0.25);
        assert_eq!(top_k_gap(&[0.1, 0.5], 2), f32::INFINITY);
        // Two of three pairs stay: 1.0 and 0.5 lead, 0.25 apart from the third; then 0.5 over 0.375.
        let keys = [0.125, 0.5, 0.375, 1.0, 0.25, 0.0];
        let pairs = Groups { count: 3, kept: 2, summed: 1 };
        assert_eq!(pairs.gap(&keys, 2), 0.125);
        assert_eq!(pairs.gap(&[0.125, 0.5, 0.0, 1.0, 0.4375, 0.0], 2), 0.0625);
        assert_eq!(Groups { count: 1, kept: 1, summed: 1 }.gap(&keys, 2), top_k_gap(&keys, 2));
        // Pairs are 0.625, 1.375 and 0.25: 0.375 apart, from two keys each.
        assert_eq!(Groups { summed: 2, ..pairs }.gap(&keys, 1), 0.1875);
        assert_eq!(argmax(&[1., 2., 2.]), 1);
    }
}
