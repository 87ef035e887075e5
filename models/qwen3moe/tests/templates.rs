//! Untrusted chat templates: whatever they do, the program continues.
#![allow(clippy::unwrap_used)] // helpers of tests are not tests in clippy's eyes

use std::path::PathBuf;
use std::process::Command;

use moe_engine::chat::{ChatError, ChatFiles, ChatRequest, ChatTemplate};
use serde_json::{Value, json};

const PROGRAM: &str = env!("CARGO_BIN_EXE_model-qwen3moe");

fn isolated(template: &str) -> ChatTemplate {
    let config = json!({"chat_template": template, "bos_token": "<s>"}).to_string();
    let files = ChatFiles::from_tokenizer_config(config.as_bytes()).unwrap();
    ChatTemplate::isolated(files, PathBuf::from(PROGRAM)).unwrap()
}

fn say(content: &str) -> ChatRequest {
    ChatRequest { messages: vec![json!({"role": "user", "content": content})], ..ChatRequest::default() }
}

/// If a template does something harmful with `bomb`, only that conversation fails.
fn survives(bomb: &str, words: &str) {
    let template = isolated(&format!(
        "{{% if messages[0].content == 'bomb' %}}{bomb}{{% endif %}}<{{{{ messages[0].content }}}}>"
    ));
    assert_eq!(template.render(&say("before")).unwrap(), "<before>");
    let error = template.render(&say("bomb")).unwrap_err();
    assert!(matches!(&error, ChatError::Limit { message, .. } if message.contains(words)), "{bomb}: {error}");
    assert_eq!(template.render(&say("after")).unwrap(), "<after>");
}

#[test]
fn memory_is_bounded() {
    for bomb in [
        "{% set ns = namespace(s='xy') %}{% for i in range(40) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s='xy') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='x' * 10**8) %}{% for i in range(99) %}{% set ns.s = [ns.s, ns.s|upper] %}{% endfor %}",
        "{% set ns = namespace(l=[1]) %}{% for i in range(40) %}{% set ns.l = (ns.l + ns.l)|list %}{% endfor %}",
        "{% set s = ('x' * 10**7)|replace('x', 'y' * 1000) %}",
        "{% set s = ('x' * 10**7).replace('x', 'y' * 1000) %}",
        "{% set s = range(99999)|join('y' * 10**6) %}",
        "{% set s = ('x' * 10**6).join(range(99999)|map('string')|list) %}",
        "{% set s = ('x\n' * 10**6)|indent(10**6) %}",
        "{% set ns = namespace(l=['x' * 10**7]) %}{% for i in range(9) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{% set s = ns.l|tojson %}",
        "{% set ns = namespace(l=['x' * 10**7]) %}{% for i in range(9) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{% set s = ns.l|string %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% else %}{{ 'x' * 10**7 }}{% endif %}{% endmacro %}{% set s = m(10) %}",
    ] {
        // On a busy machine a slow one may run out of time first.
        survives(bomb, "it takes more than");
    }
}

#[test]
fn a_lack_of_memory_is_named() {
    survives(
        "{% set s = 'x' * 10**8 %}{% set s = [s ~ s ~ s ~ s, s ~ s ~ s ~ s] %}",
        "more than 1024 MiB of memory",
    );
}

#[test]
fn the_stack_is_bounded() {
    let deep = "{% set ns = namespace(l=[]) %}{% for i in range(99) %}{% for j in range(99999) %}\
                {% set ns.l = [ns.l] %}{% endfor %}{% endfor %}";
    for bomb in [
        "{% set ns = namespace() %}{% set ns.me = ns %}{{ ns }}".to_string(),
        "{% set ns = namespace() %}{% set ns.me = ns %}{{ ns|tojson }}".to_string(),
        deep.to_string(),
        format!("{deep}{{{{ ns.l }}}}"),
    ] {
        survives(&bomb, "the stack is full");
    }
}

#[test]
fn time_is_bounded() {
    survives(
        "{% set x = 'x' * 10**8 %}{% for i in range(99999) %}{% set y = x|upper|lower %}{% endfor %}",
        "it takes more than 20 s",
    );
}

/// Constants are computed when a template is compiled.
#[test]
fn a_template_that_cannot_be_compiled_is_an_error_each_time() {
    let bomb = isolated(&format!("{{{{ {} }}}}", vec!["('x' * 10**8)"; 99].join(" ~ ")));
    for _ in 0..2 {
        let error = bomb.check().unwrap_err().to_string();
        assert!(error.contains("it takes more than"), "{error}");
        assert!(bomb.render(&say("x")).is_err());
    }
    let broken = isolated("a\n{% if %}");
    let error = broken.check().unwrap_err().to_string();
    assert!(error.starts_with("chat template `default`, line 2: syntax error"), "{error}");
}

#[test]
fn prompts_and_errors_are_those_of_the_same_process() {
    let source = "{{ bos_token }}{{ messages|tojson }}{{ 'thinking' if enable_thinking }}\n{{ tools|length if tools }}\
                  {{ raise_exception('no ' ~ messages[0].role) if messages[1] }}{{ messages[0].missing.field if documents }}";
    let config = json!({"chat_template": source, "bos_token": "<s>"}).to_string();
    let here = ChatTemplate::from_tokenizer_config(config.as_bytes()).unwrap().unwrap();
    let there = isolated(source);
    let numbers = json!([0.1, 0.30000000000000004, 2.5e-7, 1.7976931348623157e308, u64::MAX, -1, 5e-324]);
    let user = json!({"role": "user", "content": "\u{1F600} \u{0}\"\\\n</s>", "numbers": numbers});
    let kwargs = json!({"enable_thinking": true}).as_object().unwrap().clone();
    for chat in [
        ChatRequest { messages: vec![user.clone()], chat_template_kwargs: kwargs, ..ChatRequest::default() },
        ChatRequest { messages: vec![user.clone()], tools: Some(vec![json!({})]), ..ChatRequest::default() },
        ChatRequest { messages: vec![user.clone(), user.clone()], ..ChatRequest::default() },
        ChatRequest { messages: vec![user.clone()], documents: Some(vec![]), ..ChatRequest::default() },
        ChatRequest { messages: vec![user], documents: Some(vec![json!(1)]), ..ChatRequest::default() },
        ChatRequest::default(),
    ] {
        let words = |result: Result<String, ChatError>| result.map_err(|e| e.to_string());
        assert_eq!(words(there.render(&chat)), words(here.render(&chat)), "{chat:?}");
    }
    let prompt =
        there.render(&ChatRequest { messages: vec![json!({"x": numbers})], ..ChatRequest::default() });
    let text =
        "[0.1, 0.30000000000000004, 2.5e-07, 1.7976931348623157e+308, 18446744073709551615, -1, 5e-324]";
    assert_eq!(prompt.unwrap(), format!("<s>[{{\"x\": {text}}}]\n"));
}

#[test]
fn a_large_conversation_passes() {
    let content = "long \u{e9}".repeat(5 << 20);
    let prompt = isolated("{{ bos_token + messages[0].content }}").render(&say(&content)).unwrap();
    assert!(prompt == format!("<s>{content}"));
}

#[test]
fn a_program_that_does_not_render_is_named() {
    let files = ChatFiles::from_tokenizer_config(br#"{"chat_template": "x"}"#).unwrap();
    for (program, words) in [("/no/such/program", "cannot start"), ("/bin/false", "ended (exit status: 1)")] {
        let template = ChatTemplate::isolated(files.clone(), PathBuf::from(program)).unwrap();
        let error = template.render(&say("x")).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}

/// One line of a batch may crash the renderer; the other lines are answered.
#[test]
fn a_batch_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let bomb = "{% set ns = namespace(s='xy') %}{% if messages[0].content == 'bomb' %}{% for i in range(40) %}\
                {% set ns.s = ns.s + ns.s %}{% endfor %}{% endif %}{{ messages[0].content }}";
    std::fs::write(path("bomb.jinja"), bomb).unwrap();
    let line = |(i, content): (usize, &&str)| {
        let body = json!({"messages": [{"role": "user", "content": content}], "max_tokens": 2});
        json!({"custom_id": i.to_string(), "method": "POST", "url": "/v1/chat/completions", "body": body})
    };
    let lines = ["ROMEO:", "bomb", "JULIET:", "bomb"];
    let lines: String = lines.iter().enumerate().map(line).map(|line| format!("{line}\n")).collect();
    std::fs::write(path("in.jsonl"), lines).unwrap();
    let mut batch = Command::new(PROGRAM);
    batch.current_dir(folder.path()).args(["batch", "--input", "in.jsonl", "--output", "out.jsonl"]);
    let output = batch.args(["--chat-template", "bomb.jinja"]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = std::fs::read_to_string(path("out.jsonl")).unwrap();
    let mut records: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    records.sort_by_key(|record| record["custom_id"].as_str().unwrap().to_string());
    let codes: Vec<u64> = records.iter().map(|r| r["response"]["status_code"].as_u64().unwrap()).collect();
    assert_eq!(codes, [200, 400, 200, 400], "{text}");
    let error = records[1]["error"]["error"]["message"].as_str().unwrap();
    assert!(error.contains("it takes more than"), "{error}");
}
