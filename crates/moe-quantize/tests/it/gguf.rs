//! Tests of GGUF files that are made from floats: the reader runs them as the model that they were made from.

use std::path::{Path, PathBuf};

use candle_core::DType;
use model_runtime::checkpoint::Gguf;
use moe_engine::tokenizer::Tokenizer;
use moe_quant::QuantGroup;
use moe_quantize::{FileFormat, GgufMix, RandomSettings, quantize, quantize_gguf, random_checkpoint};
use serde_json::{Value, json};

use crate::support::{bundled, error, fixture, json, loaded, logits_of, settings};

const MIXES: [GgufMix; 4] = [GgufMix::Q8_0, GgufMix::Q6K, GgufMix::Q4KM, GgufMix::Q4_0];

/// The logits of all positions of a prompt.
fn logits(path: &Path, ids: &[u32]) -> Vec<f32> {
    logits_of(loaded(path, DType::F32).as_ref(), ids)
}

fn ids(vocabulary: u32) -> Vec<u32> {
    (0..40).map(|at| (at * 37 + 11) % vocabulary).collect()
}

/// The root of the mean squared difference of a row, relative to the root of the mean square of `want`: the median over
/// the rows, because a row whose router is almost undecided may take another expert.
fn usual(got: &[f32], want: &[f32], size: usize) -> f64 {
    assert_eq!(got.len(), want.len());
    let square = |x: f32| f64::from(x).powi(2);
    let relative = |(got, want): (&[f32], &[f32])| {
        let off: f64 = got.iter().zip(want).map(|(a, b)| square(a - b)).sum();
        (off / want.iter().map(|x| square(*x)).sum::<f64>()).sqrt()
    };
    let mut rows: Vec<f64> = got.chunks(size).zip(want.chunks(size)).map(relative).collect();
    rows.sort_by(f64::total_cmp);
    rows[rows.len() / 2]
}

fn argmax(row: &[f32]) -> usize {
    row.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0
}

fn types(file: &Path) -> Vec<(String, String)> {
    Gguf::open(file).unwrap().tensors().map(|tensor| (tensor.name, tensor.kind)).collect()
}

fn type_of(file: &Path, name: &str) -> String {
    let types = types(file);
    types.into_iter().find(|(other, _)| other == name).map(|(_, kind)| kind).unwrap()
}

/// A checkpoint with the bundled model's tokenizer, random weights, and these changes of its config.
fn random(dir: &Path, changes: &Value) -> PathBuf {
    let config = dir.join("config");
    std::fs::create_dir(&config).unwrap();
    for file in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        std::fs::copy(bundled().join(file), config.join(file)).unwrap();
    }
    let mut described = json(&bundled().join("config.json"));
    changes.as_object().unwrap().iter().for_each(|(key, value)| described[key] = value.clone());
    std::fs::write(config.join("config.json"), described.to_string()).unwrap();
    let out = dir.join("random");
    let settings = RandomSettings { quantised: None, dtype: Some(DType::F32), layers: None, seed: 5 };
    random_checkpoint(&config, &out, &settings).unwrap();
    out
}

/// The trained model keeps its predictions; Q8_0 keeps the most likely token of every position.
#[test]
fn the_bundled_model_keeps_its_predictions() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = Tokenizer::from_dir(&bundled()).unwrap();
    let text = "The sun was low over the water, and the old man walked home with his dog along the path by the river.";
    let mut ids = tokenizer.encode(text).unwrap();
    ids.truncate(60);
    let want = logits(&bundled(), &ids);
    let size = want.len() / ids.len();
    for (mix, bound) in MIXES.into_iter().zip([0.005, 0.015, 0.03, 0.035]) {
        let out = dir.path().join(format!("{}.gguf", mix.name()));
        let report = quantize_gguf(&bundled(), &out, mix).unwrap();
        assert!(report.bytes.1 < report.bytes.0, "{}", report.text());
        let got = logits(&out, &ids);
        let off = usual(&got, &want, size);
        assert!(off < bound, "{}: {off}", mix.name());
        let agreed = got.chunks(size).zip(want.chunks(size)).filter(|(a, b)| argmax(a) == argmax(b)).count();
        let least = if mix == GgufMix::Q8_0 { ids.len() } else { ids.len() * 3 / 4 };
        assert!(agreed >= least, "{}: {agreed} of {}", mix.name(), ids.len());
        assert_eq!(Tokenizer::from_dir(&out).unwrap().encode(text).unwrap()[..ids.len()], ids);
    }
    // Rows of 72 columns hold no blocks, the router stays in F32, the tied embedding has the bits of the projection.
    let mixed = dir.path().join("Q4_K_M.gguf");
    for (name, kind) in [
        ("token_embd.weight", "Q6_K"),
        ("blk.0.attn_q.weight", "Q4_K"),
        ("blk.2.attn_v.weight", "Q6_K"),
        ("blk.1.attn_v.weight", "Q4_K"),
        ("blk.0.ffn_up_exps.weight", "Q4_K"),
        ("blk.0.ffn_down_exps.weight", "F16"),
        ("blk.0.ffn_gate_inp.weight", "F32"),
        ("output_norm.weight", "F32"),
    ] {
        assert_eq!(type_of(&mixed, name), kind, "{name}");
    }
    assert!(types(&mixed).iter().all(|(name, _)| name != "output.weight"));
}

/// Every family whose names can be turned round: the greedy tokens and the texts of the fixture.
#[test]
fn every_family_keeps_its_greedy_tokens() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["text", "qwen2-text", "olmoe-text", "glm4-text", "deepseek-text", "deepseek3-text"] {
        let out = dir.path().join(format!("{name}.gguf"));
        quantize_gguf(&fixture(name), &out, GgufMix::Q8_0).unwrap();
        let case = json(&fixture(name).join("text_case.json"));
        let [mut equal, mut count] = [0, 0];
        for greedy in case["greedy"].as_array().unwrap() {
            let numbers = |key: &str| -> Vec<u32> {
                greedy[key].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
            };
            let prompt = numbers("prompt_ids");
            let text = greedy["prompt"].as_str().unwrap();
            assert_eq!(Tokenizer::from_dir(&out).unwrap().encode(text).unwrap(), prompt, "{name}");
            let generated = numbers("generated_ids");
            let all = [&prompt[..], &generated].concat();
            let all = &all[..all.len().min(60)];
            let got = logits(&out, all);
            let want = logits(&fixture(name), all);
            let size = got.len() / all.len();
            let off = usual(&got, &want, size);
            assert!(off < 0.02, "{name}: {off}");
            let rows = got.chunks(size).skip(prompt.len() - 1).zip(&all[prompt.len()..]);
            let matches: Vec<bool> = rows.map(|(row, token)| argmax(row) as u32 == *token).collect();
            equal += matches.iter().filter(|matches| **matches).count();
            count += matches.len();
        }
        // At one position of `text` a router is almost undecided: llama.cpp predicts the same other token of this file.
        let expected = if name == "text" { count - 1 } else { count };
        assert_eq!(equal, expected, "{name}: {count} tokens");
    }
}

/// Blocks of 256 columns everywhere, experts in packs or one by one, a projection of its own.
#[test]
fn mixtures_of_whole_super_blocks_are_near_to_the_floats() {
    for changes in [
        json!({"moe_intermediate_size": 256, "tie_word_embeddings": false, "num_experts": 12}),
        json!({"moe_intermediate_size": 512, "num_experts": 8, "num_hidden_layers": 2}),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let source = random(dir.path(), &changes);
        let ids = ids(2048);
        let want = logits(&source, &ids);
        for (mix, bound) in MIXES.into_iter().zip([0.03, 0.09, 0.25, 0.35]) {
            let out = dir.path().join(format!("{}.gguf", mix.name()));
            quantize_gguf(&source, &out, mix).unwrap();
            let off = usual(&logits(&out, &ids), &want, 2048);
            assert!(off < bound && off > bound / 10.0, "{changes} {}: {off}", mix.name());
        }
        let mixed = dir.path().join("Q4_K_M.gguf");
        let eight = changes["num_experts"] == 8;
        let attention = if eight { ["Q8_0", "Q5_K"] } else { ["Q4_K", "Q4_K"] };
        let found = ["blk.0.attn_k.weight", "blk.0.attn_output.weight"].map(|name| type_of(&mixed, name));
        assert_eq!(found, attention);
        assert_eq!(type_of(&mixed, "blk.1.ffn_down_exps.weight"), if eight { "Q6_K" } else { "Q4_K" });
    }
}

/// Experts that the source packs into one tensor are written as experts one by one are.
#[test]
fn packs_of_experts_are_divided() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("packed");
    std::fs::create_dir(&source).unwrap();
    for entry in std::fs::read_dir(fixture("packed")).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, source.join(path.file_name().unwrap())).unwrap();
    }
    let rows = json(&source.join("config.json"))["vocab_size"].as_u64().unwrap() as u32;
    let mut tokenizer = json(&fixture("text").join("tokenizer.json"));
    let vocabulary = tokenizer["model"]["vocab"].as_object_mut().unwrap();
    vocabulary.retain(|_, id| id.as_u64().unwrap() < u64::from(rows));
    tokenizer["model"]["merges"] = json!([]);
    tokenizer["added_tokens"] = json!([]);
    std::fs::write(source.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let out = dir.path().join("packed.gguf");
    quantize_gguf(&source, &out, GgufMix::Q8_0).unwrap();
    let off = usual(&logits(&out, &ids(rows)), &logits(&source, &ids(rows)), rows as usize);
    assert!(off < 0.02, "{off}");
}

/// What the file says beyond the network: its tokens, special ids, template and sampling.
#[test]
fn metadata_are_read_back() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("text.gguf");
    quantize_gguf(&fixture("text"), &out, GgufMix::Q4_0).unwrap();
    let gguf = Gguf::open(&out).unwrap();
    let text = |key: &str| gguf.text(key).unwrap().unwrap_or_default().to_string();
    let number = |key: &str| gguf.unsigned(key).unwrap();
    assert_eq!(text("general.architecture"), "qwen3moe");
    assert_eq!(text("general.name"), "text");
    assert_eq!((number("general.file_type"), number("general.quantization_version")), (Some(2), Some(2)));
    assert_eq!((text("tokenizer.ggml.model"), text("tokenizer.ggml.pre")), ("gpt2".into(), "gpt-2".into()));
    let settings = json(&fixture("text").join("tokenizer_config.json"));
    assert_eq!(text("tokenizer.chat_template"), settings["chat_template"].as_str().unwrap());
    let tokens = gguf.texts("tokenizer.ggml.tokens").unwrap().unwrap();
    let kinds = gguf.integers("tokenizer.ggml.token_type").unwrap().unwrap();
    assert_eq!((tokens.len(), kinds.len()), (300, 300));
    let end = number("tokenizer.ggml.eos_token_id").unwrap() as usize;
    assert_eq!((tokens[end], kinds[end], kinds[0]), ("<|im_end|>", 3, 1));
    assert_eq!(tokens[number("tokenizer.ggml.eot_token_id").unwrap() as usize], "<|endoftext|>");
    assert_eq!(gguf.flag("tokenizer.ggml.add_bos_token").unwrap(), Some(false));
    let merges = gguf.texts("tokenizer.ggml.merges").unwrap().unwrap();
    let expected = json(&fixture("text").join("tokenizer.json"))["model"]["merges"].as_array().unwrap().len();
    assert_eq!(merges.len(), expected);
    // Tensors begin at multiples of 32 bytes, which the reader checks; the file ends with the last one.
    assert_eq!(gguf.bytes() % 32, 0);
}

/// Returns the error of a run, which must leave no file.
fn refused(model: &Path) -> String {
    let dir = tempfile::tempdir().unwrap();
    let error = error(quantize_gguf(model, &dir.path().join("out.gguf"), GgufMix::Q8_0));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "{error}");
    error
}

fn copy(name: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(fixture(name)).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    dir
}

/// Changes a JSON file of a copied checkpoint.
fn change(dir: &Path, file: &str, key: &str, value: Value) {
    let path = dir.join(file);
    let mut content = json(&path);
    content[key] = value;
    std::fs::write(path, content.to_string()).unwrap();
}

#[test]
fn what_a_file_cannot_hold_is_refused() {
    let contains = |error: String, parts: &[&str]| {
        parts.iter().for_each(|part| assert!(error.contains(part), "{part:?} is not in: {error}"));
    };
    // Families whose values or names differ.
    contains(refused(&fixture("qwen3-next-text")), &["qwen3_next", "not written", "qwen3_moe, qwen2_moe"]);
    contains(refused(&fixture("ernie-text")), &["ernie4_5_moe", "not written"]);
    contains(refused(&fixture("mixtral-text")), &["mixtral", "not written"]);
    // Configs whose meaning files of the architecture cannot say.
    let source = copy("text");
    change(source.path(), "config.json", "norm_topk_prob", json!(false));
    contains(
        refused(source.path()),
        &["config.json says of experts", "renormalize: false", "renormalize: true"],
    );
    let source = copy("text");
    change(source.path(), "config.json", "rope_scaling", json!({"type": "dynamic", "factor": 2.0}));
    contains(refused(source.path()), &["no dynamic scaling"]);
    // Tokenizers.
    contains(refused(&fixture("base")), &["tokenizer.json", "a GGUF file holds the tokenizer"]);
    let source = copy("text");
    change(source.path(), "tokenizer.json", "pre_tokenizer", json!({"type": "Whitespace"}));
    contains(refused(source.path()), &["tokenizer.json", "no name for a tokenizer with the step"]);
    let source = copy("text");
    change(source.path(), "config.json", "model_type", json!("llama"));
    contains(refused(source.path()), &["model_type", "llama"]);
    let source = copy("text");
    let model = json!({"type": "Unigram", "vocab": []});
    change(source.path(), "tokenizer.json", "model", model);
    contains(refused(source.path()), &["Unigram", "expected a byte-level BPE"]);
    // A token after the last row of the embedding.
    let source = copy("text");
    let token = json!([{"id": 300, "content": "<x>", "special": true, "single_word": false, "lstrip": false,
        "rstrip": false, "normalized": false}]);
    change(source.path(), "tokenizer.json", "added_tokens", token);
    contains(refused(source.path()), &["\"<x>\"", "an id below 300", "got 300"]);
}

#[test]
fn names_that_cannot_be_written_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out.gguf");
    std::fs::write(&out, "x").unwrap();
    let told = error(quantize_gguf(&fixture("text"), &out, GgufMix::Q8_0));
    assert!(told.contains("exists already") && told.contains("another name"), "{told}");
    assert_eq!(std::fs::read(&out).unwrap(), b"x");
    let told = error(quantize_gguf(&fixture("text"), &dir.path().join("out"), GgufMix::Q8_0));
    assert!(told.contains("ends with .gguf"), "{told}");
    std::fs::write(dir.path().join("b.gguf.incomplete"), "x").unwrap();
    let told = error(quantize_gguf(&fixture("text"), &dir.path().join("b.gguf"), GgufMix::Q8_0));
    assert!(told.contains("b.gguf.incomplete") && told.contains("remove it"), "{told}");
    assert_eq!(std::fs::read(dir.path().join("b.gguf.incomplete")).unwrap(), b"x");
    let made = dir.path().join("made");
    quantize(&bundled(), &made, &settings(FileFormat::CompressedTensors, 8, QuantGroup::Channel)).unwrap();
    let told = error(quantize_gguf(&made, &dir.path().join("c.gguf"), GgufMix::Q8_0));
    assert!(told.contains("quantised already"), "{told}");
}
