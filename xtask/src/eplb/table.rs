//! Numbers over layers.

/// Arithmetic mean; 0 without values.
pub fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

/// Percentile with linear interpolation between ranks; 0 without values.
pub fn percentile(values: &[f64], percent: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let Some(last) = sorted.len().checked_sub(1) else { return 0.0 };
    let rank = percent / 100.0 * last as f64;
    let low = rank as usize;
    let high = sorted[(low + 1).min(last)];
    sorted[low] + (high - sorted[low]) * (rank - low as f64)
}
