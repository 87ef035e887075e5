//! Quantised checkpoints in whole models: every format gives the tokens and logits of its dequantised floats, on one
//! rank and on many, on both paths of experts.

pub mod dequantised;
pub mod make;
#[allow(dead_code)] // Its other users choose formats by number.
#[path = "../../../crates/moe-quant/tests/it/pack.rs"]
mod pack;

use std::collections::BTreeSet;

use candle_core::{DType, Device};
use model_families::ALL;
use model_runtime::{BlockContext, CausalLm, Checkpoint, Exec, Geometry, MlaForm};
use moe_comm::ParallelConfig;
use moe_engine::LoadOptions;
use moe_layer::MoePath;
use moe_tests::{Schedule, all_logits};
use serde_json::{Value, json};

use crate::geometries::{Case, Origin, backends, check};
use crate::running::prompt;
use make::{Made, make};

pub const QWEN: &str = r#"{
    "model_type": "qwen3_moe", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128,
    "moe_intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": true, "mlp_only_layers": [1],
    "max_position_embeddings": 512, "tie_word_embeddings": false
}"#;

const DEEPSEEK: &str = r#"{
    "model_type": "deepseek_v2", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128,
    "moe_intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "q_lora_rank": 64,
    "kv_lora_rank": 64, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 6,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "topk_method": "greedy",
    "routed_scaling_factor": 1.5, "max_position_embeddings": 512
}"#;

pub fn gptq(bits: u8, group: i64, sym: bool, desc_act: bool, version: &str) -> Value {
    json!({"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, "desc_act": desc_act,
           "checkpoint_format": version})
}

pub fn packed(
    bits: u8,
    group: Option<usize>,
    symmetric: bool,
    actorder: Option<&str>,
    ignore: &[&str],
) -> Value {
    let mut weights = json!({"num_bits": bits, "type": "int", "symmetric": symmetric,
                             "strategy": if group.is_some() { "group" } else { "channel" }});
    weights["group_size"] = group.map_or(Value::Null, Value::from);
    weights["actorder"] = actorder.map_or(Value::Null, Value::from);
    json!({"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ignore,
           "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}})
}

fn compressed_fp4(format: &str, strategy: &str, group: usize) -> Value {
    let weights =
        json!({"num_bits": 4, "type": "float", "symmetric": true, "strategy": strategy, "group_size": group});
    json!({"quant_method": "compressed-tensors", "format": format, "ignore": ["lm_head"],
           "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}})
}

fn mxfp4() -> Value {
    compressed_fp4("mxfp4-pack-quantized", "group", 32)
}

fn modelopt() -> Value {
    json!({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*mlp.gate"]})
}

/// FP8 in attention, NVFP4 in experts.
fn modelopt_mixed() -> Value {
    let mut layers = json!({});
    for layer in 0..3 {
        layers[format!("model.layers.{layer}.self_attn")] = json!({"quant_algo": "FP8"});
        layers[format!("model.layers.{layer}.mlp.experts")] =
            json!({"quant_algo": "NVFP4", "group_size": 16});
    }
    json!({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers})
}

fn quark() -> Value {
    let weight = json!({"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"});
    json!({"quant_method": "quark", "exclude": ["lm_head"], "global_quant_config": {"weight": weight}})
}

/// Every format and option: a name, a header, and whether sums keep the order of columns, so that logits have the bits
/// of the floats.
fn headers() -> Vec<(&'static str, Value, bool)> {
    let fp8 = |strategy: &str| {
        let mut weights = json!({"num_bits": 8, "type": "float", "symmetric": true, "strategy": strategy});
        if strategy == "block" {
            weights["block_structure"] = json!([16, 32]);
        }
        json!({"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
               "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}})
    };
    let auto_round = |sym: bool, packing: &str| {
        json!({"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": sym, "packing_format": packing,
               "data_type": "int"})
    };
    let mut dynamic = gptq(4, 32, true, false, "gptq");
    dynamic["dynamic"] = json!({"-:.*self_attn.*": {}, "+:.*experts\\.1\\..*": {"bits": 8}});
    let mut with_head = gptq(8, 32, false, false, "gptq_v2");
    with_head["lm_head"] = json!(true);
    let mut biases = gptq(4, 32, true, false, "gptq");
    biases["static_groups"] = json!(false);
    vec![
        ("gptq4", gptq(4, 32, true, false, "gptq"), true),
        ("gptq4 zeros", gptq(4, 16, false, false, "gptq"), true),
        ("gptq4 v2 zeros", gptq(4, 32, false, false, "gptq_v2"), true),
        ("gptq8 channel", gptq(8, -1, true, false, "gptq"), true),
        ("gptq8 zeros lm_head", with_head, true),
        ("gptq4 act-order", gptq(4, 32, false, true, "gptq"), false),
        ("gptq8 act-order", gptq(8, 16, true, true, "gptq_v2"), false),
        ("gptq dynamic", dynamic, true),
        (
            "awq",
            json!({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": true, "version": "gemm"}),
            true,
        ),
        (
            "awq some",
            json!({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": true, "version": "gemm",
                            "modules_to_not_convert": ["self_attn"]}),
            true,
        ),
        ("packed4", packed(4, Some(32), true, None, &["lm_head"]), true),
        ("packed8 channel zeros", packed(8, None, false, None, &["lm_head", "re:.*self_attn.*"]), true),
        ("packed4 act-order", packed(4, Some(16), false, Some("group"), &["lm_head"]), false),
        ("packed8 weight order", packed(8, Some(32), true, Some("weight"), &[]), true),
        (
            "fp8 block",
            json!({"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}),
            true,
        ),
        ("fp8 tensor", fp8("tensor"), true),
        ("fp8 static", json!({"quant_method": "fp8", "activation_scheme": "static"}), true),
        ("packed fp8 block", fp8("block"), true),
        ("fp8 channel", fp8("channel"), true),
        ("mxfp4", mxfp4(), true),
        ("quark mxfp4", quark(), true),
        ("nvfp4", compressed_fp4("nvfp4-pack-quantized", "tensor_group", 16), true),
        ("modelopt nvfp4", modelopt(), true),
        ("modelopt mixed", modelopt_mixed(), true),
        ("autoround", auto_round(true, "auto_round:auto_gptq"), true),
        ("autoround zeros", auto_round(false, "auto_round"), true),
        ("autoround awq", auto_round(false, "auto_round:auto_awq"), true),
        ("gptq4 zero biases", biases, true),
    ]
}

/// What a refusal of a number format on a GPU says that works.
pub const WORKS: &str = "run it with `device` cpu, or set `dequantise` to load it as floats (";

const SCHEDULE: Schedule = Schedule { chunk: 7, block_size: 4, together: true };

/// Loads a checkpoint on one rank as the engine does. Also returns whether its experts are quantised in memory.
fn load(path: &str, options: LoadOptions, dtype: DType) -> (Box<dyn CausalLm>, Value) {
    load_checkpoint(&Checkpoint::open(path).unwrap(), options, dtype)
}

fn load_checkpoint(
    checkpoint: &Checkpoint,
    options: LoadOptions,
    dtype: DType,
) -> (Box<dyn CausalLm>, Value) {
    let model = ALL.parse(&checkpoint.config).unwrap();
    let expected = model.layout(&Geometry::default(), &|name| checkpoint.has(name)).unwrap().tensors;
    checkpoint.verify(&expected, model.ignored()).unwrap();
    let view = checkpoint.rank_view(&expected, Vec::new());
    let context = BlockContext { quant: Some(std::sync::Arc::new(view.clone())), ..options.context };
    let loaded =
        model.load(&LoadOptions { context, ..options }, view.var_builder(dtype, &Device::Cpu)).unwrap();
    (loaded.model, loaded.backend)
}

pub fn logits(path: &str, options: LoadOptions, dtype: DType) -> Vec<f32> {
    logits_of(load(path, options, dtype).0.as_ref())
}

fn logits_of(model: &dyn CausalLm) -> Vec<f32> {
    let vocab = model.info().vocab_size;
    let sequences = [prompt(vocab, 23, 1), prompt(vocab, 5, 2)];
    all_logits(model, &sequences, SCHEDULE, &mut Exec::cpu()).unwrap().concat()
}

/// The largest distance between two arrays of logits, relative to the largest expected logit.
pub fn distance(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len());
    let largest = want.iter().fold(0f32, |most, x| most.max(x.abs()));
    got.iter().zip(want).fold(0f32, |most, (a, b)| most.max((a - b).abs())) / largest
}

/// The median over rows: a row whose router was almost undecided may take another expert.
pub fn usual_distance(got: &[f32], want: &[f32]) -> f32 {
    let mut rows: Vec<f32> = got.chunks(96).zip(want.chunks(96)).map(|(a, b)| distance(a, b)).collect();
    rows.sort_by(f32::total_cmp);
    rows[rows.len() / 2]
}

fn close(config: &str, options: &[LoadOptions]) {
    for (seed, (name, header, keeps_order)) in (1u64..).zip(headers()) {
        let made = make(config, &header, seed);
        assert!(made.matrices > 10, "{name}: {} matrices", made.matrices);
        for options in options {
            let what = format!("{name} {:?} {:?} {:?}", options.moe_path, options.mla, options.backend);
            let run = |path, dtype| logits(path, options.clone(), dtype);
            let plain = LoadOptions { backend: None, ..options.clone() };
            let want = logits(made.twin, plain, DType::F32);
            let got = run(made.quantised, DType::F32);
            match keeps_order {
                true => assert!(got == want, "{what}: other bits, {}", distance(&got, &want)),
                false => assert!(distance(&got, &want) < 1e-4, "{what}: {}", distance(&got, &want)),
            }
            // In bf16 the checkpoint may be as far from f32 as the floats are.
            let floats = run(made.twin_for(options), DType::BF16);
            let got = run(made.quantised, DType::BF16);
            let noise = usual_distance(&floats, &want);
            let error = usual_distance(&got, &want);
            assert!(error < 2.0 * noise + 1e-3, "{what}: bf16 {error}, the floats {noise}");
        }
    }
}

impl Made {
    /// The twin; or the checkpoint itself, if the options ask for emulation, which the twin refuses.
    fn twin_for(&self, options: &LoadOptions) -> &'static str {
        if options.backend.is_some() { self.quantised } else { self.twin }
    }
}

fn path(path: MoePath) -> LoadOptions {
    LoadOptions { moe_path: Some(path), ..LoadOptions::default() }
}

fn emulation() -> LoadOptions {
    LoadOptions { backend: Some("emulation".to_string()), ..path(MoePath::Fused) }
}

#[test]
fn every_format_has_the_logits_of_its_floats_in_qwen() {
    close(QWEN, &[path(MoePath::Fused), path(MoePath::Legacy), emulation()]);
}

#[test]
fn every_format_has_the_logits_of_its_floats_in_deepseek() {
    let naive = LoadOptions { mla: Some(MlaForm::Naive), ..path(MoePath::Fused) };
    close(DEEPSEEK, &[path(MoePath::Legacy), naive, emulation()]);
}

/// Integers stay integers: the choice of the oracle for each format.
#[test]
fn experts_are_read_as_they_are_stored() {
    let mut schemes = BTreeSet::new();
    for (name, header, _) in headers() {
        let made = make(QWEN, &header, 3);
        let (_, backend) = load(made.quantised, path(MoePath::Fused), DType::BF16);
        // Experts of two schemes are loaded as floats, and the oracle says so.
        let apart = name == "gptq dynamic";
        let is_plain = backend["spec"]["quant"] == "none";
        assert_eq!(backend["chosen"], "cpu", "{name}");
        assert_eq!(is_plain, apart, "{name}: {}", backend["spec"]["quant"]);
        schemes.insert(backend["spec"]["quant"].to_string());
    }
    assert!(schemes.len() > 6, "{schemes:?}");
}

/// Kernels of the CPU and of GPUs read every format. A GGUF file's types may be refused (`gguf.rs`).
#[test]
fn every_format_has_kernels_everywhere() {
    for (name, header, _) in headers() {
        let made = make(QWEN, &header, 1);
        let checkpoint = Checkpoint::open(made.quantised).unwrap();
        let model = ALL.parse(&checkpoint.config).unwrap();
        let layout = model.layout(&Geometry::default(), &|name| checkpoint.has(name)).unwrap();
        for on_gpu in [false, true] {
            layout.check_quantised(checkpoint.quantisation.as_ref().unwrap(), on_gpu).expect(name);
        }
    }
}

/// Biases of zeros, which programs that write GPTQ checkpoints add, are ignored. Other biases are left out and named.
#[test]
fn a_bias_that_the_model_does_not_have_is_told_unless_it_is_zero() {
    let mut header = gptq(4, 32, true, false, "gptq");
    header["static_groups"] = json!(false);
    let made = make(QWEN, &header, 1);
    let verify = || {
        let checkpoint = Checkpoint::open(made.quantised).unwrap();
        let model = ALL.parse(&checkpoint.config).unwrap();
        let layout = model.layout(&Geometry::default(), &|name| checkpoint.has(name));
        let verified = checkpoint.verify(&layout.unwrap().tensors, model.ignored());
        verified.unwrap().warnings().collect::<Vec<_>>()
    };
    assert!(verify().is_empty());
    let path = std::path::Path::new(made.quantised).join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let (header, tensors) = moe_quant::safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    let name = "model.layers.2.mlp.experts.4.down_proj.bias";
    let (start, _) = tensors.info(name).unwrap().data_offsets;
    let third = 8 + header + start + 2 * size_of::<f32>();
    bytes[third..][..4].copy_from_slice(&0.25f32.to_le_bytes());
    std::fs::write(&path, bytes).unwrap();
    let told = verify();
    assert!(
        told.len() == 1 && told[0].ends_with(": model.layers.*.mlp.experts.*.down_proj.bias"),
        "{told:?}"
    );
}

/// Gate and up whose columns have two different orders stay two matrices.
#[test]
fn two_orders_of_columns_stay_quantised() {
    let made = make(QWEN, &gptq(4, 32, false, true, "gptq"), 0);
    let (_, backend) = load(made.quantised, path(MoePath::Fused), DType::F32);
    let quant = backend["spec"]["quant"].as_str().unwrap();
    assert!(quant.starts_with("int4"), "{quant}");
    let run = |path_of| logits(path_of, path(MoePath::Fused), DType::F32);
    assert!(distance(&run(made.quantised), &run(made.twin)) < 1e-4);
}

/// Any tensor, data and expert parallelism and any backend give the bits of one rank.
fn ranks(config: &str) {
    for (at, (name, header, _)) in headers().into_iter().enumerate() {
        let made = make(config, &header, at as u64 + 1);
        let origin = Origin::open(made.quantised);
        let mut cases = Vec::new();
        for (turn, parallel) in backends().into_iter().enumerate() {
            // 64 inputs can be cut over 2 ranks if groups have 32 columns, and not at all if groups have 64.
            let most = if name == "awq some" { 1 } else { 2 };
            if turn % 6 == at % 6 && parallel.tp <= most && origin.fits(&parallel) {
                let dtype = if turn % 4 == 0 { DType::BF16 } else { DType::F32 };
                cases.push(Case::new(made.quantised, dtype, parallel));
            }
        }
        // The experts have two schemes, and some ranks have experts of only one of them. All ranks load floats.
        let two = |parallel: &ParallelConfig| {
            name == "gptq dynamic" && parallel.enable_expert_parallel && parallel.tp * parallel.dp == 2
        };
        for parallel in backends().into_iter().filter(two) {
            cases.push(Case::new(made.quantised, DType::BF16, parallel));
        }
        if name.contains("channel") || ["fp8 tensor", "fp8 static", "gptq4 zeros"].contains(&name) {
            cases.push(Case::new(
                made.quantised,
                DType::BF16,
                ParallelConfig { tp: 4, ..ParallelConfig::default() },
            ));
        }
        assert!(!cases.is_empty());
        check(&cases);
    }
}

#[test]
fn ranks_have_the_bits_of_one_in_qwen() {
    ranks(QWEN);
}

#[test]
fn ranks_have_the_bits_of_one_in_deepseek() {
    ranks(DEEPSEEK);
}
