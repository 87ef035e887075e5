//! The program with GGUF files of the fixtures' models, which `tests/reference/write_gguf.py` wrote: the text of
//! transformers, from a file and from a folder, and what `inspect` and the flags say.
#![allow(clippy::unwrap_used)] // helpers of tests are not tests in clippy's eyes

#[path = "../../../tests/cli/program.rs"]
mod program;

use std::fs;
use std::path::{Path, PathBuf};

use program::{Program, fixture, stdout};
use serde_json::Value;

const PROGRAM: Program = Program { path: env!("CARGO_BIN_EXE_moe"), flags: &[] };

/// A fixture of each family.
const TEXTS: [&str; 8] = [
    "text",
    "qwen2-text",
    "olmoe-text",
    "mixtral-text",
    "glm4-text",
    "gpt-oss-text",
    "qwen3-next-text",
    "qwen3_5-text",
];

fn gguf(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/gguf").join(format!("{name}.gguf"))
}

#[test]
fn every_family_continues_like_transformers() {
    for name in TEXTS {
        let case = fs::read(fixture(name).join("text_case.json")).unwrap();
        let case: Value = serde_json::from_slice(&case).unwrap();
        for greedy in case["greedy"].as_array().unwrap() {
            let count = greedy["generated_ids"].as_array().unwrap().len().to_string();
            let file = gguf(name);
            let prompt = ["--prompt", greedy["prompt"].as_str().unwrap(), "--max-new-tokens", &count];
            let greedily =
                ["--temperature", "0", "--ignore-eos", "--dtype", "f32", "--model", file.to_str().unwrap()];
            let text = PROGRAM.text(&[&prompt[..], &greedily].concat());
            assert_eq!(text, greedy["generated_text"].as_str().unwrap(), "{name}");
        }
    }
}

/// Logits and greedy tokens of each file are those that transformers recorded of the fixture; experts in MXFP4 stay so.
#[test]
fn every_file_has_the_logits_of_transformers() {
    let same = TEXTS.iter().map(|name| (*name, *name));
    for (name, recorded) in same.chain([("gpt-oss-mxfp4", "gpt-oss-quant-mxfp4")]) {
        let file = gguf(name);
        let reference = fixture(recorded).join("reference.safetensors");
        let files = ["--model", file.to_str().unwrap(), "--reference", reference.to_str().unwrap()];
        for dtype in ["f32", "bf16"] {
            let output = PROGRAM.run(&[&["parity", "--dtype", dtype][..], &files].concat());
            let report: Value = serde_json::from_str(&stdout(&output)).unwrap();
            assert_eq!(report["passed"], true, "{name} in {dtype}: {report}");
        }
    }
}

#[test]
fn a_folder_with_one_file_is_the_file() {
    let dir = tempfile::tempdir().unwrap();
    fs::copy(gguf("text"), dir.path().join("m-BF16.gguf")).unwrap();
    let args = ["--prompt", "The router", "--max-new-tokens", "4", "--temperature", "0", "--model"];
    let from = |path: &Path| PROGRAM.text(&[&args[..], &[path.to_str().unwrap()]].concat());
    assert_eq!(from(dir.path()), from(&gguf("text")));
    fs::copy(gguf("text"), dir.path().join("m-F16.gguf")).unwrap();
    let two = [&args[..], &[dir.path().to_str().unwrap()]].concat();
    PROGRAM.fails(&two, 2, &["2 GGUF models; name the file of one: m-BF16.gguf, m-F16.gguf"]);
}

#[test]
fn inspect_shows_the_types_of_tensors() {
    let file = gguf("text");
    let facts = stdout(&PROGRAM.run(&["inspect", file.to_str().unwrap(), "--json"]));
    let facts: Value = serde_json::from_str(&facts).unwrap();
    assert_eq!((&facts["runs_here"], &facts["model_type"]), (&true.into(), &"qwen3_moe".into()), "{facts}");
    let types = facts["tensor_types"].as_str().unwrap();
    assert!(
        types.contains("token_embd.weight BF16") && types.contains("blk.*.attn_norm.weight F32 ("),
        "{types}"
    );
    let plain = stdout(&PROGRAM.run(&["inspect", fixture("text").to_str().unwrap(), "--json"]));
    let plain: Value = serde_json::from_str(&plain).unwrap();
    for key in ["parameters", "experts", "vocabulary", "layers"] {
        assert_eq!(facts[key], plain[key], "{key}");
    }
}

#[test]
fn a_chat_has_the_template_and_the_ends_of_the_file() {
    let chat = |model: &Path| {
        let args = ["--chat", "--prompt", "Hello", "--max-new-tokens", "12", "--temperature", "0", "--model"];
        PROGRAM.text(&[&args[..], &[model.to_str().unwrap()]].concat())
    };
    assert_eq!(chat(&gguf("text")), chat(&fixture("text")));
}

#[test]
fn a_damaged_file_is_one_error() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("m.gguf");
    let bytes = fs::read(gguf("text")).unwrap();
    fs::write(&file, &bytes[..bytes.len() / 2]).unwrap();
    let args = ["--prompt", "x", "--model", file.to_str().unwrap()];
    PROGRAM.fails(&args, 1, &["m.gguf is not a valid GGUF file", "truncated"]);
}
