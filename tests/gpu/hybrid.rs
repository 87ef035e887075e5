//! Models with linear attention on a CUDA device: logits, tokens of graphs, preemption, saved states.

use candle_core::DType;
use model_families::qwen3_next;
use model_runtime::{BlockContext, CausalLm, Config, Decoder, DummyWeights, Exec, Geometry};
use moe_engine::engine::{Engine, EngineConfig, Request};
use moe_engine::{LoadOptions, ModelSpec};
use moe_kernels::{Buffer, LaunchLog};
use moe_layer::MoePath;
use moe_tests::{Schedule, all_logits, load_hybrid, load_hybrid_on};

use crate::common::*;
use crate::engine::{config, requests, run};
use crate::invariant::first_difference;

/// A small model with linear attention in three of four layers, and heads of the published sizes.
pub const CONFIG: &str = r#"{
    "model_type": "qwen3_next", "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512,
    "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 256, "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
    "num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": true, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "max_position_embeddings": 512, "tie_word_embeddings": false, "hidden_act": "silu"
}"#;

fn model(dtype: DType, batch_invariant: bool) -> Decoder {
    model_of(CONFIG, dtype, batch_invariant)
}

fn model_of(config: &str, dtype: DType, batch_invariant: bool) -> Decoder {
    let spec = qwen3_next::read(&Config::parse(config, "config.json").unwrap()).unwrap();
    let layout = spec.layout(&Geometry::default(), &|_| true).unwrap();
    let vb = DummyWeights::new(layout.tensors, 7).var_builder(dtype, cuda().device());
    let context = BlockContext { batch_invariant, ..BlockContext::default() };
    let options = LoadOptions { context, ..LoadOptions::default() };
    spec.model.load(&options.decoder(MoePath::Fused), vb).unwrap().0
}

#[test]
fn fixtures_have_the_logits_of_the_cpu() {
    let schedule = Schedule { chunk: 7, block_size: 16, together: true };
    for name in ["qwen3-next", "qwen3_5"] {
        let cpu = load_hybrid(name, DType::F32).unwrap();
        let gpu = load_hybrid_on(name, DType::F32, cuda().device()).unwrap();
        let prompts: Vec<Vec<u32>> =
            [5, 33, 1, 18].iter().map(|&len| (0..len).map(|i| (i * 7 + len) % 90).collect()).collect();
        let want = all_logits(&cpu, &prompts, schedule, &mut Exec::cpu()).unwrap();
        let got = all_logits(&gpu, &prompts, schedule, &mut cuda()).unwrap();
        for (want, got) in want.into_iter().zip(got) {
            let rows = |logits: Vec<f32>| {
                let len = logits.len();
                Buffer::from_vec(logits, &[len]).unwrap()
            };
            assert_close(name, &rows(want), &rows(got), 1e-3);
        }
    }
}

#[test]
fn graphs_give_the_tokens_of_eager_steps() {
    let fixture = load_hybrid_on("qwen3-next-text", DType::F32, cuda().device()).unwrap();
    for (model, vocab) in [(model(DType::BF16, false), 1000), (fixture, 300)] {
        for batch in [1, 3, 9, 17] {
            let all = || {
                let mut all = requests(batch, 24);
                for request in &mut all {
                    request.prompt.iter_mut().for_each(|id| *id %= vocab);
                    request.sampling.temperature = if vocab == 300 { 0.0 } else { 1.0 };
                    request.ignore_eos = true;
                }
                all
            };
            let mut eager = Engine::new(&model, cuda(), None, &config(batch, true)).unwrap();
            let mut graphs = Engine::new(&model, cuda(), None, &config(batch, false)).unwrap();
            let expected = run(&mut eager, all());
            assert_eq!(run(&mut graphs, all()), expected, "batch {batch}");
            assert_eq!(eager.num_graph_steps(), 0);
            assert!(graphs.num_graph_steps() >= 20, "batch {batch}: {}", graphs.num_graph_steps());
        }
    }
}

#[test]
fn logits_do_not_depend_on_batch_and_chunks() {
    for dtype in [DType::BF16, DType::F32] {
        let difference = first_difference(&model(dtype, true), cuda().with_batch_invariant(true));
        assert_eq!(difference, None, "{dtype:?}");
    }
}

/// Prompts in chunks, whole and in pieces, have nearly the logits of prompts row after row. Every token goes to all
/// experts: where it goes to some, a rounding that exchanges two experts changes all logits of the token.
#[test]
fn prompts_in_chunks_have_nearly_the_logits_of_rows() {
    let config = CONFIG.replace("\"num_experts\": 16", "\"num_experts\": 4");
    let [model, exact] = [false, true].map(|invariant| model_of(&config, DType::BF16, invariant));
    let prompts: Vec<Vec<u32>> = [300, 64, 1, 129]
        .iter()
        .map(|&len| (0..len).map(|i| (i * 31 + i * i + len) % 1000).collect())
        .collect();
    let logits = |model: &Decoder, chunk, mut ex: Exec| {
        let schedule = Schedule { chunk, block_size: 16, together: true };
        all_logits(model, &prompts, schedule, &mut ex).unwrap().concat()
    };
    let want = logits(&exact, 300, cuda().with_batch_invariant(true));
    let largest = want.iter().fold(0f32, |most, logit| most.max(logit.abs()));
    for chunk in [300, 128, 100] {
        let log = LaunchLog::default();
        let got = logits(&model, chunk, cuda().with_launch_log(Some(log.clone())));
        assert!(log.take().iter().any(|launch| launch.kernel == "gated_delta_chunks"));
        let off = want.iter().zip(&got).fold(0f32, |most, (w, g)| most.max((w - g).abs()));
        assert!(off < 0.1 * largest, "pieces of {chunk}: off by {off} of {largest}");
    }
}

/// Sequences that are preempted and go on from saved states, and prompts that begin with the saved state of another
/// one, have the tokens of requests alone.
#[test]
fn preempted_sequences_and_shared_prefixes_have_the_tokens_of_requests_alone() {
    let model = model(DType::BF16, true);
    let state = model.info().states.bytes_per_sequence().unwrap();
    let exact = || cuda().with_batch_invariant(true);
    let common: Vec<u32> = (0..128).map(|i| (i * 37 + i * i) % 1000).collect();
    let mut all = requests(6, 100);
    for (request, shares) in all.iter_mut().zip([true, false, true, false, true, true]) {
        if shares {
            request.prompt.splice(0..0, common.iter().copied());
        }
    }
    // Four states, three saved ones, and the bytes of a state for blocks: fewer than four long sequences need.
    let narrow = EngineConfig {
        kv_cache_memory: Some(8 * state),
        prefix_state_memory: Some(3 * state),
        ..config(4, false)
    };
    let alone = |request: &Request| {
        let config = EngineConfig { enable_prefix_caching: false, ..config(1, true) };
        run(&mut Engine::new(&model, exact(), None, &config).unwrap(), vec![request.clone()])
    };
    let expected: Vec<Vec<u32>> = all.iter().flat_map(alone).collect();
    let mut engine = Engine::new(&model, exact(), None, &narrow).unwrap();
    assert_eq!(run(&mut engine, all.clone()), expected);
    let stats = engine.stats();
    assert!(stats.preemptions > 0 && stats.saved_states.restored > 0, "{stats:?}");
    assert!(engine.num_graph_steps() > 0);
}
