//! Measures attention at the shapes of Qwen3.5-35B-A3B and Qwen3-30B-A3B: `cargo test --release --features cuda --test
//! gpu -- --ignored --nocapture --test-threads 1 attention_rates`.

use candle_core::DType;
use moe_kernels::{qk_norm_rope_cache_into, rope_attention_into};

use crate::attention::Case;
use crate::common::*;
use crate::delta_rates::micros;

/// Sequences, the position of the first row of each, and its rows.
const STEPS: [(usize, usize, usize); 12] = [
    (1, 0, 256),
    (1, 0, 1024),
    (1, 0, 8192),
    (1, 0, 32_768),
    (8, 0, 1024),
    (1, 16_384, 2048),
    (1, 255, 1),
    (1, 8191, 1),
    (1, 32_767, 1),
    (8, 8191, 1),
    (64, 1023, 1),
    (256, 255, 1),
];

#[test]
#[ignore = "measures"]
fn rates_of_attention() {
    println!(
        "    heads  sequences  first position  rows of each  norm, cache us  all us  TFLOP/s  GB/s of the cache"
    );
    let mut rng = Rng::new();
    for (heads, head_dim) in [((16, 2), 256), ((32, 4), 128)] {
        for (count, first, rows) in STEPS {
            let case = Case::new(heads, head_dim, 16, &vec![(first, rows); count]);
            let case = Case { gates: head_dim == 256, ..case };
            let data = case.data(&mut rng, DType::BF16, DType::F32);
            let mut p = Place::new(cuda());
            let placed = data.placed(&p);
            let args = placed.args(&case);
            let meta = placed.meta(&case);
            let [mut k, mut v] = data.caches.each_ref().map(|cache| p.put(cache));
            let mut q = p.out(DType::BF16, &[data.rows, heads.0, head_dim]);
            let mut out = p.out(DType::BF16, &[data.rows, heads.0 * head_dim]);
            let norm = micros(&mut p.ex, |ex| {
                qk_norm_rope_cache_into(&args, q.view_mut(), k.view_mut(), v.view_mut(), ex)
            });
            let all = micros(&mut p.ex, |ex| {
                let to = out.view_mut();
                rope_attention_into(&args, &meta, case.step_rows(), k.view_mut(), v.view_mut(), to, ex)
            });
            let step = case.step_rows();
            let scores = step.decode_scores + step.prompt_scores;
            let flops = 4 * head_dim * heads.0 * scores;
            let bytes = 4 * head_dim * heads.1 * count * (first + rows);
            let tera = flops as f64 / all / 1e6;
            let giga = bytes as f64 / all / 1e3;
            println!(
                "{:2}/{} of {head_dim}  {count:9}  {first:14}  {rows:12}  {norm:14.1}  {all:6.1}  {tera:7.1}  {giga:17.0}",
                heads.0, heads.1
            );
        }
    }
}
