//! Saved states of linear attention in whole runs of the program: they spare tokens, and change no byte of the output.
#![allow(clippy::unwrap_used)] // helpers of tests are not tests in clippy's eyes

#[path = "../../../tests/cli/program.rs"]
mod program;

use std::fs;

use program::{Program, fixture, stdout};
use serde_json::{Value, json};

const PROGRAM: Program = Program { path: env!("CARGO_BIN_EXE_moe"), flags: &[] };

fn line(name: &str, prompt: &[u64]) -> Value {
    let body = json!({"prompt": prompt, "max_tokens": 60, "temperature": 0, "ignore_eos": true, "return_token_ids": true});
    json!({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body})
}

/// The records of `batch`, two lines at once, without the time of each; and the counters.
fn batch(model: &str, lines: &[Value], flags: &[&str]) -> (Vec<Value>, String) {
    let folder = tempfile::tempdir().unwrap();
    let [input, output] = ["in.jsonl", "out.jsonl"].map(|file| folder.path().join(file));
    fs::write(&input, lines.iter().map(|line| format!("{line}\n")).collect::<String>()).unwrap();
    let files = ["batch", "--input", input.to_str().unwrap(), "--output", output.to_str().unwrap()];
    let in_turn = ["--model", model, "--max-num-seqs", "2", "--scheduling-policy", "fcfs", "--stats"];
    let run = PROGRAM.run(&[&files[..], &in_turn, flags].concat());
    let stderr = String::from_utf8_lossy(&run.stderr).into_owned();
    stdout(&run);
    let records = fs::read_to_string(output).unwrap();
    let record = |text: &str| {
        let mut record: Value = serde_json::from_str(text).unwrap();
        record["response"]["body"].as_object_mut().unwrap().remove("created").unwrap();
        record
    };
    (records.lines().map(record).collect(), stderr)
}

#[test]
fn a_batch_of_turns_has_the_same_records_with_saved_states() {
    for name in ["qwen3-next-text", "qwen3_5-part"] {
        let model = fixture(name);
        let model = model.to_str().unwrap();
        // Two conversations, whose first 130 tokens are the same.
        let prompts = [7, 11].map(|own: u64| -> Vec<u64> {
            (0..150).map(|i| if i < 130 { i * i % 280 } else { own * i % 280 }).collect()
        });
        let first = [line("a", &prompts[0]), line("b", &prompts[1])];
        let off = ["--no-enable-prefix-caching"];
        let (answers, _) = batch(model, &first, &off);
        let second = answers.iter().zip(&prompts).map(|(record, prompt)| {
            let answer = &record["response"]["body"]["choices"][0]["token_ids"];
            let answer = answer.as_array().unwrap().iter().map(|id| id.as_u64().unwrap());
            let turn: Vec<u64> = prompt.iter().copied().chain(answer).chain([1, 2, 3]).collect();
            line(&format!("{} again", record["custom_id"].as_str().unwrap()), &turn)
        });
        let lines: Vec<Value> = first.iter().cloned().chain(second).collect();
        let (want, counters) = batch(model, &lines, &off);
        assert!(want.len() == 4 && want[..2] == answers[..], "{name}");
        assert!(counters.contains("(0 cached)"), "{counters}");
        // Of the answers 59 tokens are computed, so both next turns begin after 208 tokens.
        let (got, counters) = batch(model, &lines, &[]);
        assert_eq!(got, want, "{name}");
        assert!(counters.contains("(416 cached)") && counters.contains(" 2 restored,"), "{counters}");
        // One byte has no room for states, so there is nothing to start from.
        let (got, counters) = batch(model, &lines, &["--prefix-state-memory", "1"]);
        assert_eq!(got, want, "{name}");
        assert!(counters.contains("(0 cached)"), "{counters}");
    }
}
