//! Rotary position embeddings: rows of cosines and sines for the positions of a step.
//!
//! The formulas are the formulas of transformers 5.17 (`modeling_rope_utils.py`), evaluated with the same roundings:
//! every operation that torch does in f32 is rounded to f32 here.
//!
//! Dynamic NTK is stateful in transformers: each forward pass computes the frequencies for the longest sequence seen so
//! far. Here each row has its own length for its frequencies, `rope_len = max(prompt length, position + 1)`: tokens of
//! a prompt use the prompt's length however the prompt is chunked, generated tokens their own. So a token's bits depend
//! only on its own sequence, and one prefill followed by decoding agrees with transformers.

use candle_core::{DType, Result, bail};
use rayon::prelude::*;

use moe_kernels::arguments::{expect_dims, expect_dtype};
use moe_kernels::{Exec, Scratch, View, ViewMut};

use crate::config::{RopeConfig, RopeScaling, Yarn};

/// Rows below which threads cost more than they save.
const PARALLEL_ROWS: usize = 32;

/// Computes cosine and sine rows.
#[derive(Clone, Debug)]
pub struct Rope {
    config: RopeConfig,
    inv_freq: Vec<f32>,
    attention_factor: f32,
}

/// Cosines and sines of a step, [T, D/2] f32 each, in scratch.
pub struct RopeRows {
    cos: Scratch,
    sin: Scratch,
}

impl RopeRows {
    /// Cosines, [T, D/2] f32.
    pub fn cos(&self) -> View<'_> {
        self.cos.view()
    }

    /// Sines, [T, D/2] f32.
    pub fn sin(&self) -> View<'_> {
        self.sin.view()
    }
}

impl Rope {
    /// The config of these rows.
    pub fn config(&self) -> &RopeConfig {
        &self.config
    }

    /// Precomputes the frequencies of a config.
    pub fn new(config: RopeConfig) -> Self {
        let theta = config.theta as f32;
        let (inv_freq, attention_factor) = match &config.scaling {
            // Dynamic frequencies up to max_position_embeddings are the default ones.
            RopeScaling::Default | RopeScaling::Dynamic { .. } => (inv_freq(theta, config.dim), 1.0),
            RopeScaling::Linear { factor } => {
                let mut freq = inv_freq(theta, config.dim);
                freq.iter_mut().for_each(|f| *f /= *factor as f32);
                (freq, 1.0)
            }
            RopeScaling::Yarn(yarn) => (yarn_inv_freq(&config, yarn), yarn.attention_factor as f32),
        };
        let inv_freq = padded(inv_freq, &config);
        Self { config, inv_freq, attention_factor }
    }

    /// Inverse frequencies, [D/2] (0 for dimensions that are not rotated), for rows of a sequence of `rope_len` tokens.
    pub fn inv_freq(&self, rope_len: u32) -> std::borrow::Cow<'_, [f32]> {
        match self.config.scaling {
            RopeScaling::Dynamic { factor } if rope_len as usize > self.config.max_position_embeddings => {
                padded(dynamic_inv_freq(&self.config, factor, rope_len), &self.config).into()
            }
            _ => (&self.inv_freq).into(),
        }
    }

    /// Rows for a step, in scratch of the workspace.
    ///
    /// `positions` and `rope_len` are `[T]` u32 (`rope_len` as described in the module).
    pub fn rows(&self, positions: View, rope_len: View, ex: &mut Exec) -> Result<RopeRows> {
        let dims = [positions.elem_count(), self.config.head_dim / 2];
        let mut rows = RopeRows { cos: ex.scratch(DType::F32, &dims)?, sin: ex.scratch(DType::F32, &dims)? };
        self.rows_into(positions, rope_len, rows.cos.view_mut(), rows.sin.view_mut(), ex)?;
        Ok(rows)
    }

    /// Writes the rows to `cos` and `sin`, [T, D/2] f32.
    pub fn rows_into(
        &self,
        positions: View,
        rope_len: View,
        mut cos: ViewMut,
        mut sin: ViewMut,
        ex: &mut Exec,
    ) -> Result<()> {
        let t = positions.elem_count();
        let half = self.config.head_dim / 2;
        expect_dims("rope", "positions", &positions, &[t])?;
        expect_dims("rope", "rope_len", &rope_len, &[t])?;
        for (name, out) in [("cos", &cos), ("sin", &sin)] {
            expect_dtype("rope", name, out, DType::F32)?;
            expect_dims("rope", name, out, &[t, half])?;
        }
        #[cfg(feature = "cuda")]
        if ex.is_cuda() {
            let max = self.config.max_position_embeddings as f32;
            let frequencies = moe_kernels::cuda::RopeFrequencies {
                inv_freq: &self.inv_freq,
                attention_factor: self.attention_factor,
                dynamic: match self.config.scaling {
                    RopeScaling::Dynamic { factor } => Some((self.config.theta as f32, factor as f32, max)),
                    _ => None,
                },
            };
            return moe_kernels::cuda::rope_rows_into(positions, rope_len, &frequencies, cos, sin, ex);
        }
        let positions = positions.cpu::<u32>()?;
        let rope_len = rope_len.cpu::<u32>()?;
        if let Some(row) = positions.iter().zip(rope_len).position(|(p, len)| p >= len) {
            bail!(
                "rope: row {row}: position {} needs rope_len above it, got {}",
                positions[row],
                rope_len[row]
            )
        }
        let cos = cos.cpu_mut::<f32>()?;
        let sin = sin.cpu_mut::<f32>()?;
        let rows = cos.chunks_mut(half).zip(sin.chunks_mut(half)).zip(positions.iter().zip(rope_len));
        if t < PARALLEL_ROWS || ex.num_threads() == 1 {
            rows.for_each(|((cos, sin), (&p, &len))| self.row(p, len, cos, sin));
            return Ok(());
        }
        let rows = cos.par_chunks_mut(half).zip(sin.par_chunks_mut(half));
        let rows = rows.zip(positions.par_iter().zip(rope_len));
        ex.install(|| rows.for_each(|((cos, sin), (&p, &len))| self.row(p, len, cos, sin)));
        Ok(())
    }

    fn row(&self, position: u32, rope_len: u32, cos: &mut [f32], sin: &mut [f32]) {
        let freq = self.inv_freq(rope_len);
        for ((c, s), f) in cos.iter_mut().zip(sin).zip(freq.iter()) {
            // The angle is an f32 product as in torch; f64 functions rounded once do not depend on
            // the machine's f32 libm.
            let (sine, cosine) = ((position as f32 * f) as f64).sin_cos();
            // A pair that is not rotated keeps its values.
            let factor = if *f == 0.0 { 1.0 } else { self.attention_factor };
            *c = cosine as f32 * factor;
            *s = sine as f32 * factor;
        }
    }
}

/// The rotary embeddings of a model's layers; layers of equal settings share one.
#[derive(Clone, Debug)]
pub struct LayerRopes {
    ropes: Vec<Rope>,
    /// Which of `ropes` each layer has.
    of_layer: Vec<usize>,
}

/// The rows of a step for each of a model's rotary embeddings.
pub struct LayerRopeRows<'a> {
    rows: Vec<RopeRows>,
    of_layer: &'a [usize],
}

impl LayerRopes {
    /// Makes the embeddings from the settings of each layer, first layer first.
    pub fn new(layers: &[RopeConfig]) -> Self {
        let mut ropes: Vec<Rope> = Vec::new();
        let mut of_layer = Vec::with_capacity(layers.len());
        for config in layers {
            let known = ropes.iter().position(|rope| rope.config == *config);
            of_layer.push(known.unwrap_or(ropes.len()));
            if known.is_none() {
                ropes.push(Rope::new(config.clone()));
            }
        }
        Self { ropes, of_layer }
    }

    /// Rows for a step, as [`Rope::rows`] gives them.
    pub fn rows(&self, positions: View, rope_len: View, ex: &mut Exec) -> Result<LayerRopeRows<'_>> {
        let rows = self.ropes.iter().map(|rope| rope.rows(positions, rope_len, ex)).collect::<Result<_>>()?;
        Ok(LayerRopeRows { rows, of_layer: &self.of_layer })
    }
}

impl LayerRopeRows<'_> {
    /// The rows that a layer reads.
    pub fn layer(&self, layer: usize) -> Result<&RopeRows> {
        match self.of_layer.get(layer).and_then(|&rope| self.rows.get(rope)) {
            Some(rows) => Ok(rows),
            None => {
                bail!("layer {layer} is outside of the rotary embeddings of {} layers", self.of_layer.len())
            }
        }
    }
}

/// The frequencies of a whole head: dimensions that are not rotated have the angle 0, a cosine of 1 and a sine of 0.
fn padded(mut inv_freq: Vec<f32>, config: &RopeConfig) -> Vec<f32> {
    inv_freq.resize(config.head_dim / 2, 0.0);
    inv_freq
}

/// A power with one rounding to f32, as close to torch's f32 `pow` as one can state.
fn pow(base: f32, exponent: f32) -> f32 {
    (base as f64).powf(exponent as f64) as f32
}

/// theta^(2i/D) for i in 0..D/2.
fn pos_freqs(theta: f32, dim: usize) -> impl Iterator<Item = f32> {
    (0..dim / 2).map(move |i| pow(theta, (2 * i) as f32 / dim as f32))
}

fn inv_freq(theta: f32, dim: usize) -> Vec<f32> {
    pos_freqs(theta, dim).map(|f| 1.0 / f).collect()
}

/// Dynamic NTK: the base for a sequence longer than `max_position_embeddings`.
fn dynamic_inv_freq(config: &RopeConfig, factor: f64, rope_len: u32) -> Vec<f32> {
    let max = config.max_position_embeddings as f32;
    let stretched = (factor as f32 * rope_len as f32) / max - (factor - 1.0) as f32;
    let exponent = config.dim as f64 / (config.dim as f64 - 2.0);
    inv_freq(config.theta as f32 * pow(stretched, exponent as f32), config.dim)
}

/// YaRN: interpolated frequencies for slow dimensions, original ones for fast dimensions, a
/// linear ramp between.
fn yarn_inv_freq(config: &RopeConfig, yarn: &Yarn) -> Vec<f32> {
    let dim = config.dim as f64;
    let correction_dim = |rotations: f64| {
        let turns = yarn.original_max_position_embeddings as f64 / (rotations * 2.0 * std::f64::consts::PI);
        dim * turns.ln() / (2.0 * config.theta.ln())
    };
    let mut low = correction_dim(yarn.beta_fast);
    let mut high = correction_dim(yarn.beta_slow);
    if yarn.truncate {
        (low, high) = (low.floor(), high.ceil());
    }
    (low, high) = (low.max(0.0), high.min(dim - 1.0));
    if low == high {
        high += 0.001; // the ramp's slope stays finite
    }
    let offset = low as f32;
    let width = (high - low) as f32;
    let blend = |(i, freq): (usize, f32)| {
        let ramp = ((i as f32 - offset) / width).clamp(0.0, 1.0);
        let keep = 1.0 - ramp;
        let interpolated = 1.0 / (yarn.factor as f32 * freq);
        let extrapolated = 1.0 / freq;
        interpolated * (1.0 - keep) + extrapolated * keep
    };
    pos_freqs(config.theta as f32, config.dim).enumerate().map(blend).collect()
}
