//! The help text states the behaviour of the program when a flag is omitted.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use super::{Folder, completion, fixture, stderr};

fn stdout(args: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_model-qwen3moe")).args(args).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    String::from_utf8(output.stdout).unwrap()
}

/// The text of `--help` about a flag, on one line.
fn help(command: &str, flag: &str) -> String {
    let text = stdout(&[command, "--help"]);
    let about = text.split(&format!("--{flag} <")).nth(1).unwrap_or_else(|| panic!("no --{flag} in {text}"));
    let about = about.split("\n      --").next().unwrap();
    about.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// A checkpoint with an empty generation_config.json.
fn silent() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for file in fs::read_dir(fixture("text")).unwrap().map(|entry| entry.unwrap().path()) {
        fs::copy(&file, dir.path().join(file.file_name().unwrap())).unwrap();
    }
    fs::write(dir.path().join("generation_config.json"), "{}").unwrap();
    dir
}

/// The choice and the number of tokens that `batch` gives a body.
fn answer(model: &Path, body: Value, flags: &[&str]) -> (Value, u64) {
    let folder = Folder::new(&[completion("a", body)]);
    folder.succeeds(&[&["--model", model.to_str().unwrap()], flags].concat());
    let body = folder.body("a");
    (body["choices"][0]["text"].clone(), body["usage"]["completion_tokens"].as_u64().unwrap())
}

#[test]
fn the_default_temperature_is_as_the_help_says() {
    for command in ["generate", "chat", "batch"] {
        let text = help(command, "temperature");
        assert!(
            text.contains("(default: generation_config.json, else 0; batch: else 1)"),
            "{command}: {text}"
        );
    }
    let model = silent();
    let body = json!({"prompt": "To be", "max_tokens": 24, "ignore_eos": true});
    let batch = |flags: &[&str]| answer(model.path(), body.clone(), flags);
    assert_eq!(batch(&[]), batch(&["--temperature", "1"]));
    assert_ne!(batch(&[]), batch(&["--temperature", "0"]));
    let path = model.path().to_str().unwrap();
    let flags = ["--model", path, "--prompt", "To be", "--max-new-tokens", "24", "--ignore-eos"];
    let generate = |more: &[&str]| stdout(&[&flags[..], more].concat());
    assert_eq!(generate(&[]), generate(&["--temperature", "0"]));
    assert_ne!(generate(&[]), generate(&["--temperature", "1"]));
}

#[test]
fn the_default_limit_is_as_the_help_says() {
    for command in ["generate", "chat", "batch"] {
        let text = help(command, "max-new-tokens");
        for word in
            ["default: 128;", "chat: no limit;", "batch: generation_config.json, else 16 for /v1/completions"]
        {
            assert!(text.contains(word), "{command}: {text}");
        }
    }
    let model = silent();
    let body = json!({"prompt": "To be", "ignore_eos": true});
    assert_eq!(answer(model.path(), body.clone(), &[]).1, 16);
    fs::write(model.path().join("generation_config.json"), r#"{"max_new_tokens": 5}"#).unwrap();
    assert_eq!(answer(model.path(), body, &[]).1, 5);
}
