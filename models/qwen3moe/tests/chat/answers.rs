//! Reasoning and tool calls. The test gives other texts to the tokens of a small model's answer, so that the answer is
//! the text of a large model, token by token.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

use super::fixture;

/// The tags end inside of tokens.
const SAID: [&str; 9] = [
    "<thi",
    "nk>\nHm",
    "m.\n</",
    "think>\n\nSu",
    "re.",
    "\n<tool_ca",
    "ll>{\"name\": \"f\", ",
    "\"arguments\": {\"x\": 1}}",
    "</tool_call>",
];

/// The template mentions the same names as Qwen3's template. For the tokenizer its output is one unknown word.
const TEMPLATE: &str = "{% if '</think>' in messages[-1].content or messages[-1].reasoning_content or \
    messages[-1].tool_calls %}{{ '<tool_call>' }}{% endif %}{{ messages[-1].content }}x";

struct Scripted {
    dir: tempfile::TempDir,
    /// The tokens of the answer.
    ids: Vec<u32>,
}

impl Scripted {
    fn new(said: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        for file in fs::read_dir(fixture()).unwrap().map(|entry| entry.unwrap().path()) {
            fs::copy(&file, dir.path().join(file.file_name().unwrap())).unwrap();
        }
        fs::write(dir.path().join("chat_template.jinja"), TEMPLATE).unwrap();
        let mut texts: Vec<String> = (0..300).map(|id| format!("w{id}")).collect();
        write_tokenizer(dir.path(), &texts);
        let mut scripted = Self { dir, ids: Vec::new() };
        let count = said.len().to_string();
        let output = scripted.run("generate", &["--prompt", "x", "--json", "--max-new-tokens", &count], "");
        let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
        let ids = answer["choices"][0]["token_ids"].as_array().unwrap().clone();
        scripted.ids = ids.iter().map(|id| id.as_u64().unwrap() as u32).collect();
        for (id, text) in scripted.ids.iter().zip(said) {
            assert_eq!(texts[*id as usize], format!("w{id}"), "each token comes once");
            texts[*id as usize] = text.to_string();
        }
        write_tokenizer(scripted.dir.path(), &texts);
        scripted
    }

    fn run(&self, command: &str, flags: &[&str], input: &str) -> Output {
        let always = ["--temperature", "0", "--repetition-penalty", "1000000", "--ignore-eos"];
        let mut run = Command::new(env!("CARGO_BIN_EXE_model-qwen3moe"));
        run.current_dir(self.dir.path()).args([command, "--model", "."]).args(always).args(flags);
        let mut run =
            run.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let _ = std::io::Write::write_all(&mut run.stdin.take().unwrap(), input.as_bytes());
        let output = run.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        output
    }

    /// Flags that end the answer with its last token.
    fn end(&self) -> [String; 3] {
        let last = self.ids.last().unwrap();
        [
            format!("--stop-token-ids={last}"),
            "--include-stop-str-in-output".into(),
            "--max-new-tokens=40".into(),
        ]
    }
}

fn write_tokenizer(dir: &Path, texts: &[String]) {
    let vocab: serde_json::Map<String, Value> =
        texts.iter().enumerate().map(|(id, text)| (text.clone(), id.into())).collect();
    let unknown = texts[0].clone();
    let json = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": null, "post_processor": null, "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": unknown},
    });
    fs::write(dir.join("tokenizer.json"), json.to_string()).unwrap();
}

fn call(message: &Value) -> (&str, &str) {
    let function = &message["tool_calls"][0]["function"];
    (function["name"].as_str().unwrap(), function["arguments"].as_str().unwrap())
}

#[test]
fn generate_tells_reasoning_text_and_calls_apart() {
    let model = Scripted::new(&SAID);
    let end = model.end();
    let flags: Vec<&str> =
        ["--chat", "--prompt", "hi"].into_iter().chain(end.iter().map(String::as_str)).collect();
    assert_eq!(
        String::from_utf8(model.run("generate", &flags, "").stdout).unwrap(),
        SAID.concat(),
        "a pipe gets all"
    );
    let json = model.run("generate", &[&flags[..], &["--json"]].concat(), "");
    let choice = serde_json::from_slice::<Value>(&json.stdout).unwrap()["choices"][0].clone();
    let message = &choice["message"];
    assert_eq!((&message["reasoning"], &message["content"]), (&json!("Hmm."), &json!("Sure.")));
    assert_eq!((call(message), &choice["text"]), (("f", "{\"x\":1}"), &json!(SAID.concat())));
    let none = ["--json", "--reasoning-parser", "none", "--tool-call-parser", "none"];
    let json = model.run("generate", &[&flags[..], &none].concat(), "");
    let choice = serde_json::from_slice::<Value>(&json.stdout).unwrap()["choices"][0].clone();
    assert_eq!(choice["message"], json!({"role": "assistant", "content": SAID.concat()}));
}

#[test]
fn chat_keeps_them_apart_in_the_conversation() {
    let model = Scripted::new(&SAID);
    let end = model.end();
    let flags: Vec<&str> = end.iter().map(String::as_str).collect();
    let output = model.run("chat", &flags, "hi\n/history\n/save talk.json\n/load talk.json\n/stats\nagain\n");
    let said = format!("{}\n", SAID.concat());
    assert_eq!(String::from_utf8(output.stdout).unwrap(), said.repeat(2));
    let stderr = String::from_utf8(output.stderr).unwrap();
    for words in [
        "assistant (reasoning): Hmm.",
        "assistant: Sure.\n",
        "assistant [tool call]: f {\"x\":1}",
        "[2 messages]",
    ] {
        assert!(stderr.contains(words), "{words}: {stderr}");
    }
    let saved: Value =
        serde_json::from_slice(&fs::read(model.dir.path().join("talk.json")).unwrap()).unwrap();
    assert_eq!((&saved[1]["reasoning"], call(&saved[1])), (&json!("Hmm."), ("f", "{\"x\":1}")));
}

#[test]
fn batch_has_fields_for_them_on_request() {
    let model = Scripted::new(&SAID);
    let end = model.end();
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {}}}]);
    let body = json!({"messages": [{"role": "user", "content": "hi"}], "tools": tools});
    let line = json!({"custom_id": "a", "url": "/v1/chat/completions", "body": body}).to_string();
    let choice = |more: &[&str]| {
        let flags: Vec<&str> =
            end.iter().map(String::as_str).chain(["--input", "-", "--output", "-"]).collect();
        let output = model.run("batch", &[&flags[..], more].concat(), &line);
        let record: Value = serde_json::from_slice(&output.stdout).unwrap();
        record["response"]["body"]["choices"][0].clone()
    };
    let plain = choice(&[]);
    assert_eq!(plain["message"], json!({"role": "assistant", "content": SAID.concat()}));
    assert_eq!(plain["finish_reason"], "stop");
    let parsed = choice(&["--reasoning-parser", "qwen3", "--tool-call-parser", "hermes"]);
    let message = &parsed["message"];
    assert_eq!((&message["reasoning"], &message["content"]), (&json!("Hmm."), &json!("Sure.")));
    assert_eq!((call(message), &parsed["finish_reason"]), (("f", "{\"x\":1}"), &json!("tool_calls")));
    assert_eq!(choice(&["--reasoning-parser", "auto", "--tool-call-parser", "auto"]), parsed);
}
