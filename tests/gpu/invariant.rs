//! `--batch-invariant`: a token's bits do not depend on its batch, on how its prompt was cut, and on whether it was
//! computed as part of the prompt or by itself.

use candle_core::DType;
use model_families::qwen3_moe;
use model_runtime::{Config, Decoder, DummyWeights, Exec, Geometry};
use moe_engine::engine::{Engine, EngineConfig};
use moe_engine::{LoadOptions, ModelSpec};
use moe_layer::{BlockContext, MoePath};
use moe_tests::{Schedule, all_logits};

use crate::common::cuda;
use crate::engine::{CONFIG, requests, run};

fn exact() -> Exec {
    cuda().with_batch_invariant(true)
}

/// The small model of the engine's tests with some of its config replaced.
fn model(replaced: &[(&str, &str)], dtype: DType) -> Decoder {
    let mut json = CONFIG.to_string();
    for (from, to) in replaced {
        assert!(json.contains(from), "{from}");
        json = json.replace(from, to);
    }
    let config = qwen3_moe::read(&Config::parse(&json, "config.json").unwrap()).unwrap();
    let layout = config.layout(&Geometry::default(), &|_| true).unwrap();
    let vb = DummyWeights::new(layout.tensors, 7).var_builder(dtype, cuda().device());
    let context = BlockContext { batch_invariant: true, ..BlockContext::default() };
    let options = LoadOptions { context, ..LoadOptions::default() };
    config.model.load(&options.decoder(MoePath::Fused), vb).unwrap().0
}

/// Prompts of 1 to 150 tokens; the first one is long.
fn prompts(count: usize) -> Vec<Vec<u32>> {
    let len = |i: usize| [150, 1, 37, 64, 65, 128, 9, 17][i % 8];
    (0..count).map(|i| (0..len(i)).map(|j| ((i * 131 + j * 17 + j * j) % 1000) as u32).collect()).collect()
}

const ALONE: Schedule = Schedule { chunk: usize::MAX >> 1, block_size: 16, together: false };

/// Batches on both sides of every number of rows at which another kernel is chosen: 4, 8, 16, 32, 64, 128, 256.
const BATCHES: [(usize, usize); 9] =
    [(1, 1), (1, 7), (2, 1), (5, 64), (9, 1), (33, 5), (70, 1), (70, 3), (70, usize::MAX >> 1)];

/// The first batch whose logits differ in bits from the logits of its prompts alone.
pub fn first_difference(model: &Decoder, mut ex: Exec) -> Option<String> {
    let prompts = prompts(70);
    let bits = |rows: &[f32]| rows.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let alone: Vec<_> = all_logits(model, &prompts, ALONE, &mut ex).unwrap();
    assert!(alone.iter().flatten().all(|x| x.is_finite()) && alone[0][..1000] != alone[1][..1000]);
    for (batch, chunk) in BATCHES {
        let schedule = Schedule { chunk, block_size: 8, together: true };
        let together = all_logits(model, &prompts[..batch], schedule, &mut ex).unwrap();
        for (prompt, (got, want)) in together.iter().zip(&alone).enumerate() {
            assert_eq!(got.len(), want.len());
            if let Some(at) = bits(got).iter().zip(bits(want)).position(|(g, w)| *g != w) {
                let got = got[at];
                let want = want[at];
                return Some(format!(
                    "prompt {prompt} of {batch} in chunks of {chunk}, position {}: {got:e} instead of {want:e}",
                    at / 1000
                ));
            }
        }
    }
    None
}

#[test]
fn logits_do_not_depend_on_batch_and_chunks() {
    let window = ("\"hidden_act\"", "\"use_sliding_window\": true, \"sliding_window\": 40, \"hidden_act\"");
    let wide = [
        ("\"head_dim\": 64", "\"head_dim\": 128"),
        ("\"num_attention_heads\": 8", "\"num_attention_heads\": 16"),
    ];
    let odd = [
        ("\"hidden_size\": 256", "\"hidden_size\": 120"),
        ("\"head_dim\": 64", "\"head_dim\": 24"),
        ("\"moe_intermediate_size\": 128", "\"moe_intermediate_size\": 40"),
    ];
    let dense = [("\"hidden_act\"", "\"mlp_only_layers\": [1], \"attention_bias\": true, \"hidden_act\"")];
    let cases: [(&[(&str, &str)], DType); 8] = [
        (&[], DType::BF16),
        (&[], DType::F32),
        (&[window], DType::BF16),
        (&[window], DType::F16),
        (&wide, DType::BF16),
        (&odd, DType::BF16),
        (&odd, DType::F32),
        (&dense, DType::BF16),
    ];
    for (replaced, dtype) in cases {
        let difference = first_difference(&model(replaced, dtype), exact());
        assert_eq!(difference, None, "{replaced:?} {dtype:?}");
    }
}

/// This is the control: without batch invariance, different kernels are used for different batches, so the test above
/// can fail.
#[test]
fn the_fast_mode_makes_no_such_promise() {
    assert_ne!(first_difference(&model(&[], DType::BF16), cuda()), None);
}

/// This goes through the engine: graphs and eager steps, chunked prompts, preemption, and sampling on the host.
#[test]
fn tokens_of_a_request_do_not_depend_on_the_engine_around_it() {
    let model = model(&[], DType::BF16);
    let config = |max_num_seqs, max_num_batched_tokens, enforce_eager| EngineConfig {
        max_num_seqs,
        max_num_batched_tokens,
        enforce_eager,
        kv_cache_memory: Some(64 << 20),
        ..EngineConfig::for_device(&cuda())
    };
    let tokens = |config: &EngineConfig, requests| {
        run(&mut Engine::new(&model, exact(), None, config).unwrap(), requests)
    };
    let mut all = requests(40, 24);
    for (request, prompt) in all.iter_mut().zip(prompts(40)) {
        request.prompt = prompt;
    }
    let alone: Vec<_> =
        all.iter().flat_map(|request| tokens(&config(1, 4096, false), vec![request.clone()])).collect();
    for (seqs, rows, eager) in [(40, 4096, false), (40, 4096, true), (7, 64, false), (3, 16, true)] {
        assert_eq!(tokens(&config(seqs, rows, eager), all.clone()), alone, "{seqs} {rows} {eager}");
    }
    // Some prompts are scored. Some requests want more log-probabilities than the device lists, which moves the steps
    // of all requests to the host; experts are recorded there, too.
    all[5].capture_routing = true;
    for listed in [0, 40] {
        all[3].prompt_logprobs = Some(listed);
        assert_eq!(tokens(&config(40, 4096, false), all.clone()), alone, "{listed}");
    }
}
