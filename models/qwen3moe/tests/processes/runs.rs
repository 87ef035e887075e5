//! Runs whose ranks the program starts itself.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use super::{MOVING, MP, answers, program, run, stderr, succeeds, write_batch};

/// Splits with and without expert parallelism, uneven experts, chunks.
const GEOMETRIES: [&[&str]; 6] = [
    &["--tp", "2"],
    &["--dp", "2"],
    &["--tp", "2", "--dp", "2", "--enable-expert-parallel", "--moe-ep-backend", "deepep"],
    &["--dp", "3", "--enable-expert-parallel", "--expert-placement-strategy", "round_robin"],
    &["--tp", "4", "--enable-expert-parallel", "--enable-chunked-moe", "--chunked-moe-size", "3"],
    &MOVING,
];

#[test]
fn the_text_the_routing_and_the_heat_are_those_of_one_rank() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    let run = |name: &str, geometry: &[&str]| {
        let routed = file(&format!("{name}.safetensors"));
        let heat = file(&format!("{name}.jsonl"));
        let fixed =
            ["--prompt", "ROMEO: speak", "--max-new-tokens", "12", "--temperature", "1", "--seed", "3"];
        let files = ["--logprobs", "2", "--routed-experts-out", &routed, "--expert-heat", &heat];
        let quiet = ["--log", "error"];
        let output = succeeds(&[&fixed[..], &files, &quiet, geometry].concat());
        let heat = std::fs::read_to_string(&heat).unwrap();
        (output.stdout, output.stderr, std::fs::read(&routed).unwrap(), heat)
    };
    let one = run("one", &[]);
    assert!(one.0.len() > 5 && one.3.lines().count() > 12);
    for (i, geometry) in GEOMETRIES.iter().enumerate() {
        let got = run(&i.to_string(), &[geometry, &MP[..]].concat());
        assert_eq!(String::from_utf8_lossy(&got.1), String::from_utf8_lossy(&one.1), "{geometry:?}");
        assert!(got == one, "{geometry:?}");
    }
    // A recording also forces the experts of ranks that follow.
    let replay = file("one.safetensors");
    let flags = ["--prompt", "ROMEO: sleep", "--max-new-tokens", "4", "--replay-routed-experts", &replay];
    let forced = succeeds(&flags).stdout;
    assert_eq!(succeeds(&[&flags[..], &MP, GEOMETRIES[2]].concat()).stdout, forced);
}

#[test]
fn a_batch_over_processes_is_that_of_one_rank() {
    let dir = tempfile::tempdir().unwrap();
    let input = dir.path().join("in.jsonl");
    write_batch(&input, 9, |i| 3 + i % 4);
    let answers = |name: &str, flags: &[&str]| {
        let output = dir.path().join(name);
        let files = ["batch", "--input", input.to_str().unwrap(), "--output", output.to_str().unwrap()];
        let done = succeeds(&[&files[..], flags].concat());
        (answers(&output), stderr(&done))
    };
    let (one, _) = answers("one", &[]);
    assert_eq!(one.len(), 9);
    for (i, geometry) in [GEOMETRIES[1], GEOMETRIES[2], &MOVING].into_iter().enumerate() {
        let (got, stderr) = answers(&i.to_string(), &[geometry, &MP[..], &["--stats"]].concat());
        assert_eq!(got, one, "{geometry:?}");
        // The counters count the requests of all ranks together.
        assert!(stderr.contains("9 requests in") || stderr.contains("13 requests in"), "{stderr}");
        assert_eq!(stderr.contains("expert moves: "), geometry == &MOVING[..], "{stderr}");
    }
}

/// Waiting for a user has no limit, although every collective has one.
#[test]
fn a_chat_may_be_idle() {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/text");
    let flags = ["chat", "--tp", "2", "--dp", "2", "--max-new-tokens", "3", "--temperature", "0", "--model"];
    let mut chat = program()
        .args(flags)
        .arg(model)
        .args(MP)
        .env("MOE_COLLECTIVE_TIMEOUT", "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .unwrap();
    let mut input = chat.stdin.take().unwrap();
    let mut lines = BufReader::new(chat.stdout.take().unwrap()).lines();
    for _ in 0..2 {
        input.write_all(b"hello\n").unwrap();
        lines.next().unwrap().unwrap();
        std::thread::sleep(Duration::from_millis(2500));
    }
    drop(input);
    assert!(chat.wait().unwrap().success());
}

#[test]
fn parity_and_bench_run_over_processes() {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/base");
    let model = fixture.to_str().unwrap();
    let reference = fixture.join("reference.safetensors");
    let parity = ["parity", "--model", model, "--reference", reference.to_str().unwrap(), "--dtype", "f32"];
    let one = succeeds(&parity).stdout;
    let tp = ["--tp", "4", "--enable-expert-parallel"];
    assert_eq!(succeeds(&[&parity[..], &tp, &MP].concat()).stdout, one);
    let config = fixture.join("config.json");
    let bench =
        ["bench", "--config", config.to_str().unwrap(), "--dummy-weights", "--batches", "3", "--repeat", "1"];
    let sizes = ["--prompt", "4", "--output", "33", "--lengths", "5", "--tp", "2", "--dp", "2"];
    let result = succeeds(&[&bench[..], &sizes, &MP].concat()).stdout;
    let result: serde_json::Value = serde_json::from_slice(&result).unwrap();
    assert!(result["decode"]["3"]["tok_s"].as_f64().unwrap() > 0.);
}

/// Every process finds a mistake; one message says what is wrong.
#[test]
fn mistakes_keep_their_exit_codes() {
    let split = run(&[&["--prompt", "x", "--tp", "3"], &MP[..]].concat());
    assert_eq!(split.status.code(), Some(2), "{}", stderr(&split));
    assert!(stderr(&split).contains("the number of query heads 8 is not divisible by tp 3"));
    let cache = run(&[&["--prompt", "x", "--dp", "2", "--kv-cache-memory", "10"], &MP[..]].concat());
    assert_eq!(cache.status.code(), Some(2), "{}", stderr(&cache));
    assert!(stderr(&cache).contains("raise --kv-cache-memory"), "{}", stderr(&cache));
    let missing = run(&[&["--prompt", "x", "--dp", "2", "--model", "/no/such/model"], &MP[..]].concat());
    assert!(!missing.status.success() && stderr(&missing).contains("/no/such/model"), "{}", stderr(&missing));
}
