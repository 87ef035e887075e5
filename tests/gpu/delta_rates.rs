//! Measures the ops of linear attention at the shapes of Qwen3.5-35B-A3B: `cargo test --release --features cuda --test
//! gpu -- --ignored --nocapture --test-threads 1 delta_rates`.

use std::time::Instant;

use candle_core::DType;
use moe_kernels::cuda::Graph;
use moe_kernels::{
    CausalConv, DeltaHeads, Exec, GatedDelta, GatedRmsNorm, StateRows, causal_conv_into, gated_delta_into,
    gated_rms_norm_into,
};

use crate::common::*;

const HEADS: DeltaHeads = DeltaHeads { key_heads: 16, value_heads: 32, key_dim: 128, value_dim: 128 };
const WIDTH: usize = 4;
/// Launches of a graph, so that the time of the host does not count.
const LAUNCHES: usize = 20;

/// Microseconds of one launch of `op`, the least of four runs of a graph.
pub fn micros(ex: &mut Exec, mut op: impl FnMut(&mut Exec) -> candle_core::Result<()>) -> f64 {
    op(ex).unwrap();
    let mut graph = Graph::capture(ex, |ex| (0..LAUNCHES).try_for_each(|_| op(ex))).unwrap();
    let mut least = f64::MAX;
    for _ in 0..4 {
        ex.synchronize().unwrap();
        let begin = Instant::now();
        graph.launch().unwrap();
        ex.synchronize().unwrap();
        least = least.min(begin.elapsed().as_secs_f64() * 1e6 / LAUNCHES as f64);
    }
    least
}

#[test]
#[ignore = "measures"]
fn rates_of_linear_attention() {
    println!("sequences  rows of each  causal_conv us  gated_delta us  in chunks us  gated_rms_norm us");
    for (sequences, rows) in
        [(1, 1), (8, 1), (64, 1), (256, 1), (512, 1), (1, 64), (1, 1024), (1, 8192), (8, 1024), (64, 128)]
    {
        let mut ex = cuda();
        let t = sequences * rows;
        let starts = (0..=sequences).map(|s| (s * rows) as u32).collect();
        // The sequences go on, so that their states are read.
        let positions = (0..t).map(|row| 1 + (row % rows) as u32).collect();
        let upload = |host: moe_kernels::Buffer| ex.buffer_from_host(host.view()).unwrap();
        let starts = upload(words(starts, &[sequences + 1]));
        let positions = upload(words(positions, &[t]));
        let numbers = upload(words((0..sequences as u32).collect(), &[sequences]));
        let (width, channels) = (HEADS.value_width(), HEADS.channels());
        let zeros = |dtype, dims: &[usize]| ex.zeros(dtype, dims).unwrap();
        let projected = zeros(DType::F32, &[t, HEADS.projected()]);
        let weight = zeros(DType::F32, &[WIDTH, channels]);
        let vector = zeros(DType::F32, &[HEADS.value_heads]);
        let norm = zeros(DType::F32, &[HEADS.value_dim]);
        let mut tails = zeros(DType::F32, &[sequences, WIDTH - 1, channels]);
        let mut states = zeros(DType::F32, &[sequences, HEADS.value_heads, HEADS.key_dim, HEADS.value_dim]);
        let mut mixed = zeros(DType::F32, &[t, channels]);
        let mut read = zeros(DType::F32, &[t, width]);
        let mut out = zeros(DType::BF16, &[t, width]);
        let rows_of =
            StateRows { query_start_loc: starts.view(), positions: positions.view(), states: numbers.view() };
        let conv = micros(&mut ex, |ex| {
            let args = CausalConv { projected: projected.view(), weight: weight.view(), rows: rows_of };
            causal_conv_into(&args, tails.view_mut(), mixed.view_mut(), ex)
        });
        let mut rule = |prompt_rows: usize, dtype: DType| {
            micros(&mut ex, |ex| {
                let args = GatedDelta {
                    heads: HEADS,
                    mixed: mixed.view(),
                    projected: projected.view(),
                    a_log: vector.view(),
                    dt_bias: vector.view(),
                    rows: rows_of,
                    prompt_rows,
                    dtype,
                };
                gated_delta_into(&args, states.view_mut(), read.view_mut(), ex)
            })
        };
        let delta = rule(0, DType::F32);
        // Sequences of fewer than 64 rows have no chunks.
        let chunks = if rows < 64 { f64::NAN } else { rule(t, DType::BF16) };
        let norm = micros(&mut ex, |ex| {
            let args = GatedRmsNorm {
                heads: HEADS,
                x: read.view(),
                projected: projected.view(),
                weight: norm.view(),
                eps: 1e-6,
            };
            gated_rms_norm_into(&args, out.view_mut(), ex)
        });
        println!("{sequences:9}  {rows:12}  {conv:14.1}  {delta:14.1}  {chunks:12.1}  {norm:17.1}");
    }
}
