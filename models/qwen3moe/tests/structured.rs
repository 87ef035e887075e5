//! Structured output on the command line: `generate`, `chat` and `batch`, over ranks, and what is refused.
#![allow(clippy::unwrap_used)] // helpers of tests are not tests in clippy's eyes

#[path = "../../../tests/cli/program.rs"]
mod program;

use std::io::Write;
use std::process::Stdio;

use program::Program;
use serde_json::{Value, json};

/// The program with its embedded model.
const PROGRAM: Program = Program { path: env!("CARGO_BIN_EXE_model-qwen3moe"), flags: &[] };
const SCHEMA: &str = r#"{"type": "object", "additionalProperties": false, "required": ["who", "age"], "properties": {
    "who": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 1, "maximum": 99}}}"#;

fn generate(flags: &[&str]) -> String {
    let fixed = ["--prompt", "ROMEO:\n", "--max-new-tokens", "400", "--temperature", "1", "--seed", "5"];
    PROGRAM.text(&[&fixed[..], flags].concat())
}

fn check(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text:?}"));
    assert!(value["who"].as_str().unwrap().chars().count() <= 20, "{text}");
    assert!((1..=99).contains(&value["age"].as_i64().unwrap()), "{text}");
}

#[test]
fn generate_has_a_flag_for_each_kind() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_string()
    };
    let inline = generate(&["--json-schema", SCHEMA]);
    check(&inline);
    assert_eq!(generate(&["-j", &file("schema.json", SCHEMA)]), inline);
    let words = generate(&["--guided-choice", "Aye, sir", "--guided-choice", "No (never)"]);
    assert!(words == "Aye, sir" || words == "No (never)", "{words:?}");
    let digits = generate(&["--guided-regex", "[0-9]{3}-[0-9]{4}"]);
    assert!(digits.len() == 8 && digits.as_bytes()[3] == b'-', "{digits:?}");
    let grammar = file("grammar.lark", "start: \"(\" start \")\" | \"love\"\n");
    let nested = generate(&["--guided-grammar", &grammar]);
    assert!(nested.trim_start_matches('(').trim_end_matches(')') == "love", "{nested:?}");
    let object = generate(&["--json-object"]);
    assert!(object.starts_with('{'), "{object:?}");
    let line = generate(&["--json", "--json-schema", SCHEMA, "--num-sequences", "3"]);
    let value: Value = serde_json::from_str(&line).unwrap();
    let choices = value["choices"].as_array().unwrap();
    choices.iter().for_each(|choice| check(choice["text"].as_str().unwrap()));
    assert!(choices.len() == 3 && choices.iter().all(|choice| choice["finish_reason"] == "stop"));
}

#[test]
fn mistakes_are_told_before_weights() {
    let fails = |args: &[&str], words: &[&str]| PROGRAM.fails(&[&["--prompt", "x"], args].concat(), 2, words);
    fails(&["--json-object", "--guided-regex", "a"], &["cannot be used with"]);
    fails(
        &["--json-schema", r#"{"not": {}}"#],
        &["--json-schema: the JSON schema cannot be used", "\"not\""],
    );
    fails(&["--json-schema", "{"], &["--json-schema", "it is not JSON"]);
    fails(&["--json-schema", "no-such-file"], &["--json-schema no-such-file: cannot read the file"]);
    fails(
        &["--guided-regex", "a("],
        &["--guided-regex: the regular expression cannot be used", "unclosed group"],
    );
    fails(&["--guided-choice", ""], &["--guided-choice: the list of choices"]);
    // Flags are checked before the model is looked up.
    fails(&["--guided-regex", "a(", "--model", "/no/such/folder"], &["unclosed group"]);
}

#[test]
fn the_text_is_the_same_over_ranks() {
    let one = generate(&["--json-schema", SCHEMA, "--num-sequences", "3"]);
    for geometry in
        [&["--tp", "2"][..], &["--dp", "2"], &["--tp", "2", "--dp", "2", "--enable-expert-parallel"]]
    {
        let flags = [&["--json-schema", SCHEMA, "--num-sequences", "3"], geometry].concat();
        assert_eq!(generate(&flags), one, "{geometry:?}");
    }
    // With processes the request is sent to the other process and compiled there.
    let processes = ["--tp", "1", "--dp", "2", "--distributed-executor-backend", "mp"];
    let flags = [&["--json-schema", SCHEMA, "--num-sequences", "3"][..], &processes].concat();
    assert_eq!(generate(&flags), one, "processes");
}

#[test]
fn chat_answers_as_it_must() {
    let dir = tempfile::tempdir().unwrap();
    let template = dir.path().join("play.jinja");
    std::fs::write(&template, "{{ messages[-1].content }}\n").unwrap();
    let args = ["chat", "--chat-template", template.to_str().unwrap(), "--log", "warn"];
    let args = [&args[..], &["--guided-choice", "Aye", "--guided-choice", "Nay"]].concat();
    let mut command = PROGRAM.command(&args);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"Art thou there?\nAnd now?\n").unwrap();
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let answers: Vec<&str> = text.lines().filter(|line| !line.is_empty()).collect();
    assert!(answers.len() == 2 && answers.iter().all(|a| *a == "Aye" || *a == "Nay"), "{text:?}");
}

/// Answers of a batch by `custom_id`.
fn batch(bodies: &[(&str, &str, Value)], flags: &[&str]) -> serde_json::Map<String, Value> {
    let dir = tempfile::tempdir().unwrap();
    let input = dir.path().join("in.jsonl");
    let output = dir.path().join("out.jsonl");
    std::fs::write(dir.path().join("t.jinja"), "{{ messages[-1].content }}\n").unwrap();
    let line = |(id, url, body): &(&str, &str, Value)| {
        json!({"custom_id": id, "url": url, "body": body}).to_string() + "\n"
    };
    std::fs::write(&input, bodies.iter().map(line).collect::<String>()).unwrap();
    let files = ["batch", "--input", input.to_str().unwrap(), "--output", output.to_str().unwrap()];
    let template = dir.path().join("t.jinja");
    PROGRAM.text(&[&files[..], &["--chat-template", template.to_str().unwrap()], flags].concat());
    let records = std::fs::read_to_string(output).unwrap();
    let records = records.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    records.map(|record| (record["custom_id"].as_str().unwrap().to_string(), record)).collect()
}

#[test]
fn batch_bodies_have_all_the_names() {
    let schema: Value = serde_json::from_str(SCHEMA).unwrap();
    let chat = "/v1/chat/completions";
    let completions = "/v1/completions";
    let ask = |extra: Value| {
        let mut body = json!({"prompt": "ROMEO:\n", "messages": [{"role": "user", "content": "ROMEO:"}], "max_tokens": 100});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        body
    };
    let format =
        json!({"type": "json_schema", "json_schema": {"name": "person", "strict": true, "schema": schema}});
    let bodies = [
        ("format", chat, ask(json!({"response_format": format}))),
        ("json", completions, ask(json!({"guided_json": schema, "n": 2}))),
        ("new", chat, ask(json!({"structured_outputs": {"json": schema}}))),
        ("choice", completions, ask(json!({"guided_choice": ["Aye", "Nay"]}))),
        ("regex", chat, ask(json!({"guided_regex": "[a-c]{5}"}))),
        ("grammar", completions, ask(json!({"guided_grammar": "start: \"a\" | \"b\""}))),
        ("free", completions, ask(json!({"response_format": {"type": "text"}, "max_tokens": 5}))),
        ("two", completions, ask(json!({"guided_json": {}, "guided_regex": "a"}))),
        ("bad regex", chat, ask(json!({"guided_regex": "a("}))),
        (
            "bad schema",
            completions,
            ask(json!({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}})),
        ),
        ("empty", completions, ask(json!({"structured_outputs": {"choice": []}}))),
    ];
    let records = batch(&bodies, &[]);
    let text = |id: &str, choice: usize| {
        let choice = &records[id]["response"]["body"]["choices"][choice];
        assert_eq!(
            (&choice["finish_reason"], &choice["stop_reason"]),
            (&json!("stop"), &Value::Null),
            "{id}: {choice}"
        );
        choice["text"].as_str().or(choice["message"]["content"].as_str()).unwrap().to_string()
    };
    for (id, choice) in [("format", 0), ("json", 0), ("json", 1), ("new", 0)] {
        check(&text(id, choice));
    }
    assert!(["Aye", "Nay"].contains(&text("choice", 0).as_str()));
    assert!(text("regex", 0).len() == 5 && ["a", "b"].contains(&text("grammar", 0).as_str()));
    assert_eq!(records["free"]["response"]["body"]["choices"][0]["finish_reason"], "length");
    for (id, param) in [
        ("two", "guided_regex"),
        ("bad regex", "guided_regex"),
        ("bad schema", "response_format"),
        ("empty", "structured_outputs"),
    ] {
        let error = &records[id]["error"]["error"];
        assert_eq!(
            (&records[id]["response"]["status_code"], &error["param"]),
            (&json!(400), &json!(param)),
            "{id}: {error}"
        );
        assert!(error["message"].as_str().unwrap().starts_with(&format!("{param}: ")), "{error}");
    }
    // A flag applies to a body without the field; the body's own value has priority.
    let bodies =
        [("flag", completions, ask(json!({}))), ("own", completions, ask(json!({"guided_choice": ["Aye"]})))];
    let records = batch(&bodies, &["--guided-choice", "Nay", "--dp", "2"]);
    let text = |id: &str| records[id]["response"]["body"]["choices"][0]["text"].clone();
    assert_eq!((text("flag"), text("own")), (json!("Nay"), json!("Aye")));
}

/// Lines that crash the process of the compiler, or keep it busy for long, only fail themselves.
#[test]
fn hostile_grammars_cost_their_line_alone() {
    let completions = "/v1/completions";
    let ask = |extra: Value| {
        let mut body = json!({"prompt": "ROMEO:\n", "max_tokens": 3});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        body
    };
    let object = |next: Value| json!({"type": "object", "properties": {"a": next}, "required": ["a"]});
    let definition = |i: usize| (format!("d{i}"), object(json!({"$ref": format!("#/$defs/d{}", i + 1)})));
    let mut defs: serde_json::Map<_, _> = (0..1_000).map(definition).collect();
    defs.insert("d1000".into(), json!({"type": "null"}));
    let chain = json!({"$ref": "#/$defs/d0", "$defs": defs});
    let rules: String = (0..40_000).map(|i| format!("r{i}: r{}\n", i + 1)).collect();
    // Every alternative contains a copy of every name, which would be some tens of gigabytes.
    let names: Vec<String> = (0..40_000).map(|i| format!("n{i}")).collect();
    let copies =
        json!({"anyOf": vec![json!({"type": "object"}); 10_000], "type": "object", "required": names});
    let bodies = [
        ("before", completions, ask(json!({}))),
        ("chain", completions, ask(json!({"guided_json": chain}))),
        ("rules", completions, ask(json!({"guided_grammar": format!("start: r0\n{rules}r40000: \"x\"\n")}))),
        ("copies", completions, ask(json!({"guided_json": copies}))),
        ("choice", completions, ask(json!({"guided_choice": ["Aye", "Nay"]}))),
        ("after", completions, ask(json!({}))),
    ];
    let records = batch(&bodies, &[]);
    for id in ["before", "choice", "after"] {
        assert_eq!(records[id]["response"]["status_code"], 200, "{id}: {}", records[id]["error"]);
    }
    let error = &records["rules"]["error"]["error"];
    assert_eq!((&error["code"], &error["param"]), (&json!(400), &json!("guided_grammar")), "{error}");
    assert!(error["message"].as_str().unwrap().contains("rules and groups"), "{error}");
    // These schemas have an answer or an error of their own.
    for id in ["chain", "copies"] {
        let status = &records[id]["response"]["status_code"];
        assert!([json!(200), json!(400)].contains(status), "{id}: {}", records[id]["error"]);
    }
}

/// With a parser the schema applies after the reasoning, whether the prompt or the model opens it, and the answer
/// contains only the text.
#[test]
fn schemas_hold_after_the_reasoning() {
    let dir = tempfile::tempdir().unwrap();
    let schema = r#"{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": false}"#;
    for (name, tail, closes) in [("opened", "<think>\n", true), ("closed", "<think>\n\n</think>\n\n", false)]
    {
        let template = dir.path().join(name);
        std::fs::write(&template, format!("{{{{ messages[0].content }}}}{tail}{{# </think> #}}\n\n"))
            .unwrap();
        let template = template.to_str().unwrap();
        let flags =
            ["--chat", "--json", "--chat-template", template, "--prompt", "ROMEO:", "--json-schema", schema];
        let text =
            PROGRAM.text(&[&["generate", "--max-new-tokens", "40", "--seed", "3"][..], &flags].concat());
        let message = serde_json::from_str::<Value>(&text).unwrap()["choices"][0]["message"].clone();
        let content = message["content"].as_str().map(serde_json::from_str::<Value>);
        match (closes, content) {
            // The model does not know the tag, so its reasoning continues to the limit.
            (true, content) => {
                assert!(content.is_none() && message["reasoning"].is_string(), "{name}: {message}")
            }
            (false, content) => {
                let json = content.unwrap_or_else(|| panic!("{name}: {message}"));
                assert!(json.is_ok_and(|json| json["a"].is_boolean()), "{name}: {message}");
            }
        }
    }
}

#[test]
fn required_calls_follow_the_schemas_of_their_functions() {
    let parameters = json!({"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": false});
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": parameters}}]);
    let named = json!({"type": "function", "function": {"name": "f"}});
    let body = |choice: Value| {
        json!({"messages": [{"role": "user", "content": "ROMEO:"}], "max_tokens": 120, "tools": tools,
            "tool_choice": choice, "parallel_tool_calls": false})
    };
    let chat = "/v1/chat/completions";
    let records = batch(&[("required", chat, body(json!("required"))), ("named", chat, body(named))], &[]);
    for (id, finish) in [("required", "tool_calls"), ("named", "stop")] {
        let choice = &records[id]["response"]["body"]["choices"][0];
        let call = &choice["message"]["tool_calls"][0]["function"];
        let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
        assert!(call["name"] == "f" && [json!({"x": 1}), json!({"x": 2})].contains(&arguments), "{choice}");
        assert_eq!((&choice["finish_reason"], &choice["message"]["content"]), (&json!(finish), &Value::Null));
    }
}
