//! The token counts per layer and expert, summed or per episode.

use crate::error::{Error, Result, entries, expect_len, expect_some};

/// Loads `[steps, layers, experts]`. One step is an aggregate; several are episodes, each a few
/// engine steps long, whose peaks the episode objective averages.
#[derive(Clone, Debug, PartialEq)]
pub struct Loads {
    steps: usize,
    layers: usize,
    experts: usize,
    /// Layer-major, so that one layer's episodes are contiguous: `[layers, steps, experts]`.
    values: Vec<f64>,
}

impl Loads {
    /// Loads summed over the window, `[layers, experts]`.
    ///
    /// # Errors
    /// The errors of [`Loads::episodes`].
    pub fn aggregate(layers: usize, experts: usize, values: &[f64]) -> Result<Self> {
        Self::episodes(1, layers, experts, values)
    }

    /// Loads per episode, `[steps, layers, experts]`. Zero layers are allowed and give empty plans.
    ///
    /// # Errors
    /// If the buffer has the wrong size, there is no step or no expert, a load is NaN, infinite
    /// or negative, or all loads of a layer together are more than an f32 holds.
    pub fn episodes(steps: usize, layers: usize, experts: usize, values: &[f64]) -> Result<Self> {
        expect_some(&[("steps", steps), ("experts", experts)])?;
        let expected = entries("loads", &[steps, layers, experts])?;
        expect_len("loads", expected, values.len())?;
        if let Some(i) = values.iter().position(|v| !v.is_finite() || *v < 0.0) {
            let step = i / experts / layers;
            let layer = i / experts % layers;
            return Err(Error::BadLoad { step, layer, expert: i % experts, value: values[i] });
        }
        let mut by_layer = Vec::with_capacity(expected);
        for layer in 0..layers {
            for step in 0..steps {
                by_layer.extend_from_slice(&values[(step * layers + layer) * experts..][..experts]);
            }
        }
        for (layer, values) in by_layer.chunks_exact(steps * experts).enumerate() {
            check_total(layer, values)?;
        }
        Ok(Self { steps, layers, experts, values: by_layer })
    }

    /// Episodes.
    pub fn steps(&self) -> usize {
        self.steps
    }

    /// Layers.
    pub fn layers(&self) -> usize {
        self.layers
    }

    /// Logical experts.
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// One layer's loads, `[steps, experts]`.
    ///
    /// # Panics
    /// If `layer` is out of range.
    pub fn layer(&self, layer: usize) -> &[f64] {
        let size = self.steps * self.experts;
        &self.values[layer * size..][..size]
    }

    /// The same loads summed over the episodes.
    pub fn summed(&self) -> Self {
        let mut values = Vec::with_capacity(self.layers * self.experts);
        for layer in 0..self.layers {
            values.extend(sum_steps(self.layer(layer), self.experts));
        }
        Self { steps: 1, layers: self.layers, experts: self.experts, values }
    }
}

/// Fails unless [`Loads`] could hold these loads `[steps, experts]` of one layer.
pub(crate) fn check_loads(loads: &[f64], experts: usize) -> Result<()> {
    if let Some(i) = loads.iter().position(|v| !v.is_finite() || *v < 0.0) {
        return Err(Error::BadLoad { step: i / experts, layer: 0, expert: i % experts, value: loads[i] });
    }
    check_total(0, loads)
}

/// Fails if an f32 does not hold the sum of a layer's loads. Policies add loads up, some of them in f32, and an
/// infinite sum has no share.
fn check_total(layer: usize, loads: &[f64]) -> Result<()> {
    let total: f64 = loads.iter().sum();
    match total > f64::from(f32::MAX) {
        true => Err(Error::TooMuchLoad { layer, total }),
        false => Ok(()),
    }
}

/// Sums `[steps, experts]` over the steps, in step order.
pub(crate) fn sum_steps(layer: &[f64], experts: usize) -> Vec<f64> {
    let mut sum = vec![0.0; experts];
    for row in layer.chunks_exact(experts) {
        for (s, v) in sum.iter_mut().zip(row) {
            *s += v;
        }
    }
    sum
}
