//! Loads in the form the search wants: per expert one row of lanes, every episode scaled to a mean
//! device load of 1.
//!
//! A step of the server lasts as long as its own peak device, so episodes are scaled one by one and
//! the objective is a plain mean over lanes. More episodes than [`MAX_LANES`] are summed in
//! consecutive buckets: the row then fits one cache line and the noise of single steps averages out.

/// Widest row: 16 `f32` are one cache line.
pub(crate) const MAX_LANES: usize = 16;

/// How many lanes `steps` episodes need: a power of two up to [`MAX_LANES`].
pub(crate) fn lanes_for(steps: usize) -> usize {
    steps.clamp(1, MAX_LANES).next_power_of_two()
}

/// Normalised rows of one layer. Unused lanes stay zero.
pub(crate) fn normalised<const W: usize>(layer: &[f64], experts: usize, devices: usize) -> Vec<[f32; W]> {
    let steps = layer.len() / experts;
    let lanes = steps.min(W);
    let mut sums = vec![[0f64; W]; experts];
    for (step, row) in layer.chunks_exact(experts).enumerate() {
        let lane = step * lanes / steps;
        for (sum, load) in sums.iter_mut().zip(row) {
            sum[lane] += load;
        }
    }
    let mut rows = vec![[0f32; W]; experts];
    for lane in 0..lanes {
        let total: f64 = sums.iter().map(|s| s[lane]).sum();
        if total > 0.0 {
            let scale = devices as f64 / total;
            for (row, sum) in rows.iter_mut().zip(&sums) {
                // The reciprocal of a subnormal total is infinite.
                let share =
                    if scale.is_finite() { sum[lane] * scale } else { sum[lane] / total * devices as f64 };
                row[lane] = share as f32;
            }
        }
    }
    rows
}
