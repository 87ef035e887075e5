//! Other forms of input and output: lines of text, token ids, prompts of megabytes.

use std::fs;
use std::process::Command;
use std::time::Instant;

use serde_json::json;

use super::{Folder, completion, fixture, stderr};

#[test]
fn lines_of_text_are_prompts() {
    let folder = Folder::new(&[]);
    fs::write(folder.path("in.jsonl"), "ROMEO:\n\n  {\"no\": \"JSON\"}\r\n").unwrap();
    let flags = ["--input-format", "text", "--max-new-tokens", "6", "--temperature", "0"];
    folder.succeeds(&flags);
    let texts = ["line-1", "line-3"].map(|id| folder.choice(id)["text"].clone());
    let same = Folder::new(&[
        completion("a", json!({"prompt": "ROMEO:"})),
        completion("b", json!({"prompt": "  {\"no\": \"JSON\"}"})),
    ]);
    same.succeeds(&flags[2..]);
    assert_eq!(texts, ["a", "b"].map(|id| same.choice(id)["text"].clone()));
    folder.ends(0, &flags, &["2 done before"]);
    let model = fixture("text");
    let chat = Folder::new(&[]);
    fs::write(chat.path("in.jsonl"), "hi\n").unwrap();
    let asked = [&flags[..], &["--chat", "--model", model.to_str().unwrap()]].concat();
    chat.succeeds(&asked);
    assert_eq!(chat.body("line-1")["object"], "chat.completion");
    chat.ends(2, &["--chat"], &["--input-format text"]);
    let without = [&flags[..], &["--chat", "--overwrite"]].concat();
    chat.ends(1, &without, &["no chat template"]);
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
    folder.ends(1, &["--model", model], &["tokenizer.json"]);
    folder.ends(0, &["--model", model, "--skip-tokenizer"], &["3 with errors"]);
    let mut with_ids = ids;
    with_ids["return_token_ids"] = json!(true);
    let with = Folder::new(&[completion("ids", with_ids)]);
    with.succeeds(&["--model", fixture("text").to_str().unwrap()]);
    let alone = folder.choice("ids");
    let with = with.choice("ids");
    assert_eq!((&alone["text"], &alone["token_ids"]), (&json!(""), &with["token_ids"]));
    assert_eq!(alone["token_ids"].as_array().unwrap().len(), 4);
    assert_eq!(alone["prompt_token_ids"], json!([5, 6, 7]));
    for id in ["chat", "stop", "text"] {
        let record = folder.record(id);
        assert_eq!(record["response"]["status_code"], 400);
        let message = record["error"]["error"]["message"].as_str().unwrap();
        assert!(message.contains("needs a tokenizer"), "{id}: {message}");
    }
    folder.ends(2, &["--model", model, "--skip-tokenizer-init", "--stop", "x"], &["--stop"]);
}

/// The experts are the same as in the recording that `generate` makes of the same text.
#[test]
fn experts_of_every_token_are_those_that_generate_records() {
    let body =
        |prompt: &str| json!({"prompt": prompt, "max_tokens": 5, "temperature": 0, "ignore_eos": true});
    let mut without = body("ROMEO:");
    without["return_routed_experts"] = json!(false);
    let lines = [completion("a", body("ROMEO:")), completion("b", without)];
    let folder = Folder::new(&lines);
    folder.succeeds(&["--enable-return-routed-experts"]);
    assert!(folder.choice("b").get("routed_experts").is_none());
    let choice = folder.choice("a");
    let file = base64_bytes(choice["routed_experts"].as_str().unwrap());
    let tokens = folder.body("a")["usage"]["total_tokens"].as_u64().unwrap() as usize - 1;
    let header = String::from_utf8_lossy(&file[10..128]).to_string();
    assert!(
        header.contains("'descr': '|u1'") && header.contains(&format!("'shape': ({tokens}, ")),
        "{header}"
    );
    let recording = folder.path("routing.safetensors");
    let generated = Command::new(env!("CARGO_BIN_EXE_model-qwen3moe"))
        .args(["--prompt", "ROMEO:", "--max-new-tokens", "5", "--temperature", "0", "--ignore-eos"])
        .arg("--routed-experts-out")
        .arg(&recording)
        .output()
        .unwrap();
    assert!(generated.status.success(), "{}", stderr(&generated));
    let recorded = fs::read(recording).unwrap();
    // In a safetensors file the u32 values follow a header, whose length is in the first eight bytes.
    let start = 8 + u64::from_le_bytes(recorded[..8].try_into().unwrap()) as usize;
    let ids: Vec<u8> = recorded[start..].chunks(4).map(|id| id[0]).collect();
    assert_eq!(&file[128..], ids);
}

fn base64_bytes(text: &str) -> Vec<u8> {
    let digit = |c: u8| match c {
        b'A'..=b'Z' => c - b'A',
        b'a'..=b'z' => c - b'a' + 26,
        b'0'..=b'9' => c - b'0' + 52,
        b'+' => 62,
        _ => 63,
    };
    let digits: Vec<u8> = text.bytes().filter(|c| *c != b'=').map(digit).collect();
    let bits = digits.iter().flat_map(|digit| (0..6).rev().map(move |bit| digit >> bit & 1));
    let bits: Vec<u8> = bits.collect();
    bits.chunks_exact(8).map(|byte| byte.iter().fold(0, |value, bit| value << 1 | bit)).collect()
}

#[test]
fn a_prompt_of_megabytes_is_refused_by_its_bytes() {
    let folder = Folder::new(&[completion("long", json!({"prompt": "word ".repeat(4 << 18)}))]);
    let start = Instant::now();
    folder.ends(1, &[], &["no line has an answer"]);
    let elapsed = start.elapsed();
    let message = folder.records()[0]["error"]["error"]["message"].as_str().unwrap().to_string();
    for word in ["5242880 bytes", "context of 512 tokens"] {
        assert!(message.contains(word), "{message}");
    }
    assert!(elapsed.as_secs() < 10, "{elapsed:?}");
}
