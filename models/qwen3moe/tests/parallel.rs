//! Ranks and chunks on the command line: the same text, routing and heat, and clear refusals.
#![allow(clippy::unwrap_used)] // helpers of tests are not tests in clippy's eyes

use std::path::Path;
use std::process::{Command, Output};

use serde_json::{Value, json};

fn run(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_model-qwen3moe"));
    command.args(args).env("RUST_BACKTRACE", "0").output().unwrap()
}

/// stdout of a run that succeeds.
fn text(args: &[&str]) -> Vec<u8> {
    let output = run(args);
    assert!(output.status.success(), "{args:?}\n{}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

fn fails(args: &[&str], words: &[&str]) {
    let output = run(&[&["--prompt", "x"], args].concat());
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{args:?}\n{stderr}");
    for word in words {
        assert!(stderr.contains(word), "{args:?}: expected {word:?} in\n{stderr}");
    }
}

const GEOMETRIES: [&[&str]; 7] = [
    &["--tp", "2"],
    &["--dp", "2"],
    &["--tp", "4", "--enable-expert-parallel"],
    &["--tp", "2", "--dp", "2", "--enable-expert-parallel", "--moe-ep-backend", "deepep"],
    &["--dp", "3", "--enable-expert-parallel", "--expert-placement-strategy", "round_robin"],
    &["--enable-chunked-moe", "--chunked-moe-size", "3"],
    &["--tp", "2", "--enable-chunked-moe", "--moe-memory-budget", "64KiB"],
];

#[test]
fn the_text_the_routing_and_the_heat_are_those_of_one_rank() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    let run = |name: &str, geometry: &[&str]| {
        let (routed, heat) = (file(&format!("{name}.safetensors")), file(&format!("{name}.jsonl")));
        let fixed =
            ["--prompt", "ROMEO: speak", "--max-new-tokens", "12", "--temperature", "1", "--seed", "3"];
        let files = ["--routed-experts-out", &routed, "--expert-heat", &heat];
        let out = text(&[&fixed[..], &files[..], geometry].concat());
        (out, std::fs::read(&routed).unwrap(), std::fs::read_to_string(&heat).unwrap())
    };
    let one = run("one", &[]);
    assert!(one.0.len() > 5 && one.2.lines().count() > 12);
    for (i, geometry) in GEOMETRIES.iter().enumerate() {
        assert!(run(&i.to_string(), geometry) == one, "{geometry:?}");
    }
    // A recording of one rank forces the experts of any geometry.
    let (recorded, again) = (file("one.safetensors"), file("again.safetensors"));
    for geometry in GEOMETRIES {
        let replay =
            ["--prompt", "ROMEO: sleep", "--max-new-tokens", "4", "--replay-routed-experts", &recorded];
        let files = ["--routed-experts-out", &again];
        text(&[&replay[..], &files[..], geometry].concat());
        let of = |path: &str| moe_engine::routing::read(Path::new(path)).unwrap();
        let (forced, recorded) = (of(&again), of(&recorded));
        let tokens = forced.tokens().min(recorded.tokens());
        assert!(tokens > 4, "{tokens}");
        for token in 0..tokens {
            assert_eq!(forced.get(token, 1).unwrap(), recorded.get(token, 1).unwrap(), "{geometry:?}");
        }
    }
}

#[test]
fn a_batch_over_data_parallel_ranks_is_that_of_one() {
    let dir = tempfile::tempdir().unwrap();
    let input = dir.path().join("in.jsonl");
    let line = |i: usize| {
        let body =
            json!({"prompt": format!("Line {i}:"), "max_tokens": 3 + i % 4, "n": 1 + i % 2, "seed": i});
        json!({"custom_id": i.to_string(), "method": "POST", "url": "/v1/completions", "body": body})
            .to_string()
    };
    std::fs::write(&input, (0..9).map(|i| line(i) + "\n").collect::<String>()).unwrap();
    let answers = |name: &str, geometry: &[&str]| {
        let output = dir.path().join(name);
        let files = ["batch", "--input", input.to_str().unwrap(), "--output", output.to_str().unwrap()];
        text(&[&files[..], geometry].concat());
        let mut records: Vec<Value> = std::fs::read_to_string(output)
            .unwrap()
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        records.sort_by_key(|record| record["custom_id"].as_str().unwrap().to_string());
        records.iter().map(|record| record["response"]["body"]["choices"].clone()).collect::<Vec<_>>()
    };
    let one = answers("one", &[]);
    assert_eq!(one.len(), 9);
    for (i, geometry) in GEOMETRIES.iter().enumerate() {
        assert_eq!(answers(&i.to_string(), geometry), one, "{geometry:?}");
    }
}

#[test]
fn contradictions_say_what_to_change() {
    fails(&["--tp", "0"], &["tp must be at least 1"]);
    fails(&["--dp", "0"], &["dp must be at least 1"]);
    fails(
        &["--tp", "3"],
        &["the number of query heads 8 is not divisible by tp 3", "choose a tp that divides it"],
    );
    fails(&["--tp", "16"], &["query heads 8 is not divisible by tp 16"]);
    fails(&["--tp", "2", "--moe-ep-backend", "warp"], &["unknown MoE backend \"warp\"", "local_allreduce"]);
    fails(&["--tp", "2", "--moe-ep-backend", "deepep"], &["add --enable-expert-parallel"]);
    fails(
        &["--tp", "2", "--enable-expert-parallel", "--moe-ep-backend", "off"],
        &["drop --enable-expert-parallel"],
    );
    fails(
        &["--dp", "2", "--enable-expert-parallel", "--moe-ep-backend", "tp_ep"],
        &["dp must be 1, got 2", "allgather_reducescatter or deepep"],
    );
    fails(&["--tp", "2", "--deepep-mode", "low_latency"], &["has no effect on the MoE backend disabled"]);
    fails(
        &["--dp", "2", "--enable-expert-parallel", "--deepep-mode", "fast"],
        &["unknown DeepEP mode \"fast\""],
    );
    fails(&["--expert-placement-strategy", "random"], &["unknown expert placement", "linear, round_robin"]);
    fails(&["--chunked-moe-size", "4"], &["--enable-chunked-moe"]);
    fails(&["--moe-memory-budget", "4MiB"], &["--enable-chunked-moe"]);
    fails(&["--enable-chunked-moe", "--chunked-moe-size", "0"], &["0"]);
    let both = ["--enable-chunked-moe", "--chunked-moe-size", "4", "--moe-memory-budget", "1MiB"];
    fails(&both, &["cannot be used with"]);
}

#[test]
fn a_budget_below_one_token_and_parity_over_dp_are_refused() {
    let small = run(&["--prompt", "x", "--enable-chunked-moe", "--moe-memory-budget", "100"]);
    let stderr = String::from_utf8(small.stderr).unwrap();
    assert_eq!(small.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("the MoE memory budget of 100 bytes is too small: one token needs"), "{stderr}");
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/base");
    let reference = fixture.join("reference.safetensors");
    let base = ["parity", "--model", fixture.to_str().unwrap(), "--reference", reference.to_str().unwrap()];
    let refused = run(&[&base[..], &["--dp", "2"]].concat());
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("use --dp 1"));
    // Over tensor-parallel ranks it holds like on one.
    let one = text(&[&base[..], &["--dtype", "f32"]].concat());
    assert_eq!(
        text(&[&base[..], &["--dtype", "f32", "--tp", "4", "--enable-expert-parallel"]].concat()),
        one
    );
}
