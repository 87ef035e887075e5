//! `inspect`: describes a checkpoint, and whether it would load.

use std::path::Path;
use std::process::Output;

use serde_json::json;

use super::{Hub, fixture, run, text};

/// The facts of a checkpoint, and whether it runs here.
fn facts(output: &Output) -> serde_json::Value {
    let facts: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let runs = facts["runs_here"].as_bool().unwrap();
    assert_eq!(output.status.code(), Some(i32::from(!runs)), "{facts}");
    assert_eq!(facts["why_not"].is_string(), !runs, "{facts}");
    facts
}

#[test]
fn inspect_reads_headers_alone() {
    let dir = fixture("text");
    let facts = facts(&run(&["inspect", dir.to_str().unwrap(), "--json"], &[]));
    assert!(facts.as_object().unwrap().keys().all(|key| !key.contains([' ', '-'])), "{facts}");
    assert_eq!((&facts["model_type"], &facts["runs_here"]), (&json!("qwen3_moe"), &json!(true)), "{facts}");
    assert!(facts["fits_memory"].is_boolean(), "{facts}");
    assert!(facts["tensors"].as_u64().unwrap() > 10 && facts["experts"].as_u64().unwrap() > 1, "{facts}");
    let size = std::fs::metadata(dir.join("model.safetensors")).unwrap().len();
    let bytes = facts["weight_bytes"].as_u64().unwrap();
    assert!(bytes < size && bytes > size / 2, "{bytes} of {size}");
    let parameters: u64 = facts["parameters"].as_u64().unwrap();
    assert_eq!(parameters * 2, bytes, "of bf16: {facts}");
    // The command in the output does what the output says.
    let words = text(&run(&["inspect", dir.to_str().unwrap()], &[]).stdout);
    let command = words.lines().last().unwrap().trim();
    let args: Vec<_> = command.strip_prefix("model-qwen3moe ").unwrap().split(' ').collect();
    let explained = run(&args, &[]);
    assert!(text(&explained.stderr).contains("expert backend: cpu"), "{command}: {explained:?}");
}

#[test]
fn inspect_says_what_would_not_load() {
    let dir = tempfile::tempdir().unwrap();
    let copy = |spoil: &dyn Fn(&Path), word: &str| {
        for entry in std::fs::read_dir(fixture("text")).unwrap() {
            let entry = entry.unwrap();
            // This file has the form of a weight file.
            if entry.file_name() == "reference.safetensors" {
                continue;
            }
            std::fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
        }
        spoil(dir.path());
        let facts = facts(&run(&["inspect", dir.path().to_str().unwrap(), "--json"], &[]));
        assert!(facts["why_not"].as_str().unwrap().contains(word), "{word} in {facts}");
    };
    let config = |dir: &Path, from: &str, to: &str| {
        let text = std::fs::read_to_string(dir.join("config.json")).unwrap();
        assert!(text.contains(from), "{text}");
        std::fs::write(dir.join("config.json"), text.replace(from, to)).unwrap();
    };
    copy(&|dir| std::fs::write(dir.join("tokenizer.json"), "{}").unwrap(), "is not a tokenizer");
    copy(&|dir| std::fs::remove_file(dir.join("tokenizer.json")).unwrap(), "--skip-tokenizer-init");
    copy(&|dir| std::fs::write(dir.join("model.safetensors"), "cut").unwrap(), "is truncated");
    copy(&|dir| std::fs::remove_file(dir.join("model.safetensors")).unwrap(), "no weights in");
    copy(
        &|dir| config(dir, "\"moe_intermediate_size\": 20", "\"moe_intermediate_size\": 24"),
        "of another shape",
    );
    copy(&|dir| config(dir, "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3"), "missing");
    let defaults =
        |dir: &Path| std::fs::write(dir.join("generation_config.json"), r#"{"top_p": 2}"#).unwrap();
    copy(&defaults, "top_p");
    let other = run(&["inspect", fixture("deepseek-text").to_str().unwrap()], &[]);
    let words = text(&other.stdout);
    assert!(other.status.code() == Some(1) && words.contains("the program `moe` runs"), "{words}");
    assert!(!words.contains("--explain-backends"), "{words}");
}

/// For weights on the hub only the headers are downloaded.
#[test]
fn inspect_of_the_hub_asks_for_headers_alone() {
    let hub = Hub::new("text");
    let here = facts(&run(&["inspect", fixture("text").to_str().unwrap(), "--json"], &[]));
    hub.server.seen();
    let there = facts(&hub.run(&["inspect", "org/tiny", "--json"]));
    for key in ["runs_here", "tensors", "parameters", "weight_bytes", "dtype"] {
        assert_eq!(here[key], there[key], "{key}");
    }
    assert!(
        there["weights"].as_str().unwrap().contains("`model-qwen3moe download org/tiny` fetches"),
        "{there}"
    );
    let asked = hub.server.seen();
    let bodies: Vec<_> = asked.iter().filter(|r| r.path.contains("/storage/")).collect();
    assert!(bodies.iter().all(|r| r.range.as_deref() == Some("bytes=0-131071")), "{bodies:?}");
    assert_eq!(bodies.len(), 1);
    hub.config("vocab_size", json!(999));
    let cache = tempfile::tempdir().unwrap();
    let hub = Hub { home: cache, ..hub };
    let there = facts(&hub.run(&["inspect", "org/tiny", "--json"]));
    assert!(there["why_not"].as_str().unwrap().contains("of another shape"), "{there}");
}
