//! What a window tells about the next one: mean, spread, covariance, drift, forecast.

use crate::error::{Result, expect_len};
use crate::loads::{Loads, sum_steps};

/// Statistics of one layer over the episodes.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerStats {
    /// Mean load of every expert.
    pub mean: Vec<f64>,
    /// Unbiased variance of every expert's load; zero with a single episode.
    pub variance: Vec<f64>,
    /// Unbiased covariance `[experts, experts]`; zero with a single episode.
    pub covariance: Vec<f64>,
}

impl LayerStats {
    /// Statistics of layer `layer`.
    ///
    /// # Panics
    /// If `layer` is out of range.
    pub fn of(loads: &Loads, layer: usize) -> Self {
        let steps = loads.steps();
        let experts = loads.experts();
        let rows = loads.layer(layer);
        let mean = mean_of(rows, experts);
        let mut covariance = vec![0.0; experts * experts];
        if steps > 1 {
            let scale = 1.0 / (steps - 1) as f64;
            for row in rows.chunks_exact(experts) {
                let deviation: Vec<f64> = row.iter().zip(&mean).map(|(v, m)| v - m).collect();
                for (line, a) in covariance.chunks_exact_mut(experts).zip(&deviation) {
                    line.iter_mut().zip(&deviation).for_each(|(c, b)| *c += a * b * scale);
                }
            }
        }
        let variance = (0..experts).map(|e| covariance[e * experts + e]).collect();
        Self { mean, variance, covariance }
    }
}

/// The share of a layer's tokens that went to other experts between two windows: half the L1 distance of the two
/// popularity distributions, 0 (equal) to 1 (disjoint). If a window is empty, the drift is 0.
///
/// # Errors
/// If the windows differ in layers or experts.
pub fn drift(before: &Loads, after: &Loads) -> Result<Vec<f64>> {
    expect_len("layers of the later window", before.layers(), after.layers())?;
    expect_len("experts of the later window", before.experts(), after.experts())?;
    let before = before.summed();
    let after = after.summed();
    Ok((0..before.layers())
        .map(|l| {
            let a = before.layer(l);
            let b = after.layer(l);
            let (total_a, total_b): (f64, f64) = (a.iter().sum(), b.iter().sum());
            if total_a == 0.0 || total_b == 0.0 {
                return 0.0;
            }
            a.iter().zip(b).map(|(x, y)| (x / total_a - y / total_b).abs()).sum::<f64>() / 2.0
        })
        .collect())
}

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
