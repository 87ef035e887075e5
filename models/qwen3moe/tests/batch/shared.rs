//! Work that lines of a batch share is done once: prefixes of prompts, and whole requests that are equal.

use std::collections::BTreeMap;
use std::fs;

use serde_json::{Value, json};

use super::{Folder, by_name, completion, essence};

/// The lines of metrics that a run with these flags has written, which has to succeed.
fn metrics(folder: &Folder, flags: &[&str]) -> Vec<Value> {
    let _ = fs::remove_file(folder.path("metrics.jsonl"));
    folder.succeeds(&[&["--metrics", "metrics.jsonl"], flags].concat());
    let text = fs::read_to_string(folder.path("metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// 60 lines, ten for each of six prefixes of 320 tokens, in turn.
fn grouped_lines() -> Vec<Value> {
    let prompt = |i: usize| [vec![5 + i % 6; 320], vec![20 + i, 9]].concat();
    let body = |i: usize| json!({"prompt": prompt(i), "max_tokens": 3, "temperature": 0, "ignore_eos": true});
    (0..60).map(|i| completion(&format!("{i}"), body(i))).collect()
}

#[test]
fn a_shared_prefix_is_computed_once_however_lines_are_mixed() {
    let folder = Folder::new(&grouped_lines());
    // The cache holds two prompts and a half: 56 blocks of 16 tokens.
    let bytes = (56 * 16 * bytes_per_token(&folder)).to_string();
    let flags = ["--max-num-seqs", "8", "--kv-cache-memory", &bytes, "--overwrite"];
    let cached = |more: &[&str]| {
        let lines = metrics(&folder, &[&flags[..], more].concat());
        let last = lines.last().unwrap();
        assert_eq!(
            (&last["state"], &last["done"], &last["kv_blocks"]),
            (&json!("finished"), &json!(60), &json!(56))
        );
        last["cached_prompt_tokens"].as_u64().unwrap()
    };
    let grouped = cached(&[]);
    let answers = by_name(&folder.records());
    let as_they_came = cached(&["--scheduling-policy", "fcfs"]);
    // At best all but six of 60 lines find their 320 tokens.
    assert!(grouped >= 45 * 320, "{grouped} tokens came from the cache");
    assert!(as_they_came <= 15 * 320, "{as_they_came}");
    assert_eq!(answers, by_name(&folder.records()), "only the order differs");
}

/// Bytes of the KV cache for a token of the bundled model.
fn bytes_per_token(folder: &Folder) -> usize {
    let lines = metrics(folder, &["--kv-cache-memory", "64MiB", "--max-num-seqs", "1000", "--overwrite"]);
    let blocks = lines[0]["kv_blocks"].as_u64().unwrap() as usize;
    (64 << 20) / (blocks * 16)
}

#[test]
fn equal_requests_are_answered_by_one() {
    let greedy = json!({"prompt": "To be", "max_tokens": 6, "temperature": 0, "logprobs": 1});
    let seeded = json!({"prompt": "To be", "max_tokens": 6, "temperature": 1, "seed": 7});
    let random = json!({"prompt": "To be", "max_tokens": 6, "temperature": 1, "ignore_eos": true});
    let mut lines: Vec<Value> = (0..3)
        .flat_map(|i| {
            [("greedy", &greedy), ("seeded", &seeded), ("random", &random)]
                .map(|(name, body)| completion(&format!("{name}{i}"), body.clone()))
        })
        .collect();
    let folder = Folder::new(&lines);
    let counters = metrics(&folder, &["--price-input", "1", "--price-output", "2000000"]);
    let last = counters.last().unwrap();
    assert_eq!((&last["repeated"], &last["answered"], &last["errors"]), (&json!(4), &json!(9), &json!(0)));
    let new = last["new_tokens"].as_f64().unwrap();
    assert!(new <= 5.0 * 6.0, "five of nine lines are computed: {last}");
    let cost = last["cost"].as_f64().unwrap();
    assert!((cost - 2.0 * new).abs() < 0.1, "{cost}");
    for name in ["greedy", "seeded"] {
        let [first, second] = [0, 2].map(|i| folder.record(&format!("{name}{i}")));
        assert_eq!(essence(&first), essence(&second));
        for field in ["id", "custom_id"] {
            assert_ne!(first[field], second[field]);
        }
        let id = second["id"].as_str().unwrap();
        assert_eq!(second["response"]["body"]["id"], format!("cmpl-{id}"));
        assert!(second["response"]["request_id"].as_str().unwrap().starts_with(&format!("batch-{id}-")));
    }
    assert_ne!(folder.choice("random0"), folder.choice("random1"), "each has a seed of its own");

    // A rerun takes the answers from the output.
    lines.push(completion("greedy9", greedy));
    lines.insert(0, completion("seeded9", seeded));
    folder.write(&lines);
    let said = folder.ends(0, &["--price-output", "5"], &["2 requests, ", "9 done before"]);
    let all: BTreeMap<String, Value> = by_name(&folder.records());
    assert_eq!((&all["greedy9"], &all["seeded9"]), (&all["greedy0"], &all["seeded0"]));
    assert_eq!(all.len(), 11);
    assert!(said.contains("1 answered as equal ones"), "the line before its answer is computed: {said}");
    assert!(said.contains(", cost 0.0000"), "{said}");
    folder.succeeds(&[]);
    assert_eq!(folder.records().len(), 11);
}

#[test]
fn a_file_of_metrics_is_checked_first() {
    let folder = Folder::new(&[completion("a", json!({"prompt": "x", "max_tokens": 1}))]);
    for (file, word) in
        [("in.jsonl", "it is the input"), ("out.jsonl", "it is the output"), (".", "cannot open")]
    {
        folder.ends(2, &["--metrics", file], &[word]);
    }
    folder.ends(2, &["--price-input", "-1"], &["at least 0"]);
    assert_eq!(folder.records().len(), 0);
}
