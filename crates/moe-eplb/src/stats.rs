//! What a window tells about the next one.

use crate::error::Result;
use crate::loads::{Loads, sum_steps};

/// A forecast of the episodes of the next window.
///
/// Each expert's deviation from its mean fades like a first-order autoregressive process. The memory of the process is
/// estimated from all experts of the layer together. The expert's episodes are scaled to the mean level that the
/// process predicts for a window of equal length. The shape over the episodes, which the episode objective needs, does
/// not change.
///
/// # Errors
/// Never for valid loads; the result is validated like any.
pub fn forecast(loads: &Loads) -> Result<Loads> {
    let steps = loads.steps();
    let layers = loads.layers();
    let experts = loads.experts();
    let mut values = vec![0.0; steps * layers * experts];
    for layer in 0..layers {
        let rows = loads.layer(layer);
        let mean = mean_of(rows, experts);
        let persistence = persistence(&mean, rows);
        // Mean of rho, rho^2, ... over the next window.
        let mut weight = 0.0;
        let mut power = 1.0;
        for _ in 0..steps {
            power *= persistence;
            weight += power / steps as f64;
        }
        let last = &rows[(steps - 1) * experts..];
        for e in 0..experts {
            let level = mean[e] + weight * (last[e] - mean[e]);
            let scale = if mean[e] > 0.0 { level.max(0.0) / mean[e] } else { 1.0 };
            for step in 0..steps {
                values[(step * layers + layer) * experts + e] = rows[step * experts + e] * scale;
            }
        }
    }
    Loads::episodes(steps, layers, experts, &values)
}

/// Mean load of every expert over the rows `[steps, experts]`.
fn mean_of(rows: &[f64], experts: usize) -> Vec<f64> {
    let steps = (rows.len() / experts) as f64;
    sum_steps(rows, experts).into_iter().map(|sum| sum / steps).collect()
}

/// Lag-one autocorrelation of the relative deviations, pooled over experts, within 0..=0.95.
fn persistence(mean: &[f64], rows: &[f64]) -> f64 {
    let experts = mean.len();
    let steps = rows.len() / mean.len();
    let mut lagged = 0.0;
    let mut power = 0.0;
    for (e, &mean) in mean.iter().enumerate().filter(|(_, m)| **m > 0.0) {
        let deviation = |t: usize| rows[t * experts + e] / mean - 1.0;
        for t in 1..steps {
            lagged += deviation(t) * deviation(t - 1);
            power += deviation(t - 1) * deviation(t - 1);
        }
    }
    if power > 0.0 { (lagged / power).clamp(0.0, 0.95) } else { 0.0 }
}
