//! `--dequantise`: quantised fixtures as floats in whole programs: tokens, parity, memory, and what is said of it.
#![allow(clippy::unwrap_used)] // helpers of tests are not tests in clippy's eyes

#[path = "../../../tests/cli/program.rs"]
mod program;

use program::{Program, fixture, stdout};
use serde_json::Value;

const PROGRAM: Program = Program { path: env!("CARGO_BIN_EXE_moe"), flags: &[] };

/// A fixture of each container.
const FIXTURES: [&str; 7] = [
    "quant-awq",
    "quant-gptq-int4-act-order",
    "quant-compressed-nvfp4",
    "quant-modelopt-nvfp4",
    "quant-fp8-block",
    "deepseek-quant-gptq-int4",
    "gpt-oss-quant-mxfp4",
];

fn path(name: &str) -> String {
    fixture(name).to_str().unwrap().to_string()
}

fn gguf() -> String {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/gguf/gpt-oss-mxfp4.gguf");
    file.to_string()
}

#[test]
fn tokens_are_those_of_the_codes() {
    let greedy =
        ["--skip-tokenizer-init", "--prompt", "5, 17, 3", "--max-new-tokens", "12", "--temperature", "0"];
    for model in FIXTURES.map(path).into_iter().chain([gguf()]) {
        let args = [&greedy[..], &["--ignore-eos", "--dtype", "f32", "--model", &model]].concat();
        let codes = PROGRAM.text(&args);
        assert!(codes.split_whitespace().count() == 12, "{model}: {codes}");
        assert_eq!(PROGRAM.text(&[&args[..], &["--dequantise"]].concat()), codes, "{model}");
    }
}

#[test]
fn floats_have_the_logits_of_transformers() {
    let recorded = FIXTURES.map(|name| (path(name), name));
    for (model, name) in recorded.into_iter().chain([(gguf(), "gpt-oss-quant-mxfp4")]) {
        let reference = fixture(name).join("reference.safetensors");
        let files = ["--model", &model, "--reference", reference.to_str().unwrap(), "--dequantise"];
        for dtype in ["f32", "bf16"] {
            let output = PROGRAM.run(&[&["parity", "--dtype", dtype][..], &files].concat());
            let report: Value = serde_json::from_str(&stdout(&output)).unwrap();
            assert_eq!(report["passed"], true, "{name} in {dtype}: {report}");
        }
    }
}

#[test]
fn a_run_says_what_it_loads() {
    let model = path("quant-awq");
    let args = ["--skip-tokenizer-init", "--prompt", "5", "--max-new-tokens", "1", "--model", &model];
    let said = |more: &[&str]| {
        let output = PROGRAM.run(&[&args[..], more, &["--log", "info", "--explain-backends"]].concat());
        assert!(output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let codes = said(&[]);
    assert!(!codes.contains("--dequantise") && codes.contains("int4"), "{codes}");
    let floats = said(&["--dequantise", "--dtype", "bf16"]);
    let line = floats.lines().find(|line| line.contains("--dequantise")).unwrap();
    assert!(line.contains("weights of awq (int4 group") && line.contains("are loaded as bf16:"), "{line}");
    assert!(line.contains("GiB in memory instead of"), "{line}");
    // The plan of the kernels is that of floats: int4 is only in the line above.
    assert_eq!(floats.matches("int4").count(), line.matches("int4").count(), "{floats}");
}

#[test]
fn inspect_counts_floats() {
    let facts = |more: &[&str]| -> Value {
        let model = path("gpt-oss-quant-mxfp4");
        // The fixture has no tokenizer, so it would not run here.
        let output = PROGRAM.run(&[&["inspect", &model, "--json"][..], more].concat());
        let facts: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert!(facts["why_not"].as_str().unwrap().contains("tokenizer"), "{facts}");
        facts
    };
    let codes = facts(&[]);
    let floats = facts(&["--dequantise"]);
    let number = |facts: &Value, key: &str| facts[key].as_u64().unwrap();
    assert!(number(&floats, "to_load_bytes") > number(&codes, "to_load_bytes"), "{floats}");
    assert_eq!(number(&floats, "weights_as_floats_bytes"), 2 * number(&codes, "parameters"));
    let quantisation = |facts: &Value| facts["quantisation"].as_str().unwrap().to_string();
    assert_eq!(quantisation(&floats), quantisation(&codes) + ", loaded as floats");
    assert_eq!(codes.get("weights_as_floats_bytes"), None);
}

/// Random weights of a quantised config are floats, too.
#[test]
fn bench_runs_random_floats() {
    let config = fixture("quant-awq").join("config.json");
    let sizes = ["--batches", "1", "--prompt", "4", "--output", "4", "--lengths", "8", "--explain-backends"];
    let model = ["bench", "--dummy-weights", "--config", config.to_str().unwrap()];
    let plan = |more: &[&str]| {
        let output = PROGRAM.run(&[&model[..], &sizes, more].concat());
        stdout(&output);
        String::from_utf8(output.stderr.clone()).unwrap()
    };
    let codes = plan(&[]);
    assert!(codes.contains("int4"), "{codes}");
    let stderr = plan(&["--dequantise"]);
    assert!(!stderr.contains("int4"), "{stderr}");
}

#[test]
fn a_model_of_floats_has_nothing_to_dequantise() {
    let said =
        ["--dequantise is for quantised weights, and all weights of this model are floats; leave it out"];
    let model = path("text");
    let reference = fixture("text").join("reference.safetensors");
    for args in [
        &["--model", &model, "--prompt", "x", "--dequantise"][..],
        &["inspect", &model, "--dequantise"],
        &["parity", "--model", &model, "--reference", reference.to_str().unwrap(), "--dequantise"],
        &[
            "--model",
            concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/gguf/text.gguf"),
            "--prompt",
            "x",
            "--dequantise",
        ],
        &["bench", "--dequantise"],
    ] {
        PROGRAM.fails(args, 2, &said);
    }
}
