//! A layer of linear attention at the shapes of Qwen3.5-35B-A3B: 16 key and 32 value heads of 128, H 2048.

use candle_core::DType;
use moe_kernels::{
    Buffer, CausalConv, DeltaHeads, GatedDelta, GatedRmsNorm, StateRows, causal_conv_into, gated_delta_into,
    gated_rms_norm_into,
};

use crate::shapes::{Pool, buffer, dense, noise};
use crate::{Bench, Floor};

const H: usize = 2048;
const HEADS: DeltaHeads = DeltaHeads { key_heads: 16, value_heads: 32, key_dim: 128, value_dim: 128 };
const WIDTH: usize = 4;

fn floats(n: usize) -> Vec<f32> {
    noise(n).into_iter().map(f32::from).collect()
}

/// The products, and the ops between them, for one sequence of `t` rows.
pub fn layer(bench: &mut Bench, pool: &Pool, t: usize) {
    dense(bench, pool, "linear_in", t, H, HEADS.projected(), false);
    dense(bench, pool, "linear_out", t, HEADS.value_width(), H, true);
    let channels = HEADS.channels();
    let width = HEADS.value_width();
    let projected = buffer(floats(t * HEADS.projected()), &[t, HEADS.projected()]);
    let starts = buffer(vec![0u32, t as u32], &[2]);
    // The sequence goes on, so that its state is read.
    let positions = buffer((1..=t as u32).collect(), &[t]);
    let states = buffer(vec![0u32], &[1]);
    let rows =
        StateRows { query_start_loc: starts.view(), positions: positions.view(), states: states.view() };
    let shape = format!("{t} rows");
    let bytes = |columns: usize| (4 * t * columns) as f64;

    let weight = buffer(floats(WIDTH * channels), &[WIDTH, channels]);
    let mut tails = buffer(vec![0f32; (WIDTH - 1) * channels], &[1, WIDTH - 1, channels]);
    let mut mixed = buffer(floats(t * channels), &[t, channels]);
    let floor = Floor { bytes: bytes(2 * channels), flop: (2 * t * channels * WIDTH) as f64 };
    bench.case("causal_conv", &shape, floor, |_, ex| {
        let conv = CausalConv { projected: projected.view(), weight: weight.view(), rows };
        causal_conv_into(&conv, tails.view_mut(), mixed.view_mut(), ex).expect("conv");
    });

    let a_log = buffer(vec![0.5f32; HEADS.value_heads], &[HEADS.value_heads]);
    let state = width * HEADS.key_dim;
    let dims = [1, HEADS.value_heads, HEADS.key_dim, HEADS.value_dim];
    let mut delta_states: Buffer = buffer(vec![0f32; state], &dims);
    let mut read = buffer(floats(t * width), &[t, width]);
    let floor = Floor { bytes: (8 * state) as f64 + bytes(channels + width), flop: (8 * t * state) as f64 };
    bench.case("gated_delta", &shape, floor, |_, ex| {
        let delta = GatedDelta {
            heads: HEADS,
            mixed: mixed.view(),
            projected: projected.view(),
            a_log: a_log.view(),
            dt_bias: a_log.view(),
            rows,
            prompt_rows: t,
            dtype: DType::BF16,
        };
        gated_delta_into(&delta, delta_states.view_mut(), read.view_mut(), ex).expect("delta");
    });

    let weight = buffer(floats(HEADS.value_dim), &[HEADS.value_dim]);
    let mut out = buffer(noise(t * width), &[t, width]);
    let floor = Floor { bytes: bytes(2 * width) + (2 * t * width) as f64, flop: 0.0 };
    bench.case("gated_rms_norm", &shape, floor, |_, ex| {
        let norm = GatedRmsNorm {
            heads: HEADS,
            x: read.view(),
            projected: projected.view(),
            weight: weight.view(),
            eps: 1e-6,
        };
        gated_rms_norm_into(&norm, out.view_mut(), ex).expect("norm");
    });
}
