//! The cases.

use half::bf16;
use moe_kernels::{
    Activation, AttentionMeta, Buffer, Exec, ExpertGroups, QkNormRope, View, add_rms_norm_into,
    grouped_down_into, grouped_gate_up_into, linear_into, linear_row_parallel_into, paged_attention_into,
    qk_norm_rope_cache_into, weighted_sum_into,
};

use crate::{Bench, Floor};

const H: usize = 1024;
const I: usize = 512;
const E: usize = 32;
const TOP_K: usize = 4;
const HQ: usize = 16;
const HKV: usize = 4;
const D: usize = 64;
const VOCAB: usize = 32_000;

/// Values of a pool that weights are cut from.
const POOL: usize = 1 << 27;

pub fn noise(n: usize) -> Vec<bf16> {
    let mut state = 0x9e37_79b9_u32;
    (0..n)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            bf16::from_f32((state >> 8) as f32 / (1 << 23) as f32 - 1.0)
        })
        .collect()
}

/// Weights that come round after the whole pool has been read.
pub struct Pool(Vec<bf16>);

impl Pool {
    pub fn new() -> Self {
        Self(noise(POOL))
    }

    fn get(&self, call: usize, dims: &[usize]) -> View<'_> {
        let n: usize = dims.iter().product();
        let at = call % (self.0.len() / n) * n;
        View::new(&self.0[at..at + n], dims).expect("dims")
    }
}

pub fn buffer<T: moe_kernels::Element>(data: Vec<T>, dims: &[usize]) -> Buffer {
    Buffer::from_vec(data, dims).expect("dims")
}

/// All cases.
pub fn all(bench: &mut Bench, pool: &Pool) {
    for tokens in [1, 8, 512] {
        dense(bench, pool, "qkv", tokens, H, (HQ + 2 * HKV) * D, false);
        dense(bench, pool, "o_proj", tokens, HQ * D, H, true);
        experts(bench, pool, tokens);
        rows(bench, tokens);
    }
    for tokens in [1, 8] {
        dense(bench, pool, "lm_head", tokens, H, VOCAB, false);
    }
    for (rows, context) in [(1, 128), (1, 2048), (1, 8192), (512, 512), (512, 4096)] {
        attention(bench, rows, context);
    }
}

pub fn dense(bench: &mut Bench, pool: &Pool, name: &str, t: usize, k: usize, n: usize, row_parallel: bool) {
    let x = buffer(noise(t * k), &[t, k]);
    let mut out = buffer(noise(t * n), &[t, n]);
    let op = if row_parallel { linear_row_parallel_into } else { linear_into };
    let floor = Floor { bytes: (n * k * 2) as f64, flop: (2 * t * n * k) as f64 };
    bench.case(name, &format!("{t} x {k} x {n}"), floor, |call, ex| {
        op(x.view(), pool.get(call, &[n, k]), None, out.view_mut(), ex).expect("linear");
    });
}

/// Distinct experts that `tokens` tokens choose on average under uniform routing.
fn distinct(tokens: usize) -> usize {
    let missed = (1.0 - TOP_K as f64 / E as f64).powi(tokens as i32);
    (E as f64 * (1.0 - missed)).round() as usize
}

fn groups<'a>(offsets: &'a Buffer, in_rows: &'a Buffer, out_rows: &'a Buffer) -> ExpertGroups<'a> {
    ExpertGroups { offsets: offsets.view(), in_rows: in_rows.view(), out_rows: out_rows.view() }
}

fn experts(bench: &mut Bench, pool: &Pool, tokens: usize) {
    let slots = tokens * TOP_K;
    let active = distinct(tokens);
    let x = buffer(noise(tokens * H), &[tokens, H]);
    let mut mid = buffer(noise(slots * I), &[slots, I]);
    let mut out = buffer(vec![0f32; slots * H], &[slots, H]);
    let in_rows: Vec<u32> = (0..slots).map(|s| (s % tokens) as u32).collect();
    let out_rows: Vec<u32> = (0..slots as u32).collect();
    // The active experts move with the call, so that they are not the same 4 of 32 every time.
    let offsets_of = |call: usize| -> Vec<u32> {
        let mut offsets = vec![0u32; E + 1];
        for e in 0..E {
            let place = (e * 5 + call) % E;
            let rows = if place < active { slots / active + usize::from(place < slots % active) } else { 0 };
            offsets[e + 1] = offsets[e] + rows as u32;
        }
        offsets
    };
    let floor = |rows: usize| Floor { bytes: (active * rows * 2) as f64, flop: (2 * slots * rows) as f64 };
    let shape = format!("{tokens} tokens, {active} of {E}");
    let in_rows = buffer(in_rows, &[slots]);
    let out_rows = buffer(out_rows, &[slots]);
    bench.case("grouped_gate_up", &shape, floor(2 * I * H), |call, ex| {
        let offsets = buffer(offsets_of(call), &[E + 1]);
        let groups = groups(&offsets, &in_rows, &out_rows);
        let w13 = pool.get(call, &[E, 2 * I, H]);
        let activation = Activation::SwiGlu;
        grouped_gate_up_into(x.view(), &groups, w13, None, activation, mid.view_mut(), ex).expect("gate_up");
    });
    bench.case("grouped_down", &shape, floor(I * H), |call, ex| {
        let offsets = buffer(offsets_of(call), &[E + 1]);
        let groups = groups(&offsets, &in_rows, &out_rows);
        let w2 = pool.get(call, &[E, H, I]);
        grouped_down_into(mid.view(), &groups, w2, None, out.view_mut(), ex).expect("down");
    });
}

fn rows(bench: &mut Bench, tokens: usize) {
    let delta = buffer(vec![0.5f32; tokens * H], &[tokens, H]);
    let weight = buffer(noise(H), &[H]);
    let mut residual = buffer(vec![0.5f32; tokens * H], &[tokens, H]);
    let mut out = buffer(noise(tokens * H), &[tokens, H]);
    let floor = Floor { bytes: (tokens * H * 14) as f64, flop: 0.0 };
    bench.case("add_rms_norm", &format!("{tokens} x {H}"), floor, |_, ex| {
        let residual = residual.view_mut();
        let out = out.view_mut();
        add_rms_norm_into(delta.view(), weight.view(), 1e-6, residual, out, ex).expect("norm");
    });
    let slots = buffer(vec![0.5f32; tokens * TOP_K * H], &[tokens, TOP_K, H]);
    let ids = buffer(vec![1u32; tokens * TOP_K], &[tokens, TOP_K]);
    let weights = buffer(vec![0.25f32; tokens * TOP_K], &[tokens, TOP_K]);
    let floor = Floor { bytes: (tokens * H * (4 * TOP_K + 2)) as f64, flop: 0.0 };
    bench.case("weighted_sum", &format!("{tokens} x {TOP_K} x {H}"), floor, |_, ex| {
        weighted_sum_into(slots.view(), ids.view(), weights.view(), out.view_mut(), ex).expect("sum");
    });
}

/// The last `rows` rows of one sequence of `context` positions: the cache write, then attention.
/// Caches rotate as weights do.
fn attention(bench: &mut Bench, rows: usize, context: usize) {
    const BLOCK: usize = 16;
    let blocks = context / BLOCK;
    let dims = [blocks, HKV, BLOCK, D];
    let copies = (POOL / (2 * context * HKV * D)).clamp(1, 64);
    let cache = || buffer(noise(context * HKV * D), &dims);
    let mut caches: Vec<_> = (0..copies).map(|_| (cache(), cache())).collect();
    let qkv = buffer(vec![0.1f32; rows * (HQ + 2 * HKV) * D], &[rows, (HQ + 2 * HKV) * D]);
    let angles = buffer(vec![0.7f32; rows * D / 2], &[rows, D / 2]);
    let norm = buffer(noise(D), &[D]);
    let positions: Vec<u32> = ((context - rows) as u32..context as u32).collect();
    let table: Vec<u32> = (0..blocks as u32).collect();
    let bounds = [0, rows as u32];
    let view = |x| View::new(x, &[rows]).expect("dims");
    let args = QkNormRope {
        qkv: qkv.view(),
        q_norm: Some(norm.view()),
        k_norm: Some(norm.view()),
        eps: 1e-6,
        cos: angles.view(),
        sin: angles.view(),
        slot_mapping: view(&positions),
        num_heads: HQ,
        num_kv_heads: HKV,
        head_dim: D,
    };
    let mut q = buffer(vec![0f32; rows * HQ * D], &[rows, HQ, D]);
    let mut out = buffer(noise(rows * HQ * D), &[rows, HQ * D]);
    let shape = format!("{rows} rows at {context}");
    let floor = Floor { bytes: (rows * (HQ + 2 * HKV) * D * 8) as f64, flop: 0.0 };
    bench.case("qk_norm_rope_cache", &shape, floor, |call, ex: &mut Exec| {
        let (k, v) = &mut caches[call % copies];
        qk_norm_rope_cache_into(&args, q.view_mut(), k.view_mut(), v.view_mut(), ex).expect("rope");
    });
    let meta = AttentionMeta {
        query_start_loc: View::new(&bounds, &[2]).expect("dims"),
        positions: view(&positions),
        block_tables: View::new(&table, &[1, blocks]).expect("dims"),
        scale: 0.125,
        sliding_window: None,
        sinks: None,
        gates: None,
    };
    let seen = rows * context - rows * (rows - 1) / 2;
    let floor = Floor { bytes: (2 * context * HKV * D * 2) as f64, flop: (4 * seen * HQ * D) as f64 };
    bench.case("paged_attention", &shape, floor, |call, ex| {
        let (k, v) = &caches[call % copies];
        paged_attention_into(q.view(), k.view(), v.view(), &meta, out.view_mut(), ex).expect("attention");
    });
}
