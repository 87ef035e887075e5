//! `bench --workload`: its figures agree with the file and with each other, on one rank and on several; invalid files
//! are refused before weights are read.
#![allow(clippy::unwrap_used)] // helpers of tests are not tests in clippy's eyes

#[path = "../../../tests/cli/program.rs"]
mod program;

use std::fs;
use std::path::PathBuf;

use program::{Copied, Program, fixture, stdout};
use serde_json::{Value, json};

const PROGRAM: Program = Program { path: env!("CARGO_BIN_EXE_model-qwen3moe"), flags: &["--log", "warn"] };

/// A folder with the file of a workload.
struct Folder(tempfile::TempDir);

impl Folder {
    fn new(workload: &Value) -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("work.json"), workload.to_string()).unwrap();
        Self(dir)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Runs the workload; returns the JSON of stdout, and stderr.
    fn bench(&self, flags: &[&str]) -> (Value, String) {
        let file = self.path("work.json");
        let output = PROGRAM.run(&[&["bench", "--workload", file.to_str().unwrap()], flags].concat());
        let result = serde_json::from_str(&stdout(&output)).unwrap();
        (result, String::from_utf8(output.stderr).unwrap())
    }

    fn fails(&self, flags: &[&str], words: &[&str]) {
        let file = self.path("work.json");
        PROGRAM.fails(&[&["bench", "--workload", file.to_str().unwrap()], flags].concat(), 2, words);
    }
}

/// Tokens of prompt and answer of each request.
const SIZES: [(usize, usize); 6] = [(10, 40), (3, 48), (70, 9), (1, 1), (33, 20), (12, 30)];
const INPUT: usize = 129;
const OUTPUT: usize = 148;

fn mixed() -> Value {
    let request = |(i, (prompt, output)): (usize, (usize, usize))| {
        let ids: Vec<_> = (0..prompt).map(|t| (7 * t + 11 * i) % 128).collect();
        json!({"prompt_token_ids": ids, "max_tokens": output, "seed": i})
    };
    json!({"requests": SIZES.into_iter().enumerate().map(request).collect::<Vec<_>>()})
}

/// Checks the properties of any run of [`mixed`].
fn check(run: &Value) {
    let number = |value: &Value| value.as_f64().unwrap_or_else(|| panic!("{run:#}"));
    assert_eq!((&run["input_tokens"], &run["output_tokens"]), (&json!(INPUT), &json!(OUTPUT)));
    let seconds = number(&run["seconds"]);
    for (rate, tokens) in [("total_tok_s", INPUT + OUTPUT), ("output_tok_s", OUTPUT)] {
        assert!((number(&run[rate]) * seconds / tokens as f64 - 1.).abs() < 1e-9, "{rate}: {run:#}");
    }
    for name in ["time_to_first_token_ms", "inter_token_latency_ms"] {
        let [p50, mean, p99, max] = ["p50", "mean", "p99", "max"].map(|key| number(&run[name][key]));
        assert!(0. <= p50 && p50 <= p99 && p99 <= max && mean <= max * (1. + 1e-9), "{name}: {run:#}");
        assert!(max <= seconds * 1e3, "{name}: {run:#}");
    }
    // The times between tokens add up to at most the time of the run, times the number of requests that run at once.
    let between = number(&run["inter_token_latency_ms"]["mean"]) * (OUTPUT - SIZES.len()) as f64;
    assert!(between <= SIZES.len() as f64 * seconds * 1e3, "{run:#}");
}

#[test]
fn figures_agree_with_the_file_and_with_each_other() {
    let folder = Folder::new(&mixed());
    let (result, stderr) = folder.bench(&["--repeat", "3", "--max-num-seqs", "2"]);
    let runs = result["runs"].as_array().unwrap();
    runs.iter().for_each(check);
    let seconds = |run: &Value| run["seconds"].as_f64().unwrap();
    assert_eq!(runs.len(), 3);
    assert!(
        runs.contains(&result["best"]) && runs.iter().all(|run| seconds(run) >= seconds(&result["best"]))
    );
    assert_eq!(result["workload"]["requests"], 6);
    assert_eq!((&result["max_num_seqs"], &result["workload"]["longest_sequence"]), (&json!(2), &json!(79)));
    // A step has at most one new token for each of two sequences, and scheduling does not depend on time.
    let steps: Vec<_> = runs.iter().map(|run| run["steps"].as_u64().unwrap()).collect();
    assert!(steps[0] as usize >= OUTPUT / 2 && steps.iter().all(|n| *n == steps[0]), "{steps:?}");
    assert!(runs.iter().all(|run| run["preemptions"] == 0));
    // With two at once the last request waits for others, so its first token comes late.
    assert!(
        result["best"]["time_to_first_token_ms"]["max"].as_f64()
            > result["best"]["inter_token_latency_ms"]["mean"].as_f64()
    );
    assert!(
        stderr.contains("6 requests with 129 prompt tokens and 148 new ones, at most 2 at once"),
        "{stderr}"
    );
    assert!(stderr.contains("best: run "), "{stderr}");
    // If a run takes seconds, it prints its progress: "3 / 6 requests".
    let rows = || stderr.lines().filter(|line| !line.contains(" / "));
    let row = |n: &str| rows().filter(|line| line.split_whitespace().next() == Some(n)).count();
    assert_eq!(["1", "2", "3", "4"].map(row), [1, 1, 1, 0], "{stderr}");
}

#[test]
fn a_small_kv_cache_preempts_and_loses_no_token() {
    let folder = Folder::new(&mixed());
    // Eight blocks of 16 tokens, a KiB each; four sequences at once soon need more.
    let flags = ["--repeat", "1", "--max-num-seqs", "4", "--dtype", "bf16", "--kv-cache-memory", "128KiB"];
    let (result, _) = folder.bench(&flags);
    check(&result["best"]);
    assert_eq!(result["kv_cache_tokens"], 128);
    assert!(result["best"]["preemptions"].as_u64().unwrap() > 0, "{result:#}");
    folder.fails(
        &["--dtype", "bf16", "--kv-cache-memory", "64KiB"],
        &["holds 65 tokens", "may have 79", "--kv-cache-memory"],
    );
}

#[test]
fn ranks_count_the_same_tokens() {
    let folder = Folder::new(&mixed());
    for flags in [&["--dp", "2"][..], &["--tp", "2"], &["--dp", "2", "--enable-expert-parallel"]] {
        let (result, _) = folder.bench(&[flags, &["--repeat", "2", "--max-num-seqs", "2"]].concat());
        result["runs"].as_array().unwrap().iter().for_each(check);
    }
}

#[test]
fn random_weights_a_checkpoint_and_the_first_requests_alone() {
    let folder = Folder::new(&mixed());
    let file = folder.path("out.json");
    let config = fixture("base").join("config.json");
    let flags = ["--config", config.to_str().unwrap(), "--dummy-weights", "--repeat", "1", "--json"];
    let work = folder.path("work.json");
    let bench = ["bench", "--workload", work.to_str().unwrap()];
    let output = PROGRAM.run(&[&bench[..], &flags, &[file.to_str().unwrap()]].concat());
    assert_eq!(stdout(&output), "", "JSON goes to the file");
    let result: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    check(&result["best"]);
    let base = fixture("base");
    let (result, _) = folder.bench(&["--model", base.to_str().unwrap(), "--limit", "2", "--repeat", "1"]);
    assert_eq!((&result["best"]["input_tokens"], &result["best"]["output_tokens"]), (&json!(13), &json!(88)));
    let one = Folder::new(&json!({"requests": [{"prompt_token_ids": [1], "max_tokens": 1, "seed": 0}]}));
    let (result, _) = one.bench(&["--repeat", "1"]);
    assert_eq!(result["best"]["inter_token_latency_ms"], Value::Null, "nothing comes after the first token");
}

#[test]
fn what_cannot_run_is_refused_before_there_are_weights() {
    let with = |request: Value| {
        let mut workload = mixed();
        workload["requests"].as_array_mut().unwrap().push(request);
        Folder::new(&workload)
    };
    // Nobody can read these weights: a program that reads them fails in a different way, with another exit code.
    let damaged = Copied::new("base");
    fs::write(damaged.path("model.safetensors"), "").unwrap();
    let model = ["--model", damaged.dir()];
    let good = Folder::new(&mixed());
    let file = good.path("work.json");
    let bench = ["bench", "--workload", file.to_str().unwrap()];
    PROGRAM.fails(&[&bench[..], &model].concat(), 1, &["model.safetensors"]);
    let request =
        |ids: Value, max_tokens: Value| json!({"prompt_token_ids": ids, "max_tokens": max_tokens, "seed": 0});
    for (request, words) in [
        (request(json!([5, 128]), json!(1)), ["prompt_token_ids[1]: expected an id below 128", "got 128"]),
        (request(json!([5]), json!(512)), ["at most 512, the model's context", "got 1 + 512"]),
        (
            request(json!([]), json!(1)),
            ["prompt_token_ids: expected a list of token ids, at least one", "got []"],
        ),
        (request(json!([5]), json!(0)), ["max_tokens: expected an integer from 1", "got 0"]),
        (
            request(json!("text"), json!(1)),
            ["prompt_token_ids: expected a list of token ids", "string \"text\""],
        ),
    ] {
        with(request).fails(&model, &[&["work.json: requests[6]: "][..], &words].concat());
    }
    let outside = with(request(json!([2048]), json!(1)));
    outside.fails(&[], &["requests[6]: prompt_token_ids[0]: expected an id below 2048"]);
    let config = fixture("base").join("config.json");
    outside.fails(&["--config", config.to_str().unwrap(), "--dummy-weights"], &["below 128"]);
    outside.fails(&["--limit", "0"], &["at least one request, got none"]);
    outside.fails(&["--max-num-seqs", "0"], &["--max-num-seqs must be from 1 to 65535, got 0"]);
    outside.fails(
        &["--max-num-batched-tokens", "0"],
        &["--max-num-batched-tokens must be from 1 to 16777216, got 0"],
    );
    outside.fails(&["--repeat", "0"], &["--repeat"]);
    outside.fails(&["--lengths", "5"], &["cannot be used with"]);
    PROGRAM.fails(&["bench", "--limit", "3"], 2, &["--workload"]);
    fs::write(outside.path("work.json"), "{\"requests\": [{\"prompt").unwrap();
    outside.fails(&model, &["work.json: requests[0]: EOF", "line 1 column"]);
    fs::remove_file(outside.path("work.json")).unwrap();
    outside.fails(&model, &["work.json: cannot read it"]);
}
