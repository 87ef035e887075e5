//! `batch` as a user runs it: every line is answered once, whatever happens during the run.
#![allow(clippy::unwrap_used)] // helpers of tests are not tests in clippy's eyes

mod broken;
mod faults;
mod forms;
mod help;
mod hostile;
mod hostile_lines;
#[path = "../../../../tests/cli/nan.rs"]
mod nan;
mod reruns;
mod shared;
#[cfg(feature = "parquet")]
mod tables;
mod tokens;

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

struct Folder(tempfile::TempDir);

impl Folder {
    fn new(lines: &[Value]) -> Self {
        let folder = Self(tempfile::tempdir().unwrap());
        folder.write(lines);
        folder
    }

    fn write(&self, lines: &[Value]) {
        let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
        fs::write(self.path("in.jsonl"), text).unwrap();
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn command(&self, input: &str, output: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_model-qwen3moe"));
        command.current_dir(self.0.path()).args(["batch", "--input", input, "--output", output]);
        command.env("RUST_BACKTRACE", "0");
        command
    }

    fn run(&self, flags: &[&str]) -> Output {
        self.command("in.jsonl", "out.jsonl").args(flags).output().unwrap()
    }

    /// stderr of a run that succeeds.
    fn succeeds(&self, flags: &[&str]) -> String {
        self.ends(0, flags, &[])
    }

    /// stderr of a run that ends with this exit code and says all of these words.
    fn ends(&self, code: i32, flags: &[&str], words: &[&str]) -> String {
        ended(&self.run(flags), code, words)
    }

    fn records(&self) -> Vec<Value> {
        records(&fs::read(self.path("out.jsonl")).unwrap())
    }

    /// The record of the line with this `custom_id`.
    fn record(&self, custom_id: &str) -> Value {
        let record = self.records().into_iter().find(|record| record["custom_id"] == custom_id);
        record.unwrap_or_else(|| panic!("no {custom_id}"))
    }

    /// The body of its answer.
    fn body(&self, custom_id: &str) -> Value {
        let record = self.record(custom_id);
        assert_eq!(record["response"]["status_code"], 200, "{record}");
        record["response"]["body"].clone()
    }

    /// The first choice of its answer.
    fn choice(&self, custom_id: &str) -> Value {
        self.body(custom_id)["choices"][0].clone()
    }
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(name)
}

fn records(bytes: &[u8]) -> Vec<Value> {
    String::from_utf8(bytes.to_vec())
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

fn stderr(output: &Output) -> String {
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    assert!(!text.contains("panicked"), "{text}");
    text
}

/// stderr of a run that ended with this exit code and has said all of these words.
fn ended(output: &Output, code: i32, words: &[&str]) -> String {
    let text = stderr(output);
    assert_eq!(output.status.code(), Some(code), "{text}");
    words.iter().for_each(|word| assert!(text.contains(word), "expected {word:?} in {text}"));
    text
}

fn completion(custom_id: &str, body: Value) -> Value {
    json!({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body})
}

/// The part of a record that a rerun must reproduce.
fn essence(record: &Value) -> Value {
    let response = &record["response"];
    json!([response["status_code"], response["body"]["choices"], response["body"]["usage"], record["error"]])
}

/// The essence of each record by its name; no name may occur twice.
fn by_name(records: &[Value]) -> BTreeMap<String, Value> {
    let name = |record: &Value| match record["id"].as_str().unwrap() {
        line if line.starts_with("line-") => line.to_string(),
        _ => record["custom_id"].as_str().unwrap().to_string(),
    };
    let map: BTreeMap<String, Value> = records.iter().map(|record| (name(record), essence(record))).collect();
    assert_eq!(map.len(), records.len(), "a line is answered twice");
    map
}

#[test]
fn records_have_the_format_of_run_batch() {
    let folder = Folder::new(&[
        completion("a", json!({"prompt": "ROMEO:", "max_tokens": 5, "temperature": 0, "model": "mine"})),
        completion(
            "b",
            json!({"prompt": ["JULIET:", [5, 6, 7]], "n": 2, "max_tokens": 3, "ignore_eos": true, "logprobs": 1}),
        ),
    ]);
    let output = folder.run(&["--stats", "--any-model"]);
    assert!(output.stdout.is_empty());
    ended(&output, 0, &["2 requests", "steps of"]);
    let [a, b] = ["a", "b"].map(|id| folder.record(id));
    let keys: Vec<&String> = a.as_object().unwrap().keys().collect();
    assert_eq!(keys, ["id", "custom_id", "response", "error"]);
    assert_eq!((&a["response"]["status_code"], &a["error"]), (&json!(200), &Value::Null));
    let body = &a["response"]["body"];
    assert_eq!((&body["object"], &body["model"]), (&json!("text_completion"), &json!("mine")));
    let generated = Command::new(env!("CARGO_BIN_EXE_model-qwen3moe"))
        .args(["--prompt", "ROMEO:", "--max-new-tokens", "5", "--temperature", "0"])
        .output()
        .unwrap();
    assert_eq!(
        body["choices"][0]["text"].as_str().unwrap().as_bytes(),
        generated.stdout,
        "as `generate` has it"
    );
    assert_eq!(body["usage"]["completion_tokens"], 5);
    let body = &b["response"]["body"];
    let indices: Vec<u64> =
        body["choices"].as_array().unwrap().iter().map(|c| c["index"].as_u64().unwrap()).collect();
    assert_eq!(indices, [0, 1, 2, 3]);
    let tokens = |choice: &Value| choice["logprobs"]["tokens"].as_array().unwrap().len();
    assert!(
        body["choices"].as_array().unwrap().iter().all(|c| tokens(c) == 3 && c["finish_reason"] == "length")
    );
    assert_eq!(body["usage"]["completion_tokens"], 12);
    assert_ne!(body["choices"][0]["text"], body["choices"][1]["text"], "two samples of one prompt");
}

#[test]
fn bad_lines_are_answered_once_and_the_run_goes_on() {
    let folder = Folder::new(&[]);
    let good = |id: &str| completion(id, json!({"prompt": "x", "max_tokens": 2})).to_string();
    let chat = json!({"custom_id": "chat", "url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "x"}]}});
    let lines: Vec<(Vec<u8>, u64, &str)> = vec![
        (good("first").into(), 200, ""),
        (b"{not json".to_vec(), 400, "not JSON"),
        (b"{\"custom_id\": \"\xff\"}".to_vec(), 400, "not UTF-8"),
        (b"[]".to_vec(), 400, "object"),
        (b"{}".to_vec(), 400, "custom_id"),
        (good("first").into(), 400, "earlier line"),
        (
            completion("long", json!({"prompt": "word ".repeat(1000)})).to_string().into(),
            400,
            "longer than the context",
        ),
        (completion("empty", json!({"prompt": ""})).to_string().into(), 400, "empty"),
        (completion("token", json!({"prompt": [1, 99999]})).to_string().into(), 400, "vocabulary"),
        (completion("hot", json!({"prompt": "x", "temperature": -1})).to_string().into(), 400, "temperature"),
        // Either all prompts of a line are answered or none.
        (completion("half", json!({"prompt": ["x", ""]})).to_string().into(), 400, "empty"),
        (
            json!({"custom_id": "url", "url": "/v1/embeddings", "body": {}}).to_string().into(),
            400,
            "/v1/embeddings",
        ),
        (chat.to_string().into(), 400, "chat template"),
        (good("last").into(), 200, ""),
    ];
    let bytes: Vec<u8> = lines.iter().flat_map(|(line, ..)| [&line[..], b"\n"].concat()).collect();
    fs::write(folder.path("in.jsonl"), &bytes).unwrap();
    folder.ends(0, &[], &["14 requests", "12 with errors"]);
    let records = folder.records();
    for (number, (_, status, word)) in (1..).zip(&lines) {
        let ids = [format!("line-{number}"), format!("request-{number}")];
        let found: Vec<&Value> = records.iter().filter(|r| ids.iter().any(|id| r["id"] == **id)).collect();
        assert_eq!(found.len(), 1, "line {number}");
        assert_eq!(found[0]["response"]["status_code"], *status, "line {number}: {}", found[0]);
        let message = found[0]["error"]["error"]["message"].as_str().unwrap_or_default();
        assert!(message.contains(word), "line {number}: {message}");
    }
    assert_eq!(records.len(), lines.len());
    folder.succeeds(&[]);
    assert_eq!(folder.records().len(), lines.len(), "a rerun repeats no error record");
    // The next run answers a line that was added to the input.
    fs::write(folder.path("in.jsonl"), [&bytes[..], good("new").as_bytes()].concat()).unwrap();
    folder.succeeds(&[]);
    assert_eq!(folder.records().last().unwrap()["custom_id"], "new");
    assert_eq!(folder.records().len(), lines.len() + 1);
}

#[test]
fn another_model_is_an_error_of_its_request() {
    let ask = |id: &str, model: &str| completion(id, json!({"prompt": "x", "max_tokens": 2, "model": model}));
    let folder = Folder::new(&[ask("right", "embedded"), ask("wrong", "gpt-4")]);
    let text = fs::read(folder.path("in.jsonl")).unwrap();
    fs::write(folder.path("in.jsonl"), [b"\xEF\xBB\xBF", &text[..]].concat()).unwrap();
    folder.succeeds(&[]);
    // A byte-order mark does no harm.
    folder.body("right");
    let error = &folder.record("wrong")["error"]["error"];
    assert_eq!((&error["code"], &error["type"]), (&json!(404), &json!("NotFoundError")));
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("`gpt-4`") && message.contains("`embedded`"), "{message}");
    folder.succeeds(&["--retry-errors", "--any-model", "--fail-on-error"]);
}

#[test]
fn results_do_not_depend_on_order_or_limits() {
    let mut lines: Vec<Value> = (0..12)
        .map(|i| {
            completion(
                &format!("{i}"),
                json!({"prompt": "To be", "max_tokens": 8, "temperature": 1, "ignore_eos": true}),
            )
        })
        .collect();
    let one = Folder::new(&lines);
    one.succeeds(&[]);
    lines.reverse();
    let other = Folder::new(&lines);
    other.succeeds(&[
        "--max-num-seqs",
        "3",
        "--max-num-batched-tokens",
        "2",
        "--enable-prefix-caching=false",
    ]);
    assert_eq!(by_name(&one.records()), by_name(&other.records()));
    let texts: std::collections::BTreeSet<String> =
        one.records().iter().map(|r| r["response"]["body"]["choices"][0]["text"].to_string()).collect();
    assert!(texts.len() > 6, "each custom_id has a seed of its own: {texts:?}");
    let reseeded = Folder::new(&lines);
    reseeded.succeeds(&["--seed", "9"]);
    assert_ne!(by_name(&one.records()), by_name(&reseeded.records()));
}

#[test]
fn the_body_wins_over_flags_and_flags_over_the_checkpoint() {
    let folder = Folder::new(&[
        completion("flags", json!({"prompt": "To be"})),
        completion(
            "body",
            json!({"prompt": "To be", "max_tokens": 4, "ignore_eos": false, "temperature": 1}),
        ),
    ]);
    folder.succeeds(&["--max-new-tokens", "7", "--ignore-eos", "--temperature", "0"]);
    let tokens = |folder: &Folder, id: &str| folder.body(id)["usage"]["completion_tokens"].clone();
    assert_eq!(tokens(&folder, "flags"), 7);
    assert_eq!(tokens(&folder, "body"), 4);
    let plain = Folder::new(&[completion("plain", json!({"prompt": "To be", "ignore_eos": true}))]);
    plain.succeeds(&[]);
    assert_eq!(tokens(&plain, "plain"), 16, "vLLM's default");
}

#[test]
fn stdin_and_stdout_work() {
    let folder = Folder::new(&[]);
    let mut run = folder
        .command("-", "-")
        .args(["--progress-interval", "0.1"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = run.stdin.take().unwrap();
    let line = |id: &str| format!("{}\n", completion(id, json!({"prompt": "x", "max_tokens": 2})));
    stdin.write_all(line("a").as_bytes()).unwrap();
    // The answer arrives although the input stays open.
    let mut first = String::new();
    let mut out = std::io::BufReader::new(run.stdout.take().unwrap());
    std::io::BufRead::read_line(&mut out, &mut first).unwrap();
    assert_eq!(serde_json::from_str::<Value>(&first).unwrap()["custom_id"], "a");
    // The log shows the progress of a run.
    let mut log = std::io::BufReader::new(run.stderr.take().unwrap()).lines().map_while(Result::ok);
    assert!(log.any(|line| line.contains("1 / 1 requests read so far")), "it ended without a word");
    stdin.write_all(line("b").as_bytes()).unwrap();
    drop(stdin);
    let mut rest = Vec::new();
    std::io::Read::read_to_end(&mut out, &mut rest).unwrap();
    assert_eq!(records(&rest)[0]["custom_id"], "b");
    assert!(log.any(|line| line.starts_with("2 requests")), "the summary");
    assert!(run.wait().unwrap().success());
}

#[test]
fn wrong_calls_are_usage_errors() {
    let folder = Folder::new(&[completion("a", json!({"prompt": "x"}))]);
    let fails = |input: &str, output: &str, word: &str| {
        ended(&folder.command(input, output).output().unwrap(), 2, &[word]);
    };
    fails("in.jsonl", "in.jsonl", "is the input");
    fails("missing.jsonl", "out.jsonl", "missing.jsonl");
    fails(".", "out.jsonl", "folder");
    fails("in.jsonl", "no/such/folder/out.jsonl", "no/such/folder");
    assert!(!Path::new(&folder.path("out.jsonl")).exists(), "a wrong call leaves no file");
    fs::write(folder.path("notes.txt"), "my notes\n").unwrap();
    let result = folder.command("in.jsonl", "notes.txt").output().unwrap();
    assert_eq!(result.status.code(), Some(1));
    assert_eq!(fs::read_to_string(folder.path("notes.txt")).unwrap(), "my notes\n");
}

#[cfg(not(feature = "parquet"))]
#[test]
fn a_program_without_parquet_says_so() {
    let folder = Folder::new(&[completion("a", json!({"prompt": "x"}))]);
    fs::write(folder.path("in.parquet"), b"PAR1 and so on").unwrap();
    for (input, output) in [("in.parquet", "out.jsonl"), ("in.jsonl", "out.parquet")] {
        let result = folder.command(input, output).output().unwrap();
        ended(&result, 2, &["built without the feature `parquet`"]);
        assert!(!folder.path(output).exists());
    }
}

#[test]
fn chat_is_answered_with_the_checkpoints_template() {
    let model = fixture("text");
    let line = json!({
        "custom_id": "c", "method": "POST", "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "ignore_eos": true},
    });
    let rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n";
    let body = json!({"prompt": rendered, "max_tokens": 4, "ignore_eos": true, "add_special_tokens": false});
    let folder = Folder::new(&[line, completion("p", body)]);
    folder.succeeds(&["--model", model.to_str().unwrap()]);
    let chat = folder.body("c");
    let plain = folder.body("p");
    assert_eq!(chat["object"], "chat.completion", "{chat}");
    assert_eq!(
        chat["choices"][0]["message"],
        json!({"role": "assistant", "content": plain["choices"][0]["text"]})
    );
    assert_eq!(chat["usage"], plain["usage"]);
}
