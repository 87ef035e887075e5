//! The definition of the block in f64, written independently of the crates that it composes. It includes a bound on the
//! error of an implementation.

use std::sync::Arc;

use moe_comm::{Communicator, ExpertLayout, ExpertPlacement, SelfComm};
use moe_dispatch::{EpRanks, OverRanks};
use moe_layer::candle::{Result, Tensor};
use moe_layer::{
    Activation, BackendSelection, DType, Device, ExpertWeights, Experts, GatedMlp, LocalExperts, NoEp,
    PrepareFinalize, Router, RouterConfig, RouterParams, SharedExperts, SparseMoeBlock, WhoAdds,
    build_batched_experts, build_experts, select_backend,
};
use moe_layer::{ActivationFormat, ExpertsSpec};
use proptest::prelude::*;

/// Shared experts in addition to the routed ones.
#[derive(Clone, Debug)]
pub struct Shared {
    pub width: usize,
    pub w13: Vec<f64>,
    pub w2: Vec<f64>,
    pub gate: Option<Vec<f64>>,
}

/// A block and its input. The dtype can represent all values exactly.
#[derive(Clone, Debug)]
pub struct Problem {
    pub dtype: DType,
    pub config: RouterConfig,
    pub hidden: usize,
    pub width: usize,
    pub tokens: usize,
    /// [T, H]
    pub x: Vec<f64>,
    /// [E + zero experts, H]
    pub gate: Vec<f64>,
    /// [E + zero experts], if there is a correction bias.
    pub bias: Vec<f64>,
    /// [E + fused shared experts, 2I, H]
    pub w13: Vec<f64>,
    /// [E + fused shared experts, H, I]
    pub w2: Vec<f64>,
    pub shared: Option<Shared>,
}

impl Problem {
    /// The number of experts with weights.
    pub fn packed(&self) -> usize {
        self.config.num_experts + self.config.num_fused_shared_experts
    }

    pub fn tensor(&self, values: &[f64], dims: &[usize]) -> Result<Tensor> {
        Tensor::from_slice(values, dims, &Device::Cpu)?.to_dtype(self.dtype)
    }

    pub fn rows(&self) -> Result<Tensor> {
        self.tensor(&self.x, &[self.tokens, self.hidden])
    }

    pub fn gate_weight(&self) -> Result<Tensor> {
        self.tensor(&self.gate, &[self.config.num_logits(), self.hidden])
    }

    pub fn weights(&self) -> Result<ExpertWeights> {
        let e = self.packed();
        let h = self.hidden;
        let i = self.width;
        ExpertWeights::new(
            self.tensor(&self.w13, &[e, 2 * i, h])?,
            self.tensor(&self.w2, &[e, h, i])?,
            None,
            None,
        )
    }

    pub fn router(&self) -> Result<Router> {
        let bias = || Tensor::from_slice(&self.bias, self.bias.len(), &Device::Cpu)?.to_dtype(DType::F32);
        let correction_bias = self.config.correction_bias.then(bias).transpose()?;
        Router::new(self.config.clone(), RouterParams { correction_bias, ..Default::default() })
    }

    fn selection(&self, format: ActivationFormat) -> Result<BackendSelection> {
        let spec = self.weights()?.spec(Activation::SwiGlu, self.config.num_slots());
        Ok(select_backend(&ExpertsSpec { activation_format: format, ..spec }, None)?)
    }

    pub fn standard_experts(&self) -> Result<Box<dyn Experts>> {
        build_experts(&self.selection(ActivationFormat::Standard)?, self.weights()?)
    }

    /// Returns experts for blocks of at most `max_rows` rows. With `None` they have no limit.
    pub fn batched_experts(&self, max_rows: Option<usize>) -> Result<Box<dyn Experts>> {
        let selection = self.selection(ActivationFormat::BatchedExperts)?;
        match max_rows {
            None => build_experts(&selection, self.weights()?),
            Some(rows) => build_batched_experts(&selection, self.weights()?, rows),
        }
    }

    pub fn shared_experts(&self) -> Result<Option<SharedExperts>> {
        let Some(shared) = &self.shared else { return Ok(None) };
        let w13 = self.tensor(&shared.w13, &[2 * shared.width, self.hidden])?;
        let w2 = self.tensor(&shared.w2, &[self.hidden, shared.width])?;
        let mlp = GatedMlp::new(w13, w2, Activation::SwiGlu)?;
        let gate = shared.gate.as_ref().map(|g| self.tensor(g, &[1, self.hidden])).transpose()?;
        SharedExperts::new(mlp, gate).map(Some)
    }

    fn block(&self, prepare: Box<dyn PrepareFinalize>, experts: Box<dyn Experts>) -> Result<SparseMoeBlock> {
        let block = SparseMoeBlock::new(self.gate_weight()?, self.router()?, prepare, experts, 0)?;
        match self.shared_experts()? {
            Some(shared) => block.with_shared_experts(shared),
            None => Ok(block),
        }
    }

    /// Returns the block without dispatch.
    pub fn standard(&self) -> Result<SparseMoeBlock> {
        self.standard_with(self.standard_experts()?)
    }

    /// Returns the block without dispatch, with other experts.
    pub fn standard_with(&self, experts: Box<dyn Experts>) -> Result<SparseMoeBlock> {
        let prepare = NoEp::new().with_router_weight_on_input(self.config.apply_router_weight_on_input);
        self.block(Box::new(prepare), experts)
    }

    /// Returns the block in the BatchedExperts format, with room for every token in one expert.
    pub fn batched(&self) -> Result<SparseMoeBlock> {
        let (prepare, experts) = self.batched_parts()?;
        self.block(prepare, experts)
    }

    /// Returns the block on a single rank, with the backend of devices that lists slots, for calls of at most `room`
    /// tokens.
    pub fn listed(&self, room: usize) -> Result<SparseMoeBlock> {
        let layout = ExpertLayout::new(self.packed(), 1, 0, ExpertPlacement::Linear).unwrap();
        let alone: Arc<dyn Communicator> = Arc::new(SelfComm::new());
        let ranks = EpRanks::new(&layout, alone.clone(), alone)?;
        let prepare = OverRanks::low_latency(ranks, room, WhoAdds::ByRank)
            .with_router_weight_on_input(self.config.apply_router_weight_on_input);
        let experts = build_experts(&self.selection(ActivationFormat::Listed)?, self.weights()?)?;
        self.block(Box::new(prepare), experts)
    }

    /// Returns a backend of that format with its experts.
    pub fn batched_parts(&self) -> Result<(Box<dyn PrepareFinalize>, Box<dyn Experts>)> {
        let room = self.tokens.max(1);
        let prepare = NoEp::batched(LocalExperts::all(self.packed()), room)
            .with_router_weight_on_input(self.config.apply_router_weight_on_input);
        Ok((Box::new(prepare), self.batched_experts(Some(room))?))
    }

    fn row(&self, token: usize) -> &[f64] {
        &self.x[token * self.hidden..][..self.hidden]
    }

    /// Returns the ids of the chosen logits and their weights, before zero experts are removed, and the smallest gap
    /// between selection keys that decides about them.
    pub fn route(&self, token: usize) -> (Vec<usize>, Vec<f64>, f64) {
        let c = &self.config;
        let logits: Vec<f64> = self.gate.chunks(self.hidden).map(|w| dot(w, self.row(token))).collect();
        let largest = logits.iter().copied().fold(f64::MIN, f64::max);
        let total: f64 = logits.iter().map(|l| (l - largest).exp()).sum();
        let scores: Vec<f64> = logits.iter().map(|l| (l - largest).exp() / total).collect();
        let key = |e: usize| scores[e] + if c.correction_bias { self.bias[e] } else { 0. };
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| key(b).total_cmp(&key(a)));
        let gap = order.windows(2).take(c.top_k).map(|p| key(p[0]) - key(p[1])).fold(1., f64::min);
        let ids = order[..c.top_k].to_vec();
        let sum: f64 = if c.renormalize { ids.iter().map(|&e| scores[e]).sum() } else { 1. };
        let weights = ids.iter().map(|&e| scores[e] / sum * f64::from(c.routed_scaling_factor)).collect();
        (ids, weights, gap)
    }

    /// Returns the block's output for one token, and the bound on the error of each element.
    pub fn output(&self, token: usize) -> Vec<(f64, f64)> {
        let c = &self.config;
        let x = self.row(token);
        let (mut ids, mut weights, _) = self.route(token);
        ids.extend((0..c.num_fused_shared_experts).map(|s| c.num_experts + c.num_zero_experts + s));
        weights.extend(std::iter::repeat_n(f64::from(c.fused_shared_weight), c.num_fused_shared_experts));
        let mut out = vec![(0., 1e-7); self.hidden];
        for (id, weight) in ids.into_iter().zip(weights) {
            let term = match id.checked_sub(c.num_experts) {
                Some(zero) if zero < c.num_zero_experts => {
                    x.iter().map(|x| (*x, 3. * x.abs() * self.unit())).collect()
                }
                Some(fused) => self.expert(c.num_experts + fused - c.num_zero_experts, x, 0.),
                // The scaled row is rounded to the dtype, and this changes the products.
                None if c.apply_router_weight_on_input => {
                    let scaled: Vec<f64> = x.iter().map(|x| x * weight).collect();
                    add(&mut out, &self.expert(id, &scaled, self.unit()), 1.);
                    continue;
                }
                None => self.expert(id, x, 0.),
            };
            add(&mut out, &term, weight);
        }
        if let Some(s) = &self.shared {
            let scale = s.gate.as_ref().map_or(1., |g| 1. / (1. + (-dot(g, x)).exp()));
            add(&mut out, &self.mlp(&s.w13, &s.w2, s.width, x, 0.), scale);
        }
        out
    }

    fn expert(&self, e: usize, x: &[f64], input_error: f64) -> Vec<(f64, f64)> {
        let h = self.hidden;
        let i = self.width;
        self.mlp(&self.w13[e * 2 * i * h..][..2 * i * h], &self.w2[e * h * i..][..h * i], i, x, input_error)
    }

    /// Returns down(silu(gate(x)) * up(x)) and its bound. `input_error` is the relative error of `x`.
    fn mlp(&self, w13: &[f64], w2: &[f64], width: usize, x: &[f64], input_error: f64) -> Vec<(f64, f64)> {
        let magnitude =
            |row: usize| w13[row * x.len()..][..x.len()].iter().zip(x).map(|(w, x)| (w * x).abs()).sum();
        let product = |row: usize| dot(&w13[row * x.len()..][..x.len()], x);
        let inner: Vec<(f64, f64)> = (0..width)
            .map(|i| {
                let g = product(i);
                let u = product(width + i);
                let (mg, mu): (f64, f64) = (magnitude(i), magnitude(width + i));
                let value = g / (1. + (-g).exp()) * u;
                let products =
                    (input_error + 4e-6) * 1.1 * (mg * u.abs() + mu * g.abs() + 2. * mg * mu * 4e-6);
                (value, value.abs() * self.unit() + products + 1e-9)
            })
            .collect();
        let row = |w: &[f64]| {
            let value = inner.iter().zip(w).map(|((a, _), w)| a * w).sum::<f64>();
            let sum: f64 = inner.iter().zip(w).map(|((a, _), w)| (a * w).abs()).sum();
            let carried: f64 = inner.iter().zip(w).map(|((_, error), w)| error * w.abs()).sum();
            // The output is rounded after each of at most three terms.
            (value, carried + sum * (4e-6 + 3. * self.unit()))
        };
        w2.chunks(width).map(row).collect()
    }

    /// The largest relative error of one rounding to the dtype.
    fn unit(&self) -> f64 {
        match self.dtype {
            DType::F32 => 2f64.powi(-24),
            DType::BF16 => 2f64.powi(-9),
            _ => 2f64.powi(-11),
        }
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Adds a weighted term. The weight itself has an error of a few units in the last place of f32.
fn add(out: &mut [(f64, f64)], term: &[(f64, f64)], weight: f64) {
    for ((value, bound), (v, b)) in out.iter_mut().zip(term) {
        *value += weight * v;
        *bound += weight.abs() * (b * 1.5 + v.abs() * 2e-5);
    }
}

/// Returns `n` values in (-scale, scale) that the dtype can represent exactly.
pub fn values(n: usize, scale: f64, seed: u64, dtype: DType) -> Vec<f64> {
    use moe_kernels::half::{bf16, f16};
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let sample = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let uniform = (state >> 40) as f64 / (1u64 << 23) as f64 - 1.;
        match dtype {
            DType::BF16 => bf16::from_f64(uniform * scale).to_f64(),
            DType::F16 => f16::from_f64(uniform * scale).to_f64(),
            _ => f64::from((uniform * scale) as f32),
        }
    };
    std::iter::repeat_with(sample).take(n).collect()
}

/// The sizes of a problem: experts, hidden, width, tokens.
pub type Sizes = (usize, usize, usize, usize);

/// Returns a problem with these sizes and routing. Shared experts have the width `shared.0`, and a gate if `shared.1`
/// is true.
pub fn problem(
    sizes: Sizes,
    config: RouterConfig,
    shared: Option<(usize, bool)>,
    dtype: DType,
    seed: u64,
) -> Problem {
    let (_, hidden, width, tokens) = sizes;
    let logits = config.num_logits();
    let packed = config.num_experts + config.num_fused_shared_experts;
    let v = |n: usize, scale: f64, salt: u64| values(n, scale, seed.wrapping_add(salt), dtype);
    let shared = shared.map(|(width, gated)| Shared {
        width,
        w13: v(2 * width * hidden, 1., 6),
        w2: v(hidden * width, 1., 7),
        gate: gated.then(|| v(hidden, 1., 8)),
    });
    Problem {
        dtype,
        hidden,
        width,
        tokens,
        x: v(tokens * hidden, 1., 1),
        gate: v(logits * hidden, 1., 2),
        bias: values(logits, 0.5, seed.wrapping_add(3), DType::F32),
        w13: v(packed * 2 * width * hidden, 1., 4),
        w2: v(packed * hidden * width, 1., 5),
        config,
        shared,
    }
}

/// Returns a problem of fixed sizes: a token chooses 2 of 6 experts, H x I is 24 x 16, and there are 5 tokens.
pub fn example(dtype: DType) -> Problem {
    let config = RouterConfig { renormalize: true, ..RouterConfig::new(6, 2) };
    problem((6, 24, 16, 5), config, None, dtype, 7)
}

/// Generates routings by softmax with all additions that the block supports.
fn configs(experts: usize) -> impl Strategy<Value = RouterConfig> {
    let counts = (1..=experts.min(4), 0usize..3, 0usize..3);
    (counts, any::<bool>(), any::<bool>(), 0.5f32..2.).prop_map(
        move |((top_k, zero, fused), renormalize, on_input, factor)| {
            let config = RouterConfig { renormalize, ..RouterConfig::new(experts, top_k) };
            if on_input {
                return RouterConfig { top_k: 1, apply_router_weight_on_input: true, ..config };
            }
            RouterConfig {
                num_zero_experts: zero,
                correction_bias: zero > 0,
                num_fused_shared_experts: fused,
                fused_shared_weight: 0.75,
                routed_scaling_factor: factor,
                ..config
            }
        },
    )
}

pub fn problems() -> impl Strategy<Value = Problem> {
    let dtypes = prop_oneof![Just(DType::F32), Just(DType::BF16), Just(DType::F16)];
    let shared = proptest::option::of((1usize..20, any::<bool>()));
    (1usize..8, 1usize..40, 1usize..30, 0usize..10).prop_flat_map(move |sizes| {
        (configs(sizes.0), shared.clone(), dtypes.clone(), any::<u64>())
            .prop_map(move |(config, shared, dtype, seed)| problem(sizes, config, shared, dtype, seed))
    })
}
