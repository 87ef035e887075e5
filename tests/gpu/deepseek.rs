//! DeepSeek-V2 on a CUDA device. Graphs give the tokens of eager steps, the per-expert loop gives the tokens of the
//! fused experts, and bits do not depend on the batch.

use candle_core::{DType, Device};
use model_families::deepseek_v2;
use model_runtime::{CausalLm, Config, Decoder, DummyWeights, Exec, Geometry, MlaForm, RankView};
use moe_engine::engine::{Engine, EngineConfig};
use moe_engine::{LoadOptions, ModelSpec};
use moe_kernels::plan::Stage;
use moe_layer::{BlockContext, MoePath, PlanStep, SharedExpertsStream};
use moe_tests::{Schedule, all_logits};

use crate::common::cuda;
use crate::engine::{requests, run};

type DeepseekV2 = Decoder;

/// A small model, but with the latent rows of DeepSeek's models, so that every fast kernel runs.
pub const CONFIG: &str = r#"{
    "model_type": "deepseek_v2", "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 448,
    "moe_intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 16, "num_key_value_heads": 16,
    "kv_lora_rank": 512, "q_lora_rank": null, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 16, "n_shared_experts": 2, "num_experts_per_tok": 4, "first_k_dense_replace": 1,
    "topk_method": "greedy", "n_group": 1, "topk_group": 1, "norm_topk_prob": false, "routed_scaling_factor": 1.0,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 512, "hidden_act": "silu"
}"#;

/// The settings in which a DeepSeek-V2 differs from a V2-Lite.
const V2: &[(&str, &str)] = &[
    ("\"q_lora_rank\": null", "\"q_lora_rank\": 192"),
    (
        "\"topk_method\": \"greedy\", \"n_group\": 1, \"topk_group\": 1",
        "\"topk_method\": \"group_limited_greedy\", \"n_group\": 4, \"topk_group\": 2",
    ),
    ("\"routed_scaling_factor\": 1.0", "\"routed_scaling_factor\": 4.0"),
];

/// DeepSeek-V3's routing: experts by score and bias, groups by the sum of their two best experts.
const BIASED: &[(&str, &str)] = &[
    (
        "\"topk_method\": \"greedy\", \"n_group\": 1, \"topk_group\": 1, \"norm_topk_prob\": false",
        "\"topk_method\": \"noaux_tc\", \"n_group\": 4, \"topk_group\": 2, \"norm_topk_prob\": true",
    ),
    ("\"routed_scaling_factor\": 1.0", "\"routed_scaling_factor\": 2.5"),
];

fn model(replaced: &[(&str, &str)], path: MoePath, mla: MlaForm, dtype: DType) -> DeepseekV2 {
    with_stream(replaced, path, mla, dtype, SharedExpertsStream::Auto)
}

/// Like [`model`], with the shared experts computed in a given way.
fn with_stream(
    replaced: &[(&str, &str)],
    path: MoePath,
    mla: MlaForm,
    dtype: DType,
    stream: SharedExpertsStream,
) -> DeepseekV2 {
    on_device(replaced, path, mla, dtype, stream, cuda().device())
}

/// Like [`with_stream`], on a device.
fn on_device(
    replaced: &[(&str, &str)],
    path: MoePath,
    mla: MlaForm,
    dtype: DType,
    shared_experts_stream: SharedExpertsStream,
    device: &Device,
) -> DeepseekV2 {
    let mut json = CONFIG.to_string();
    for (from, to) in replaced {
        assert!(json.contains(from), "{from}");
        json = json.replace(from, to);
    }
    let config = deepseek_v2::read(&Config::parse(&json, "config.json").unwrap()).unwrap();
    let layout = config.layout(&Geometry::default(), &|_| true).unwrap();
    // The weights come with packs, as the engine provides them for a checkpoint.
    let weights = DummyWeights::new(layout.tensors.clone(), 7).with_stored_dtype(dtype);
    let vb = RankView::new(weights, layout.slices_for(device)).var_builder(dtype, device);
    let context = BlockContext { batch_invariant: true, shared_experts_stream, ..BlockContext::default() };
    let options = LoadOptions { context, ..LoadOptions::default() };
    config.build(mla, &options.decoder(path), vb).unwrap().0
}

fn config(max_num_seqs: usize, enforce_eager: bool) -> EngineConfig {
    let kv_cache_memory = Some(64 << 20);
    EngineConfig { max_num_seqs, enforce_eager, kv_cache_memory, ..EngineConfig::for_device(&cuda()) }
}

#[test]
fn graphs_draw_the_tokens_of_eager_steps() {
    for replaced in [&[], V2] {
        for mla in [MlaForm::Absorbed, MlaForm::Naive] {
            let model = model(replaced, MoePath::Fused, mla, DType::BF16);
            for batch in [1, 2, 4, 5, 16, 17, 65] {
                let mut eager = Engine::new(&model, cuda(), None, &config(batch, true)).unwrap();
                let mut graphs = Engine::new(&model, cuda(), None, &config(batch, false)).unwrap();
                let expected = run(&mut eager, requests(batch, 24));
                assert_eq!(run(&mut graphs, requests(batch, 24)), expected, "{mla:?}, batch {batch}");
                assert_eq!(eager.num_graph_steps(), 0);
                assert!(graphs.num_graph_steps() >= 20, "{mla:?}, batch {batch}");
                assert!(batch == 1 || expected[0] != expected[1]);
            }
        }
    }
}

/// In f32 both paths round in the same way, except for the order of sums, so greedy tokens are equal.
#[test]
fn the_loop_draws_the_tokens_of_the_fused_experts_and_no_graphs() {
    for (replaced, mla) in [(&[][..], MlaForm::Absorbed), (V2, MlaForm::Naive), (BIASED, MlaForm::Absorbed)] {
        let tokens = |path| {
            let model = model(replaced, path, mla, DType::F32);
            let mut engine = Engine::new(&model, cuda(), None, &config(9, false)).unwrap();
            let mut all = requests(9, 24);
            all.iter_mut().for_each(|request| request.sampling.temperature = 0.0);
            (run(&mut engine, all), engine.num_graph_steps())
        };
        let (fused, graphs) = tokens(MoePath::Fused);
        let (looped, none) = tokens(MoePath::Legacy);
        assert_eq!(fused, looped);
        assert!(graphs >= 20 && none == 0, "{graphs} {none}");
    }
}

/// The names of the kernels of a decode step's sparse layers.
fn kernels(model: &DeepseekV2, rows: usize) -> String {
    let layers = model.plan(&PlanStep::decode(rows), &cuda().machine());
    let named = |stage: &Stage| format!("{} {}", stage.kernel, stage.note.as_deref().unwrap_or_default());
    layers[1].mlp.iter().map(named).collect::<Vec<_>>().join(", ")
}

/// For every routing and with shared experts, the logits in f32 agree with the CPU's.
#[test]
fn logits_are_those_of_the_cpu() {
    for replaced in [&[], V2, BIASED] {
        let on = |ex: &Exec| {
            let path = MoePath::Fused;
            let mla = MlaForm::Absorbed;
            let stream = SharedExpertsStream::Auto;
            on_device(replaced, path, mla, DType::F32, stream, ex.device())
        };
        let prompts: Vec<Vec<u32>> = (1..4).map(|n| (0..n * 13).map(|i| i * 7 % 1000).collect()).collect();
        let schedule = Schedule { chunk: 8, block_size: 16, together: true };
        let logits = |mut ex: Exec| all_logits(&on(&ex), &prompts, schedule, &mut ex).unwrap().concat();
        let want = logits(Exec::cpu());
        let got = logits(cuda());
        let largest = want.iter().fold(0f32, |most, logit| most.max(logit.abs()));
        let off = want.iter().zip(&got).fold(0f32, |most, (w, g)| most.max((w - g).abs()));
        assert!(off < 1e-4 * largest, "{replaced:?}: off by {off} of {largest}");
    }
}

/// Shared experts on a second stream give the same bits as after the routed experts, in eager steps and in graphs.
#[test]
fn the_second_stream_changes_no_bit() {
    for replaced in [&[], V2] {
        for dtype in [DType::BF16, DType::F32] {
            let of = |stream| with_stream(replaced, MoePath::Fused, MlaForm::Absorbed, dtype, stream);
            let on = of(SharedExpertsStream::On);
            let off = of(SharedExpertsStream::Off);
            assert!(kernels(&on, 3).contains("second stream") && !kernels(&off, 3).contains("second stream"));
            for batch in [1, 3, 9, 40] {
                for eager in [false, true] {
                    let tokens = |model: &DeepseekV2| {
                        let mut engine = Engine::new(model, cuda(), None, &config(batch, eager)).unwrap();
                        let sampled = run(&mut engine, requests(batch, 24));
                        assert_eq!(engine.num_graph_steps() >= 20, !eager, "{}", engine.num_graph_steps());
                        sampled
                    };
                    assert_eq!(tokens(&on), tokens(&off), "{dtype:?} {batch} {eager}");
                }
            }
            let prompts: Vec<Vec<u32>> =
                (1..6).map(|n| (0..n * 29).map(|i| i * 7 % 1000).collect()).collect();
            let schedule = Schedule { chunk: 64, block_size: 16, together: true };
            let bits = |model: &DeepseekV2| -> Vec<Vec<u32>> {
                let all = all_logits(model, &prompts, schedule, &mut cuda()).unwrap();
                all.iter().map(|row| row.iter().map(|logit| logit.to_bits()).collect()).collect()
            };
            assert!(bits(&on) == bits(&off), "{dtype:?}");
        }
    }
}

/// As slots of the routed experts, shared experts are added in another order, so logits agree up to the rounding of
/// bf16.
#[test]
fn shared_experts_as_slots_are_the_shared_experts() {
    for replaced in [&[], V2] {
        let of = |stream| with_stream(replaced, MoePath::Fused, MlaForm::Absorbed, DType::BF16, stream);
        let slots = of(SharedExpertsStream::Auto);
        let apart = of(SharedExpertsStream::Off);
        assert!(
            !kernels(&slots, 1).contains("shared experts") && kernels(&apart, 1).contains("shared experts")
        );
        let prompts: Vec<Vec<u32>> = (1..6).map(|n| (0..n * 61).map(|i| i * 7 % 1000).collect()).collect();
        for chunk in [1, 3, 6, 50, usize::MAX >> 1] {
            let schedule = Schedule { chunk, block_size: 16, together: chunk > 1 };
            let logits = |model| all_logits(model, &prompts, schedule, &mut cuda()).unwrap().concat();
            let got = logits(&slots);
            let want = logits(&apart);
            let off: f64 = got.iter().zip(&want).map(|(g, w)| f64::from(g - w).powi(2)).sum();
            let all: f64 = want.iter().map(|w| f64::from(*w).powi(2)).sum();
            assert!((off / all).sqrt() < 2e-2, "chunks of {chunk}: off by {}", (off / all).sqrt());
        }
    }
}

/// The first prompt and position whose logits have different bits in a batch and alone.
fn first_difference(model: &DeepseekV2, mut ex: Exec) -> Option<(usize, usize)> {
    let prompt = |i: usize| {
        (0..[150, 1, 37, 64, 65, 9][i % 6]).map(move |j| ((i * 131 + j * 17 + j * j) % 1000) as u32)
    };
    let prompts: Vec<Vec<u32>> = (0..30).map(|i| prompt(i).collect()).collect();
    let alone = Schedule { chunk: usize::MAX >> 1, block_size: 16, together: false };
    let want = all_logits(model, &prompts, alone, &mut ex).unwrap();
    for (batch, chunk) in [(1, 1), (1, 7), (5, 64), (30, 1), (30, 5), (30, usize::MAX >> 1)] {
        let together = Schedule { chunk, block_size: 8, together: true };
        let got = all_logits(model, &prompts[..batch], together, &mut ex).unwrap();
        for (prompt, (got, want)) in got.iter().zip(&want).enumerate() {
            if let Some(at) = got.iter().zip(want).position(|(g, w)| g.to_bits() != w.to_bits()) {
                return Some((prompt, at / 1000));
            }
        }
    }
    None
}

#[test]
fn batch_invariant_bits_do_not_depend_on_batch_and_chunks() {
    let exact = || cuda().with_batch_invariant(true);
    for (replaced, mla, dtype) in [
        (&[][..], MlaForm::Absorbed, DType::BF16),
        (V2, MlaForm::Absorbed, DType::BF16),
        (V2, MlaForm::Naive, DType::BF16),
        (V2, MlaForm::Absorbed, DType::F32),
    ] {
        let model = model(replaced, MoePath::Fused, mla, dtype);
        assert_eq!(first_difference(&model, exact()), None, "{mla:?} {dtype:?}");
    }
    // This is the control: without batch invariance, different kernels are used for different batches.
    assert_ne!(first_difference(&model(&[], MoePath::Fused, MlaForm::Absorbed, DType::BF16), cuda()), None);
}
