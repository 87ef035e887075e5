//! Tests of everything that is refused. Each error says what is wrong and what to do, and no file is left.

use std::path::Path;

use moe_quant::QuantGroup;
use moe_quantize::{FileFormat, Indivisible, Settings, quantize};

use crate::support::{bundled, error, fixture, json, settings};

fn channel() -> Settings {
    settings(FileFormat::CompressedTensors, 8, QuantGroup::Channel)
}

/// Returns the error of a run. The run must leave the parent of its folder empty.
fn refused(model: &Path, settings: &Settings) -> String {
    let dir = tempfile::tempdir().unwrap();
    let error = error(quantize(model, &dir.path().join("out"), settings));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "{error}");
    error
}

/// Returns a copy of a checkpoint that tests may change.
fn copy(model: &Path) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(model).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
    }
    dir
}

fn contains(error: &str, parts: &[&str]) {
    parts.iter().for_each(|part| assert!(error.contains(part), "{part:?} is not in: {error}"));
}

#[test]
fn a_quantised_source() {
    let dir = tempfile::tempdir().unwrap();
    let made = dir.path().join("made");
    quantize(&bundled(), &made, &channel()).unwrap();
    let error = error(quantize(&made, &dir.path().join("again"), &channel()));
    contains(&error, &["quantised already", "compressed-tensors", "original float dtype"]);
}

#[test]
fn an_output_that_exists() {
    let dir = tempfile::tempdir().unwrap();
    let error = error(quantize(&bundled(), dir.path(), &channel()));
    contains(&error, &["exists already", "another name"]);
}

#[test]
fn what_is_not_a_checkpoint() {
    let empty = tempfile::tempdir().unwrap();
    contains(&refused(empty.path(), &channel()), &["cannot read", "config.json"]);
    let other = copy(&fixture("base"));
    let mut config = json(&other.path().join("config.json"));
    config["model_type"] = "llama".into();
    std::fs::write(other.path().join("config.json"), config.to_string()).unwrap();
    contains(&refused(other.path(), &channel()), &["model_type", "qwen3_moe", "llama"]);
    std::fs::write(other.path().join("config.json"), "{").unwrap();
    contains(&refused(other.path(), &channel()), &["config.json is not JSON"]);
}

#[test]
fn tensors_that_the_config_does_not_describe() {
    let dir = copy(&fixture("base"));
    let mut config = json(&dir.path().join("config.json"));
    config["num_hidden_layers"] = 9.into();
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    contains(&refused(dir.path(), &channel()), &["missing", "model.layers.3.self_attn.q_proj.weight"]);
}

#[test]
fn sizes_that_do_not_divide() {
    let mut settings = settings(FileFormat::Gptq, 4, QuantGroup::Size(128));
    let error = refused(&bundled(), &settings);
    contains(
        &error,
        &[
            "64 linear layers",
            "experts.0.down_proj",
            "groups of 128 columns do not divide 72",
            "and 59 more",
            "`indivisible`",
        ],
    );
    // Rows of 20 or 28 columns do not fill whole words of 8 either.
    settings.indivisible = Indivisible::Channel;
    contains(&refused(&fixture("base"), &settings), &["packed 8 to a word", "`indivisible` keep"]);
}

#[test]
fn settings_that_contradict() {
    let mut ordered = settings(FileFormat::Gptq, 4, QuantGroup::Size(32));
    ordered.desc_act = true;
    contains(&refused(&bundled(), &ordered), &["`desc_act`", "`method` gptq"]);
    let bits = settings(FileFormat::Gptq, 3, QuantGroup::Channel);
    contains(&refused(&bundled(), &bits), &["`bits`", "4 or 8", "got 3"]);
    let mut pattern = channel();
    pattern.ignore = vec!["model.layers.*.attention".to_string()];
    contains(&refused(&bundled(), &pattern), &["model.layers.*.attention", "names no linear layer"]);
    pattern.ignore = vec!["*".to_string()];
    contains(&refused(&bundled(), &pattern), &["no linear layer is left"]);
}

#[test]
fn weights_that_are_not_finite() {
    let dir = copy(&fixture("base"));
    let path = dir.path().join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let header = u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
    let meta: serde_json::Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    let name = "model.layers.1.self_attn.k_proj.weight";
    let at = 8 + header + meta[name]["data_offsets"][0].as_u64().unwrap() as usize;
    bytes[at..at + 2].copy_from_slice(&half::bf16::NAN.to_le_bytes());
    std::fs::write(&path, bytes).unwrap();
    contains(&refused(dir.path(), &channel()), &["model.layers.1.self_attn.k_proj", "row 0", "not finite"]);
}
