//! The contents of answers, token by token: no bad word occurs, and every log-probability has its own name.

use std::fs;

use serde_json::{Value, json};

use super::{Folder, completion, fixture};

/// A body with further fields.
fn with(mut body: Value, more: Value) -> Value {
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// Words of the bundled model: words that are one token only after a space, words of several tokens, and words that
/// arise from parts.
#[test]
fn no_answer_holds_its_bad_word() {
    let plain = json!({"prompt": "ROMEO:\n", "max_tokens": 48, "temperature": 0, "ignore_eos": true});
    let body = |more: Value| with(plain.clone(), more);
    let plain = Folder::new(&[completion("plain", plain.clone())]);
    plain.succeeds(&[]);
    let text = plain.choice("plain")["text"].as_str().unwrap().to_string();
    // Each word of the answer, and every three consecutive letters in it.
    let letters: Vec<char> = text.chars().collect();
    let parts = letters.windows(3).map(|part| part.iter().collect::<String>());
    let words = text.split_whitespace().map(|word| word.trim_matches(',').to_string());
    let mut words: Vec<String> = words.chain(parts).filter(|word| !word.trim().is_empty()).collect();
    words.sort();
    words.dedup();
    words.truncate(60);
    let mut lines: Vec<Value> =
        words.iter().map(|word| completion(word, body(json!({"bad_words": [word]})))).collect();
    lines.push(completion("all", body(json!({"bad_words": words, "temperature": 1, "n": 2}))));
    let folder = Folder::new(&lines);
    folder.succeeds(&[]);
    let all = folder.choice("all");
    for word in &words {
        for choice in [&folder.choice(word), &all] {
            let text = choice["text"].as_str().unwrap();
            assert!(!text.contains(word.trim()), "{word:?} in {text:?}");
        }
    }
}

#[test]
fn parts_of_characters_have_bytes_and_names_of_their_own() {
    let choices = json!(["ab\u{1F600}\u{6F22}"]);
    let chat = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, "logprobs": true,
        "top_logprobs": 2, "guided_choice": choices});
    let chat = json!({"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat});
    let body = json!({"prompt": "hello", "max_tokens": 20, "logprobs": 2, "guided_choice": choices});
    let folder = Folder::new(&[chat, completion("text", body)]);
    folder.succeeds(&["--model", fixture("text").to_str().unwrap()]);
    let chat = folder.choice("chat");
    let content = chat["logprobs"]["content"].as_array().unwrap();
    let bytes = content.iter().flat_map(|token| token["bytes"].as_array().unwrap());
    let bytes: Vec<u8> = bytes.map(|byte| byte.as_u64().unwrap() as u8).collect();
    assert_eq!(String::from_utf8(bytes).unwrap(), "ab\u{1F600}\u{6F22}");
    let logprobs = &folder.choice("text")["logprobs"];
    let list = |name: &str| logprobs[name].as_array().unwrap();
    assert_eq!(list("tokens").len(), 9, "each byte is a token");
    for ((name, own), top) in list("tokens").iter().zip(list("token_logprobs")).zip(list("top_logprobs")) {
        assert_eq!(&top[name.as_str().unwrap()], own, "{name} in {top}");
        assert!(top.as_object().unwrap().len() >= 2, "{top}");
    }
    assert_eq!(list("tokens")[2], "bytes:\\xf0");
    assert_eq!(logprobs["text_offset"], json!([0, 1, 2, 2, 2, 2, 3, 3, 3]));
}

#[test]
fn a_prompt_may_fill_the_context_if_it_is_only_scored() {
    let score = |len: usize, more: Value| {
        with(json!({"prompt": vec![1; len], "max_tokens": 0, "echo": true, "logprobs": 1}), more)
    };
    let folder = Folder::new(&[
        completion("511", score(511, json!({}))),
        completion("512", score(512, json!({"n": 3, "min_tokens": 5}))),
        completion("1", score(1, json!({}))),
        completion("513", score(513, json!({}))),
        completion("echo", json!({"prompt": [1, 2], "max_tokens": 0, "echo": true})),
    ]);
    folder.succeeds(&["--model", fixture("text").to_str().unwrap()]);
    let scored = [("1", 1), ("511", 511), ("512", 512)].map(|(name, len)| {
        let logprobs = folder.choice(name)["logprobs"]["token_logprobs"].as_array().unwrap().clone();
        assert_eq!(logprobs.len(), len);
        assert!(logprobs[0].is_null() && logprobs[1..].iter().all(Value::is_number));
        logprobs
    });
    assert_eq!(scored[1], scored[2][..511]);
    assert!(folder.choice("echo")["logprobs"].is_null());
    let too_long = folder.record("513");
    assert_eq!(too_long["error"]["error"]["param"], "prompt", "{too_long}");
}

/// A checkpoint whose tokenizer ends texts with a token that its configuration does not name.
#[test]
fn texts_end_at_the_end_token_of_the_tokenizer_too() {
    let dir = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(fixture("text")).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    fs::write(dir.path().join("generation_config.json"), r#"{"eos_token_id": 5, "top_k": -1}"#).unwrap();
    // 299 is the tokenizer's <|im_end|>.
    let body = json!({"prompt": "x", "max_tokens": 6, "temperature": 0, "logit_bias": {"299": 100}});
    let folder = Folder::new(&[
        completion("ends", body.clone()),
        completion("goes on", with(body, json!({"ignore_eos": true}))),
    ]);
    let model = dir.path().to_str().unwrap();
    folder.ends(0, &["--model", model], &["its tokenizer with 299: texts end at each of them"]);
    assert_eq!(folder.choice("ends")["finish_reason"], "stop");
    assert_eq!(folder.choice("goes on")["finish_reason"], "length");
}
