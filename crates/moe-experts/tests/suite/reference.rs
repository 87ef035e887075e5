//! The definition of an expert MLP in f64, written independently of the kernels. It includes a bound on the error of a
//! kernel that sums in f32 and rounds the activation once.

use candle_core::{DType, Device, Result, Tensor};
use moe_experts::{Activation, ExpertWeights, NO_EXPERT};
use proptest::prelude::*;

/// Experts, tokens and routing.
#[derive(Clone, Debug)]
pub struct Problem {
    pub dtype: DType,
    pub activation: Activation,
    pub experts: usize,
    pub hidden: usize,
    pub width: usize,
    pub tokens: usize,
    pub top_k: usize,
    /// [T, K] physical ids.
    pub ids: Vec<u32>,
    /// The map \[P\] from physical to local ids; without it both are the same.
    pub map: Option<Vec<i32>>,
    /// Values in f64 that the dtype can represent exactly.
    pub x: Vec<f64>,
    pub w13: Vec<f64>,
    pub w2: Vec<f64>,
    pub w13_bias: Option<Vec<f64>>,
    pub w2_bias: Option<Vec<f64>>,
}

impl Problem {
    pub fn local(&self, slot: usize) -> Option<usize> {
        let id = self.ids[slot];
        if id == NO_EXPERT {
            return None;
        }
        match &self.map {
            None => Some(id as usize),
            Some(map) => usize::try_from(map[id as usize]).ok(),
        }
    }

    pub fn tensor(&self, values: &[f64], dims: &[usize]) -> Result<Tensor> {
        Tensor::from_slice(values, dims, &Device::Cpu)?.to_dtype(self.dtype)
    }

    pub fn weights(&self) -> Result<ExpertWeights> {
        let e = self.experts;
        let h = self.hidden;
        let i = self.width;
        let bias = |b: &Option<Vec<f64>>, n| b.as_ref().map(|b| self.tensor(b, &[e, n])).transpose();
        let w13 = self.tensor(&self.w13, &[e, 2 * i, h])?;
        let w2 = self.tensor(&self.w2, &[e, h, i])?;
        ExpertWeights::new(w13, w2, bias(&self.w13_bias, 2 * i)?, bias(&self.w2_bias, h)?)
    }

    pub fn rows(&self) -> Result<Tensor> {
        self.tensor(&self.x, &[self.tokens, self.hidden])
    }

    /// Returns the output row of one token in one expert, and the bound on the error of each element.
    pub fn expert_row(&self, token: usize, e: usize) -> Vec<(f64, f64)> {
        let h = self.hidden;
        let n = self.width;
        let x = &self.x[token * h..(token + 1) * h];
        let product = |row: usize| {
            let w = &self.w13[(e * 2 * n + row) * h..][..h];
            let bias = self.w13_bias.as_ref().map_or(0., |b| b[e * 2 * n + row]);
            let terms = x.iter().zip(w).map(|(x, w)| x * w);
            let magnitude: f64 = terms.clone().map(f64::abs).sum::<f64>() + bias.abs();
            (terms.sum::<f64>() + bias, magnitude * SUM_ERROR)
        };
        let inner: Vec<(f64, f64)> = (0..n).map(|i| self.activated(product(i), product(n + i))).collect();
        let row = |o: usize| {
            let w = &self.w2[(e * h + o) * n..][..n];
            let bias = self.w2_bias.as_ref().map_or(0., |b| b[e * h + o]);
            let value = inner.iter().zip(w).map(|((a, _), w)| a * w).sum::<f64>() + bias;
            let carried: f64 = inner.iter().zip(w).map(|((_, err), w)| err * w.abs()).sum();
            let magnitude = inner.iter().zip(w).map(|((a, _), w)| (a * w).abs()).sum::<f64>() + bias.abs();
            (value, carried + magnitude * SUM_ERROR + 1e-30)
        };
        (0..h).map(row).collect()
    }

    /// Returns the activation of a gate and an up value with the error that both have, rounded to the dtype.
    fn activated(&self, (g, dg): (f64, f64), (u, du): (f64, f64)) -> (f64, f64) {
        let value = gated(self.activation, g, u);
        let corners = [(-dg, -du), (-dg, du), (dg, -du), (dg, du)];
        let moved = corners.map(|(dg, du)| (gated(self.activation, g + dg, u + du) - value).abs());
        let function = 1e-6 * (g.abs() + 1.) * (u.abs() + 1.);
        let rounding = match self.dtype {
            DType::F32 => 2f64.powi(-24) * value.abs(),
            DType::BF16 => 2f64.powi(-8) * value.abs(),
            _ => 2f64.powi(-11) * value.abs() + 2f64.powi(-24),
        };
        (value, moved.into_iter().fold(0., f64::max) + function + rounding)
    }
}

/// The relative error of a sum of at most 80 products in f32, in any order.
const SUM_ERROR: f64 = 80. / (1u64 << 24) as f64;

fn gated(activation: Activation, g: f64, u: f64) -> f64 {
    let sigmoid = |x: f64| 1. / (1. + (-x).exp());
    match activation {
        Activation::SwiGlu => g * sigmoid(g) * u,
        Activation::Relu => g.max(0.) * u,
        Activation::ClampedSwiGlu { limit } => {
            let limit = f64::from(limit);
            let g = g.min(limit);
            g * sigmoid(g) * u.clamp(-limit, limit)
        }
        Activation::SwiGluOai { alpha, limit } => {
            let alpha = f64::from(alpha);
            let limit = f64::from(limit);
            let g = g.min(limit);
            let u = u.max(-limit).min(limit);
            g * sigmoid(alpha * g) * (u + 1.)
        }
        Activation::Gelu => g * (1. + erf(g / 2f64.sqrt())) / 2. * u,
        Activation::GeluTanh => {
            let inner = (2. / std::f64::consts::PI).sqrt() * (g + 0.044715 * g.powi(3));
            g * (1. + inner.tanh()) / 2. * u
        }
        other => panic!("no definition of {other:?} here"),
    }
}

/// Computes the error function by Simpson's rule over [0, x].
fn erf(x: f64) -> f64 {
    let x = x.clamp(-6., 6.);
    let n = 400;
    let f = |i: usize| (-(x * i as f64 / n as f64).powi(2)).exp();
    let inner: f64 = (1..n).map(|i| f(i) * if i % 2 == 1 { 4. } else { 2. }).sum();
    2. / std::f64::consts::PI.sqrt() * (f(0) + inner + f(n)) * x / (3. * n as f64)
}

/// Returns `n` values in (-scale, scale) that the dtype can represent exactly.
pub fn values(n: usize, scale: f64, seed: u64, dtype: DType) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let sample = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let uniform = (state >> 40) as f64 / (1u64 << 23) as f64 - 1.;
        match dtype {
            DType::BF16 => half::bf16::from_f64(uniform * scale).to_f64(),
            DType::F16 => half::f16::from_f64(uniform * scale).to_f64(),
            _ => f64::from((uniform * scale) as f32),
        }
    };
    std::iter::repeat_with(sample).take(n).collect()
}

/// How tokens choose among physical experts.
#[derive(Clone, Copy, Debug)]
enum Load {
    Even,
    /// Every slot chooses the same expert, so all other experts are empty.
    One,
    Absent,
}

pub fn dtypes() -> impl Strategy<Value = DType> {
    prop_oneof![Just(DType::F32), Just(DType::BF16), Just(DType::F16)]
}

fn activations() -> impl Strategy<Value = Activation> {
    prop_oneof![
        Just(Activation::SwiGlu),
        (0.5f32..2., 0.3f32..3.).prop_map(|(alpha, limit)| Activation::SwiGluOai { alpha, limit }),
        (0.3f32..3.).prop_map(|limit| Activation::ClampedSwiGlu { limit }),
        Just(Activation::Relu),
        Just(Activation::Gelu),
        Just(Activation::GeluTanh),
    ]
}

/// Generates ids [T, K] over `physical` experts. Some slots have no expert.
fn routing(slots: usize, physical: usize) -> impl Strategy<Value = Vec<u32>> {
    let loads = prop_oneof![4 => Just(Load::Even), 1 => Just(Load::One), 1 => Just(Load::Absent)];
    let id = 0..physical as u32;
    let chosen = proptest::collection::vec((id.clone(), 0u8..10), slots);
    (loads, id, chosen).prop_map(|(load, one, chosen)| match load {
        Load::Even => chosen.into_iter().map(|(id, p)| if p == 0 { NO_EXPERT } else { id }).collect(),
        Load::One => vec![one; chosen.len()],
        Load::Absent => vec![NO_EXPERT; chosen.len()],
    })
}

/// Generates an expert map with holes: the local experts have shuffled physical ids.
fn maps(experts: usize) -> impl Strategy<Value = Option<Vec<i32>>> {
    let holes = (0usize..4).prop_flat_map(move |holes| {
        let mut map: Vec<i32> = (0..experts as i32).collect();
        map.extend(std::iter::repeat_n(-1, holes));
        Just(map).prop_shuffle().prop_map(Some)
    });
    prop_oneof![Just(None), holes]
}

pub fn problems() -> impl Strategy<Value = Problem> {
    let sizes = (1usize..6, 1usize..40, 1usize..40, 0usize..12, 1usize..4);
    let kind = (dtypes(), activations(), any::<bool>(), any::<bool>(), any::<u64>());
    (sizes, kind).prop_flat_map(|(sizes, kind)| {
        let (experts, _, _, tokens, top_k) = sizes;
        maps(experts).prop_flat_map(move |map| {
            let physical = map.as_ref().map_or(experts, Vec::len);
            routing(tokens * top_k, physical).prop_map(move |ids| problem(sizes, kind, map.clone(), ids))
        })
    })
}

fn problem(
    (experts, hidden, width, tokens, top_k): (usize, usize, usize, usize, usize),
    (dtype, activation, bias13, bias2, seed): (DType, Activation, bool, bool, u64),
    map: Option<Vec<i32>>,
    ids: Vec<u32>,
) -> Problem {
    let v = |n: usize, scale: f64, salt: u64| values(n, scale, seed.wrapping_add(salt), dtype);
    Problem {
        x: v(tokens * hidden, 1., 1),
        w13: v(experts * 2 * width * hidden, 1., 2),
        w2: v(experts * hidden * width, 1., 3),
        w13_bias: bias13.then(|| v(experts * 2 * width, 2., 4)),
        w2_bias: bias2.then(|| v(experts * hidden, 2., 5)),
        dtype,
        activation,
        experts,
        hidden,
        width,
        tokens,
        top_k,
        ids,
        map,
    }
}

/// Returns a problem of fixed sizes in which slot k of token t chooses expert (t + k) mod E.
pub fn example(dtype: DType) -> Problem {
    let experts = 4;
    let tokens = 5;
    let top_k = 2;
    let ids = (0..tokens * top_k).map(|s| ((s / top_k + s % top_k) % experts) as u32).collect();
    problem((experts, 24, 16, tokens, top_k), (dtype, Activation::SwiGlu, false, false, 7), None, ids)
}
