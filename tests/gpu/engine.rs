//! The engine on a CUDA device: graphs and eager steps sample the same tokens, and a step allocates nothing.

use std::collections::BTreeMap;

use candle_core::{DType, Device};
use model_families::qwen3_moe;
use model_runtime::{Config, Decoder, DummyWeights, Geometry, SamplingParams};
use moe_engine::engine::{Engine, EngineConfig, Request};
use moe_engine::{LoadOptions, ModelSpec};
use moe_layer::MoePath;

use crate::common::cuda;

/// A small model, but with shapes that every fast kernel takes.
pub const CONFIG: &str = r#"{
    "model_type": "qwen3_moe", "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512,
    "moe_intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 64, "num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": true, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "max_position_embeddings": 512, "tie_word_embeddings": false, "hidden_act": "silu"
}"#;

fn model() -> Decoder {
    model_on(DType::BF16, cuda().device())
}

/// The model of [`CONFIG`], on a device.
pub fn model_on(dtype: DType, device: &Device) -> Decoder {
    let config = qwen3_moe::read(&Config::parse(CONFIG, "config.json").unwrap()).unwrap();
    let layout = config.layout(&Geometry::default(), &|_| true).unwrap();
    let vb = DummyWeights::new(layout.tensors, 7).var_builder(dtype, device);
    config.model.load(&LoadOptions::default().decoder(MoePath::Fused), vb).unwrap().0
}

pub fn requests(count: usize, new_tokens: usize) -> Vec<Request> {
    let request = |i: usize| Request {
        sampling: SamplingParams { temperature: 1.0, seed: i as u64, ..SamplingParams::default() },
        max_tokens: Some(new_tokens),
        ..Request::new((0..3 + i as u32 % 5).map(|j| (i as u32 * 31 + j * 7) % 1000).collect())
    };
    (0..count).map(request).collect()
}

pub fn config(max_num_seqs: usize, enforce_eager: bool) -> EngineConfig {
    let kv_cache_memory = Some(64 << 20);
    EngineConfig { max_num_seqs, enforce_eager, kv_cache_memory, ..EngineConfig::for_device(&cuda()) }
}

/// The tokens of every request.
pub fn run(engine: &mut Engine<'_>, requests: Vec<Request>) -> Vec<Vec<u32>> {
    let mut tokens = BTreeMap::<_, Vec<u32>>::new();
    requests.into_iter().map(|request| engine.add(request)).collect::<Result<Vec<_>, _>>().unwrap();
    engine.run(|output| tokens.entry(output.request).or_default().extend(output.token_id)).unwrap();
    tokens.into_values().collect()
}

#[test]
fn graphs_draw_the_tokens_of_eager_steps_at_the_edges_of_buckets() {
    let model = model();
    for batch in [1, 2, 3, 4, 5, 8, 9, 16, 17, 64, 65] {
        let mut eager = Engine::new(&model, cuda(), None, &config(batch, true)).unwrap();
        let mut graphs = Engine::new(&model, cuda(), None, &config(batch, false)).unwrap();
        let expected = run(&mut eager, requests(batch, 24));
        assert_eq!(run(&mut graphs, requests(batch, 24)), expected, "batch {batch}");
        assert_eq!(eager.num_graph_steps(), 0);
        assert!(graphs.num_graph_steps() >= 20, "batch {batch}: {}", graphs.num_graph_steps());
        assert!(expected.iter().all(|tokens| tokens.len() == 24));
        assert!(batch == 1 || expected[0] != expected[1]);
    }
}

/// A graph is recorded with a frozen workspace and without waiting for the device: otherwise the recording would fail
/// and the steps would not be counted. A second run finds every buffer that it needs.
#[test]
fn steps_allocate_nothing_once_they_have_run() {
    let model = model();
    let ex = cuda();
    let mut engine = Engine::new(&model, ex.clone(), None, &config(16, false)).unwrap();
    let first = run(&mut engine, requests(16, 40));
    let bytes = ex.workspace().bytes();
    let free = ex.device_memory().unwrap().0;
    let steps = engine.num_graph_steps();
    assert_eq!(run(&mut engine, requests(16, 40)), first);
    assert_eq!((ex.workspace().bytes(), ex.device_memory().unwrap().0), (bytes, free));
    assert!(engine.num_graph_steps() >= steps + 38);
}

/// Some requests need the host to sample (they want log-probabilities of more tokens than the device lists). They run
/// together with others, some of which have log-probabilities, penalties and recorded experts.
#[test]
fn what_only_the_host_can_sample_runs_too() {
    let model = model();
    let mut engine = Engine::new(&model, cuda(), None, &config(8, false)).unwrap();
    let mut all = requests(8, 12);
    all[3].sampling.logprobs = Some(2);
    all[5].sampling.repetition_penalty = 1.3;
    all[6].max_tokens = Some(4);
    all[7].prompt_logprobs = Some(40);
    all[7].capture_routing = true;
    let mut logprobs = 0;
    let mut tokens = BTreeMap::<_, usize>::new();
    let mut captured = 0;
    all.into_iter().map(|request| engine.add(request)).collect::<Result<Vec<_>, _>>().unwrap();
    let collect = |output: moe_engine::engine::Output| {
        logprobs += usize::from(output.logprobs.is_some());
        captured += usize::from(output.routed_experts.is_some());
        *tokens.entry(output.request).or_default() += usize::from(output.token_id.is_some());
    };
    engine.run(collect).unwrap();
    assert_eq!(tokens.into_values().collect::<Vec<_>>(), [12, 12, 12, 12, 12, 12, 4, 12]);
    assert_eq!((logprobs, captured), (12, 1));
}
