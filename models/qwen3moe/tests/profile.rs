//! `--profile F` in the program: the file is a Chrome trace in which the steps hold the layers.
#![allow(clippy::unwrap_used)] // helpers of tests are not tests in clippy's eyes

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn run(args: &[&str], profile: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_model-qwen3moe"));
    command.args(args).arg("--profile").arg(profile).output().unwrap()
}

fn events(profile: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(profile).unwrap();
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e} in {text}"))
}

fn count(events: &[Value]) -> BTreeMap<&str, usize> {
    let mut count = BTreeMap::new();
    events.iter().for_each(|e| *count.entry(e["name"].as_str().unwrap()).or_insert(0) += 1);
    count
}

/// Begin and end in microseconds.
fn span(event: &Value) -> (f64, f64) {
    let begin = event["ts"].as_f64().unwrap();
    (begin, begin + event["dur"].as_f64().unwrap())
}

#[test]
fn every_layer_of_every_step_is_in_the_profile() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("profile.json");
    let output = run(&["--prompt", "First Citizen:", "--max-new-tokens", "5", "--ignore-eos"], &file);
    assert!(output.status.success());
    let events = events(&file);
    let count = count(&events);
    // The prompt gives the first of five tokens.
    let steps = 5;
    let layers = count["layer"] / 5;
    assert!(layers > 1);
    let once = ["step", "sample", "lm_head", "schedule", "collect"].map(|name| (name, 1));
    for (name, times) in once.into_iter().chain([("attention", layers), ("moe", layers)]) {
        assert_eq!(count[name], steps * times, "{name}");
    }
    for name in ["router", "experts"] {
        assert_eq!(count[name], count["moe"], "{name}");
    }
    let inside = |inner: &Value, outer: &str| {
        let (begin, end) = span(inner);
        let holds = |e: &&Value| e["name"] == outer && span(e).0 <= begin && end <= span(e).1;
        events.iter().filter(holds).count()
    };
    for event in &events {
        assert_eq!(event["tid"], 0, "one engine, one row: {event}");
        let outer = match event["name"].as_str().unwrap() {
            "step" | "sample" | "schedule" | "collect" => continue,
            "router" | "experts" => "moe",
            "attention" | "moe" => "layer",
            _ => "step",
        };
        assert_eq!(inside(event, outer), 1, "{event} in {outer}");
    }
    let tokens: Vec<_> =
        events.iter().filter(|e| e["name"] == "step").map(|e| &e["args"]["tokens"]).collect();
    assert!(tokens[0].as_u64().unwrap() > 1 && tokens[1..].iter().all(|t| **t == 1), "{tokens:?}");
}

#[test]
fn bench_has_a_profile_too() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("profile.json");
    let config = "../../tests/fixtures/base/config.json";
    let config = Path::new(env!("CARGO_MANIFEST_DIR")).join(config);
    let sizes = ["--batches", "2", "--prompt", "4", "--output", "3", "--lengths", "8", "--repeat", "1"];
    let bench = ["bench", "--config", config.to_str().unwrap(), "--dummy-weights"];
    let output = run(&[&bench[..], &sizes].concat(), &file);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(count(&events(&file))["step"] > 3);
}

#[test]
fn a_run_that_fails_leaves_a_valid_profile_and_a_bad_path_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("profile.json");
    let output = run(&["--model", dir.path().to_str().unwrap(), "--prompt", "x"], &file);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(events(&file), Vec::<Value>::new());
    let output = run(&["--prompt", "x"], &dir.path().join("none/profile.json"));
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr.contains("cannot write the profile") && stderr.contains("none/profile.json"), "{stderr}");
}
