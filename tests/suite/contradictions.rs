//! Checkpoints whose config.json and weights contradict each other: which data is used, which is left out, and which
//! warnings appear.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use candle_core::{DType, Device, Tensor, safetensors};
use model_families::ALL;
use model_runtime::{Checkpoint, Geometry};
use moe_comm::ParallelConfig;
use moe_engine::LoadOptions;
use moe_tests::fixture;
use serde_json::{Value, json};

use crate::geometries::{Case, check};
use crate::quantised::make::make;
use crate::quantised::{QWEN, gptq, logits, packed};

type Tensors = HashMap<String, Tensor>;

const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

/// A fixture with a changed config and changed tensors, in a folder that exists as long as the tests run.
fn edited(name: &str, config: &[(&str, Value)], edit: impl Fn(&mut Tensors)) -> &'static str {
    let dir = tempfile::tempdir().unwrap().keep();
    let mut tensors = safetensors::load(fixture(name).join("model.safetensors"), &Device::Cpu).unwrap();
    edit(&mut tensors);
    safetensors::save(&tensors, dir.join("model.safetensors")).unwrap();
    fs::copy(fixture(name).join("config.json"), dir.join("config.json")).unwrap();
    configure(&dir, config);
    dir.display().to_string().leak()
}

fn configure(dir: &Path, settings: &[(&str, Value)]) {
    let path = dir.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    settings.iter().for_each(|(key, value)| config[key] = value.clone());
    fs::write(path, config.to_string()).unwrap();
}

/// The warnings about a checkpoint.
fn warnings(path: &str) -> Vec<String> {
    let checkpoint = Checkpoint::open(path).unwrap();
    let model = ALL.parse(&checkpoint.config).unwrap();
    let layout = model.layout(&Geometry::default(), &|name| checkpoint.has(name)).unwrap();
    checkpoint.verify(&layout.tensors, model.ignored()).unwrap().warnings().collect()
}

fn run(path: &str) -> Vec<f32> {
    logits(path, LoadOptions::default(), DType::F32)
}

fn is_tied(path: &str) -> bool {
    Checkpoint::open(path).unwrap().config.bool_or(&["tie_word_embeddings"], false).unwrap()
}

/// The file's own projection is used, on one rank and on several; a copy of the embedding is not.
fn heads(untied: &'static str, tied: &'static str) {
    let own = edited(untied, &[("tie_word_embeddings", json!(true))], |_| {});
    assert!(!is_tied(own));
    let told = warnings(own);
    assert!(told.len() == 1 && told[0].contains("lm_head of other values"), "{told:?}");
    let got = run(own);
    assert!(got == run(fixture(untied).to_str().unwrap()), "the file's projection is not what ran");
    let parallel = ParallelConfig { tp: 2, ..ParallelConfig::default() };
    check(&[Case::new(own, DType::F32, parallel)]);

    let want = run(fixture(tied).to_str().unwrap());
    for dtype in [DType::BF16, DType::F32] {
        let copy = edited(tied, &[], |tensors| {
            let head = tensors[EMBEDDING].to_dtype(dtype).unwrap();
            tensors.insert(HEAD.to_string(), head);
        });
        assert!(is_tied(copy) && warnings(copy).is_empty(), "{dtype:?}");
        assert!(run(copy) == want, "{dtype:?}");
    }
    // One value, the last one, in another dtype.
    let other = edited(tied, &[], |tensors| {
        let head = tensors[EMBEDDING].to_dtype(DType::F32).unwrap();
        let (rows, columns) = head.dims2().unwrap();
        let mut values = head.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        *values.last_mut().unwrap() += 1.0;
        tensors.insert(HEAD.to_string(), Tensor::from_vec(values, (rows, columns), &Device::Cpu).unwrap());
    });
    assert!(!is_tied(other));
    let got = run(other);
    let vocab = Checkpoint::open(other).unwrap().tensors.info(HEAD).unwrap().shape[0];
    let others = |(at, (got, want)): (usize, (&f32, &f32))| (got != want).then_some(at % vocab);
    let others: Vec<usize> = got.iter().zip(&want).enumerate().filter_map(others).collect();
    assert!(!others.is_empty() && others.iter().all(|column| *column == vocab - 1), "{others:?}");
}

#[test]
fn a_projection_of_its_own_is_used_though_the_config_ties_it() {
    heads("base", "tied");
    heads("deepseek-f32", "deepseek-tied");
}

#[test]
fn so_is_a_quantised_projection() {
    let mut with_head = gptq(8, 32, false, false, "gptq_v2");
    with_head["lm_head"] = json!(true);
    let fp8 = json!({"quant_method": "compressed-tensors", "format": "float-quantized",
                     "config_groups": {"group_0": {"targets": ["Linear"], "weights":
                         {"num_bits": 8, "type": "float", "symmetric": true, "strategy": "channel"}}}});
    for header in [with_head, packed(4, Some(32), true, None, &[]), fp8] {
        let made = make(QWEN, &header, 1);
        let want = run(made.quantised);
        configure(Path::new(made.quantised), &[("tie_word_embeddings", json!(true))]);
        assert!(!is_tied(made.quantised), "{header}");
        assert!(run(made.quantised) == want, "{header}");
        let told = warnings(made.quantised);
        assert!(told.iter().any(|told| told.contains("lm_head of other values")), "{told:?}");
    }
}

/// Copies the tensors of a layer after the last one, and adds tensors that speculative decoding and unused options
/// leave in files.
fn with_extras(tensors: &mut Tensors, layers: usize) {
    let last = format!("model.layers.{}.", layers - 1);
    let after = format!("model.layers.{layers}.");
    let of_last: Vec<_> = tensors.iter().filter(|(name, _)| name.starts_with(&last)).collect();
    let copies: Tensors =
        of_last.into_iter().map(|(name, tensor)| (name.replace(&last, &after), tensor.clone())).collect();
    tensors.extend(copies);
    let ones = |n: usize| Tensor::ones(n, DType::F32, &Device::Cpu).unwrap();
    for layer in 0..layers {
        tensors.insert(format!("model.layers.{layer}.self_attn.o_proj.bias"), ones(40));
        tensors.insert(format!("model.layers.{layer}.mlp.gate.e_score_correction_bias"), ones(8));
        tensors.insert(format!("model.layers.{layer}.mlp.gate.bias"), ones(8));
        tensors.insert(format!("model.layers.{layer}.mlp.experts.0.up_proj.bias"), ones(24));
    }
    tensors.insert("mtp.fc.weight".to_string(), ones(3));
    tensors.insert("mtp.norm.weight".to_string(), ones(3));
}

fn extras(name: &'static str) {
    let want = run(fixture(name).to_str().unwrap());
    let layers =
        Checkpoint::open(fixture(name)).unwrap().config.object()["num_hidden_layers"].as_u64().unwrap();
    let path = edited(name, &[], |tensors| with_extras(tensors, layers as usize));
    let told = warnings(path);
    assert_eq!(told.len(), 1, "{told:?}");
    for words in [
        &format!("model.layers.{layers}.* ("),
        "mtp.* (2)",
        "parts of modules that run",
        &format!("model.layers.*.self_attn.o_proj.bias ({layers})"),
        "model.layers.*.mlp.gate.e_score_correction_bias",
        "mlp.experts.*.up_proj.bias",
        "attention_bias or topk_method",
    ] {
        assert!(told[0].contains(words), "{words}: {}", told[0]);
    }
    assert!(told[0].lines().count() == 1 && told[0].len() < 1200, "{}", told[0]);
    assert!(run(path) == want, "{name}: extra tensors changed the logits");
    let parallel = ParallelConfig { tp: 2, ..ParallelConfig::default() };
    check(&[Case::new(path, DType::F32, parallel)]);
    // If a needed tensor is missing, both lists are shown.
    let lacking = edited(name, &[], |tensors| {
        with_extras(tensors, layers as usize);
        tensors.remove("model.norm.weight");
    });
    let checkpoint = Checkpoint::open(lacking).unwrap();
    let model = ALL.parse(&checkpoint.config).unwrap();
    let layout = model.layout(&Geometry::default(), &|name| checkpoint.has(name)).unwrap();
    let error = checkpoint.verify(&layout.tensors, model.ignored()).unwrap_err().to_string();
    assert!(error.contains("1 missing:\n  model.norm.weight") && error.contains("mtp.fc.weight"), "{error}");
}

#[test]
fn what_the_model_has_no_place_for_is_left_out_and_named() {
    extras("base");
    extras("deepseek-f32");
}

#[test]
fn modules_that_the_header_leaves_out_are_read_as_the_file_holds_them() {
    let made = make(QWEN, &gptq(4, 32, true, false, "gptq"), 7);
    let want = run(made.quantised);
    assert!(warnings(made.quantised).is_empty());
    let mut header = gptq(4, 32, true, false, "gptq");
    header["modules_in_block_to_quantize"] = json!([["mlp.experts"], ["mlp.gate_proj", "mlp.up_proj"]]);
    configure(Path::new(made.quantised), &[("quantization_config", header)]);
    assert!(run(made.quantised) == want);
    let told = warnings(made.quantised);
    // q, k, v and o of three layers, and the dense layer's down_proj.
    assert!(told.len() == 1 && told[0].contains("13 modules are not quantised"), "{told:?}");
    assert!(told[0].contains("modules_in_block_to_quantize"), "{told:?}");
}

/// Weights that only a header could explain are refused before any is read.
#[test]
fn integers_without_a_header_are_no_weights() {
    let made = make(QWEN, &json!({"quant_method": "fp8"}), 1);
    configure(Path::new(made.quantised), &[("quantization_config", Value::Null)]);
    let checkpoint = Checkpoint::open(made.quantised).unwrap();
    let model = ALL.parse(&checkpoint.config).unwrap();
    let layout = model.layout(&Geometry::default(), &|name| checkpoint.has(name)).unwrap();
    let error = checkpoint.verify(&layout.tensors, model.ignored()).unwrap_err().to_string();
    assert!(error.contains("no quantization_config") && error.contains("self_attn.q_proj.weight"), "{error}");
}
