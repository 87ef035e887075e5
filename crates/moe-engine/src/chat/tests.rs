//! Tests of chat templates. The expected prompts come from transformers (recorded by
//! tests/reference/make_chat_fixtures.py). Other tests check the errors.
#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::path::{Path, PathBuf};

use chrono::{NaiveDate, NaiveDateTime};
use serde_json::{Value, json};

use super::checkpoint::ChatFiles;
use super::*;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures-chat")
}

fn fixture(name: &str) -> Value {
    let path = fixtures().join(name);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).unwrap()
}

/// The time at which the fixtures were recorded.
fn clock() -> NaiveDateTime {
    NaiveDate::from_ymd_opt(2025, 3, 7).unwrap().and_hms_opt(9, 5, 3).unwrap()
}

fn template(source: &str) -> ChatTemplate {
    let special_tokens = json!({"bos_token": "<s>", "eos_token": "</s>"}).as_object().unwrap().clone();
    let templates = [("default".to_string(), source.to_string())].into();
    ChatTemplate::new(ChatFiles { templates, special_tokens }, clock).unwrap().unwrap()
}

fn request(value: Value) -> ChatRequest {
    serde_json::from_value(value).unwrap()
}

/// Renders a template for one short message.
fn render(source: &str) -> Result<String, ChatError> {
    template(source).render(&request(json!({"messages": [{"role": "user", "content": "Hi"}]})))
}

/// Checks the recorded outcome: the same text, or an error if transformers also failed. If the template refuses the
/// conversation, the message must be the same, too.
fn check(case: &Value, ours: Result<String, ChatError>) -> Result<(), String> {
    let message = case["message"].as_str().unwrap_or_default();
    match (&ours, case["expected"].as_str()) {
        (Ok(ours), Some(theirs)) if ours == theirs => Ok(()),
        (Err(ChatError::Refused { message: ours, .. }), None) if ours.starts_with(message) => Ok(()),
        (Err(_), None) if case["error"] != "TemplateError" => Ok(()),
        _ => Err(format!("\n{case}\n     ours {ours:?}")),
    }
}

fn check_prompts(cases: &Value, mut source: impl FnMut(&str) -> String) {
    let conversations = fixture("conversations.json");
    let mut wrong = Vec::new();
    for case in cases.as_array().unwrap() {
        let mut chat = request(conversations[case["conversation"].as_str().unwrap()].clone());
        chat.continue_final_message = case["continue_final_message"] == true;
        let ours = template(&source(case["template"].as_str().unwrap())).render(&chat);
        wrong.extend(check(case, ours).err());
    }
    assert!(wrong.is_empty(), "{} cases differ:{}", wrong.len(), wrong.concat());
}

#[test]
fn families_of_templates_as_transformers_renders_them() {
    let folder = fixtures().join("templates");
    check_prompts(&fixture("expected/templates.json"), |name| {
        std::fs::read_to_string(folder.join(format!("{name}.jinja"))).unwrap()
    });
}

#[test]
#[ignore = "needs Qwen3's chat template, which is not in this repository: MOE_QWEN3_CHAT_TEMPLATE names its file"]
fn the_template_of_qwen3() {
    let path = std::env::var_os("MOE_QWEN3_CHAT_TEMPLATE").expect("MOE_QWEN3_CHAT_TEMPLATE names no file");
    let source = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    check_prompts(&fixture("expected/qwen3.json"), |_| source.clone());
}

#[test]
fn checkpoints_as_transformers_loads_them() {
    for checkpoint in fixture("expected/checkpoints.json").as_array().unwrap() {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in checkpoint["files"].as_object().unwrap() {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text.as_str().unwrap()).unwrap();
        }
        let loaded = ChatTemplate::from_dir(dir.path()).unwrap().unwrap();
        for case in checkpoint["cases"].as_array().unwrap() {
            check(case, loaded.render(&request(case["request"].clone()))).unwrap();
        }
    }
}

#[test]
fn a_checkpoint_without_templates_has_none_and_a_broken_one_is_an_error() {
    let embedded = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/families/checkpoint");
    let config = std::fs::read(embedded.join("tokenizer_config.json")).unwrap();
    assert!(ChatTemplate::from_tokenizer_config(&config).unwrap().is_none());
    assert!(ChatTemplate::from_dir(&embedded).unwrap().is_none());
    assert!(ChatTemplate::from_dir(tempfile::tempdir().unwrap().path()).unwrap().is_none());
    for (config, part) in [
        ("{", "not JSON"),
        ("[]", "expected a JSON object"),
        (r#"{"chat_template": 3}"#, "chat_template must be a text"),
        (r#"{"chat_template": [{"name": "x"}]}"#, "chat_template must be a text"),
        (r#"{"bos_token": 3}"#, "bos_token must be a text or an object with `content`"),
    ] {
        let message = ChatTemplate::from_tokenizer_config(config.as_bytes()).unwrap_err().to_string();
        assert!(message.starts_with("tokenizer_config.json: ") && message.contains(part), "{message}");
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("chat_template.jinja"), b"\xff").unwrap();
    assert!(ChatTemplate::from_dir(dir.path()).unwrap_err().to_string().contains("not UTF-8"));
}

#[test]
fn one_bad_template_of_several_fails_only_when_it_is_used() {
    let config = json!({"chat_template": [
        {"name": "default", "template": "fine"}, {"name": "tool_use", "template": "a\n{% if %}"}]});
    let template = ChatTemplate::from_tokenizer_config(config.to_string().as_bytes()).unwrap().unwrap();
    let chat = request(json!({"messages": [{}]}));
    let on_a_thread = template.clone();
    assert_eq!(std::thread::spawn(move || on_a_thread.render(&chat)).join().unwrap().unwrap(), "fine");
    let error = template.render(&request(json!({"messages": [{}], "tools": []}))).unwrap_err().to_string();
    assert!(error.starts_with("chat template `tool_use`, line 2: syntax error"), "{error}");
}

#[test]
fn malformed_requests_are_named() {
    let user = json!([{"role": "user", "content": "Hi"}]);
    for (chat, part) in [
        (json!({}), "the conversation is empty"),
        (json!({"messages": ["Hi"]}), "messages[0] is not a JSON object"),
        (json!({"messages": user, "tools": [{}, 1]}), "tools[1] is not a JSON object"),
        (json!({"messages": user, "chat_template_kwargs": {"tools": 1}}), "cannot set `tools`"),
        (json!({"messages": [{"role": "user"}], "continue_final_message": true}), "has no text to continue"),
    ] {
        let error = template("{{ messages }}").render(&request(chat)).unwrap_err();
        assert!(matches!(&error, ChatError::Request(message) if message.contains(part)), "{error}");
    }
}

#[test]
fn errors_name_the_line_and_the_reason() {
    for (source, message) in [
        ("a\n{{ x.y }}", "line 2: undefined value"),
        (
            "{# a\nb #}\r\n\r\n{{- 1 + 'a' }}",
            "line 4: invalid operation: tried to use + operator on unsupported types number and string, in `1 + 'a'`",
        ),
        ("{{ 1 | nope }}", "line 1: unknown filter: filter nope is unknown"),
        ("{{ 'a'.encode() }}", "line 1: unknown method: string has no method named encode"),
        ("{% for a in b %}", "line 1: syntax error"),
        ("{% include 'x' %}", "line 1: template not found"),
        (
            "\n{{ strftime_now('%Q') }}",
            "line 2: invalid operation: strftime_now: \"%Q\" is no format of a time",
        ),
        ("{{ strftime_now('%z') }}", "line 1: invalid operation: strftime_now: \"%z\" asks for more"),
        ("{{ x|tojson }}", "line 1: invalid operation: tojson: undefined is not JSON serializable"),
    ] {
        let error = render(source).unwrap_err().to_string();
        assert!(error.starts_with(&format!("chat template `default`, {message}")), "{source}: {error}");
    }
    let error =
        render("{% macro m() %}{{ raise_exception('no ' ~ 'way') }}{% endmacro %}{{ m() }}").unwrap_err();
    assert_eq!(error.to_string(), "the chat template `default` refuses this conversation: no way");
}

#[test]
fn runaway_templates_are_stopped() {
    let loops = |body: &str| {
        format!(
            "{{% for i in range(99999) %}}{{% for j in range(99999) %}}{body}{{% endfor %}}{{% endfor %}}"
        )
    };
    for source in [
        loops(""),
        loops(&"y".repeat(9999)),
        "x".repeat(200_000),
        // This is not a limit but a bug of minijinja: it panics. The panic must not end the caller.
        "{{ ''[::-1] }}".to_string(),
    ] {
        let error = render(&source).unwrap_err();
        assert!(matches!(error, ChatError::Limit { .. }), "{error}");
    }
    let nested =
        |open: &str, close: &str, n: usize| format!("{{{{ {}1{} }}}}", open.repeat(n), close.repeat(n));
    for source in [
        nested("(", ")", 60_000),
        nested("-", "", 120_000),
        nested("", "|e", 60_000),
        nested("", ".a", 60_000),
        // minijinja takes quadratic time for this template.
        nested("", "~s", 5_000),
        "{% if 1 %}".repeat(20_000),
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}".to_string(),
        "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}".to_string(),
    ] {
        let error = render(&source).err().map(|e| e.to_string()).unwrap_or_default();
        assert!(!error.contains("engine failed"), "{error}");
    }
}
