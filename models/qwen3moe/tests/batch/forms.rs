//! Other forms of input and output: lines of text, token ids, prompts of megabytes.

use std::fs;
use std::time::Instant;

use serde_json::{Value, json};

use super::{Folder, completion, fixture, stderr};

fn body(folder: &Folder, id: &str) -> Value {
    let records = folder.records();
    let record = records.iter().find(|record| record["custom_id"] == id);
    record.unwrap_or_else(|| panic!("no {id}"))["response"]["body"].clone()
}

#[test]
fn lines_of_text_are_prompts() {
    let folder = Folder::new(&[]);
    fs::write(folder.path("in.jsonl"), "ROMEO:\n\n  {\"no\": \"JSON\"}\r\n").unwrap();
    let flags = ["--input-format", "text", "--max-new-tokens", "6", "--temperature", "0"];
    let output = folder.run(&flags);
    assert!(output.status.success(), "{}", stderr(&output));
    let texts = ["line-1", "line-3"].map(|id| body(&folder, id)["choices"][0]["text"].clone());
    let same = Folder::new(&[
        completion("a", json!({"prompt": "ROMEO:"})),
        completion("b", json!({"prompt": "  {\"no\": \"JSON\"}"})),
    ]);
    assert!(same.run(&flags[2..]).status.success());
    assert_eq!(texts, ["a", "b"].map(|id| body(&same, id)["choices"][0]["text"].clone()));
    assert!(stderr(&folder.run(&flags)).contains("2 done before"), "a rerun continues");
    let model = fixture("text");
    let chat = Folder::new(&[]);
    fs::write(chat.path("in.jsonl"), "hi\n").unwrap();
    let asked = [&flags[..], &["--chat", "--model", model.to_str().unwrap()]].concat();
    assert!(chat.run(&asked).status.success());
    assert_eq!(body(&chat, "line-1")["object"], "chat.completion");
    let both = chat.run(&["--chat"]);
    assert!(
        both.status.code() == Some(2) && stderr(&both).contains("--input-format text"),
        "{}",
        stderr(&both)
    );
    let without = chat.run(&[&flags[..], &["--chat", "--overwrite"]].concat());
    assert!(!without.status.success() && stderr(&without).contains("no chat template"));
}

#[test]
fn token_ids_need_no_tokenizer() {
    let model = tempfile::tempdir().unwrap();
    for file in ["config.json", "generation_config.json", "model.safetensors"] {
        fs::copy(fixture("text").join(file), model.path().join(file)).unwrap();
    }
    let model = model.path().to_str().unwrap();
    let ids = json!({"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": true});
    let chat = json!({"custom_id": "chat", "url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "x"}]}});
    let mut stop = ids.clone();
    stop["stop"] = json!("x");
    let text = json!({"prompt": "text"});
    let lines = [completion("ids", ids.clone()), chat, completion("stop", stop), completion("text", text)];
    let folder = Folder::new(&lines);
    let refused = folder.run(&["--model", model]);
    assert!(!refused.status.success() && stderr(&refused).contains("tokenizer.json"), "{}", stderr(&refused));
    let output = folder.run(&["--model", model, "--skip-tokenizer"]);
    assert!(output.status.success() && stderr(&output).contains("3 with errors"), "{}", stderr(&output));
    let with = Folder::new(&[completion("ids", {
        let mut ids = ids;
        ids["return_token_ids"] = json!(true);
        ids
    })]);
    assert!(with.run(&["--model", fixture("text").to_str().unwrap()]).status.success());
    let (alone, with) =
        (body(&folder, "ids")["choices"][0].clone(), body(&with, "ids")["choices"][0].clone());
    assert_eq!((&alone["text"], &alone["token_ids"]), (&json!(""), &with["token_ids"]));
    assert_eq!(alone["token_ids"].as_array().unwrap().len(), 4);
    assert_eq!(alone["prompt_token_ids"], json!([5, 6, 7]));
    for id in ["chat", "stop", "text"] {
        let records = folder.records();
        let record = records.iter().find(|record| record["custom_id"] == id).unwrap();
        assert_eq!(record["response"]["status_code"], 400);
        let message = record["error"]["error"]["message"].as_str().unwrap();
        assert!(message.contains("needs a tokenizer"), "{id}: {message}");
    }
    let stop = folder.run(&["--model", model, "--skip-tokenizer-init", "--stop", "x"]);
    assert!(stop.status.code() == Some(2) && stderr(&stop).contains("--stop"), "{}", stderr(&stop));
}

#[test]
fn a_prompt_of_megabytes_is_refused_by_its_bytes() {
    let folder = Folder::new(&[completion("long", json!({"prompt": "word ".repeat(4 << 18)}))]);
    let start = Instant::now();
    assert!(folder.run(&[]).status.success());
    let elapsed = start.elapsed();
    let message = folder.records()[0]["error"]["error"]["message"].as_str().unwrap().to_string();
    for word in ["5242880 bytes", "context of 512 tokens"] {
        assert!(message.contains(word), "{message}");
    }
    assert!(elapsed.as_secs() < 10, "{elapsed:?}");
}
