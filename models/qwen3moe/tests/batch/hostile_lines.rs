//! Lines of a batch that try to end the run, to slow down other lines, or to use up memory.

use serde_json::{Value, json};

use super::completion;

/// A hostile line: calls return different kinds in turn, and never the same text twice.
pub fn hostile(number: usize) -> Vec<u8> {
    let kinds: &[fn(usize) -> Vec<u8>] = &[
        |n| format!("{{\"custom_id\": \"torn-{n}\", \"body\": {{").into_bytes(),
        |n| [b"{\"custom_id\": \"\xff\xfe", n.to_string().as_bytes(), b"\"}"].concat(),
        |n| line(n, "guided_json", schema_chain(1000, n)),
        |n| line(n, "guided_json", schema_forks(492, n)),
        |n| line(n, "guided_json", nested_arrays(100, n)),
        |n| line(n, "guided_json", nested_arrays(600, n)),
        |n| line(n, "guided_grammar", lark_chain(5000, n).into()),
        |n| line(n, "guided_regex", nested_groups(20_000).into()),
        |n| line(n, "guided_regex", format!("((({n}a{{1000}}){{1000}}){{1000}}){{1000}}").into()),
        |n| line(n, "guided_regex", format!("[^\\s\\S]{n}").into()),
        |n| line(n, "guided_regex", format!("(a|{n}|aa)*(b|bb)*(?=c)").into()),
        |n| {
            line(
                n,
                "guided_json",
                json!({"type": "string", "pattern": format!("^((a+)+)+{n}$"), "minLength": 1_000_000_000}),
            )
        },
        |n| line(n, "guided_json", json!({"type": "array", "minItems": 1_000_000_000, "title": n})),
        |n| line(n, "guided_json", json!({"type": "number", "multipleOf": 1e-300, "title": n})),
        |n| {
            line(
                n,
                "guided_json",
                json!({"$ref": format!("#/$defs/{n}"), "$defs": {n.to_string(): {"$ref": format!("#/$defs/{n}")}}}),
            )
        },
        |n| {
            line(
                n,
                "guided_json",
                json!({"enum": (0..20_000).map(|i| format!("{n}-{i}")).collect::<Vec<_>>()}),
            )
        },
        |n| line(n, "guided_choice", json!([""])),
        |n| line(n, "response_format", json!({"type": "yaml"})),
        |n| format!("{{\"custom_id\": \"deep-{n}\", \"body\": {}", "[".repeat(100_000)).into_bytes(),
        |n| completion(&id(n), json!({"prompt": "x", "n": 4097, "logprobs": 20})).to_string().into(),
        |n| completion(&id(n), json!({"prompt": "x", "max_tokens": -1})).to_string().into(),
        |n| completion(&id(n), json!({"prompt": "x", "max_tokens": 1e30})).to_string().into(),
        |n| completion(&id(n), json!({"prompt": [1, 1_099_511_627_776u64]})).to_string().into(),
        |n| completion(&id(n), json!({"prompt": [-5]})).to_string().into(),
        |n| completion(&id(n), json!({"prompt": "word ".repeat(100_000)})).to_string().into(),
        |n| completion(&id(n), json!({"prompt": {"text": "x"}})).to_string().into(),
        |n| {
            completion(&"long".repeat(50_000 + n), json!({"prompt": "x", "max_tokens": 1})).to_string().into()
        },
        |_| completion("normal-1", json!({"prompt": "x"})).to_string().into(),
        |n| {
            completion(&format!("\u{1b}[2J\u{7}{n}"), json!({"prompt": "\u{0}\u{1b}", "max_tokens": 1}))
                .to_string()
                .into()
        },
        |n| line(n, "temperature", json!("hot")),
        |n| line(n, "logit_bias", json!({"99999999": 100, "-1": 5})),
        |n| line(n, "bad_words", vec!["ab"; 20_000].into()),
        |n| line(n, "stop", vec!["ab"; 20_000].into()),
        |n| line(n, "allowed_token_ids", json!([])),
        |n| line(n, "prompt_logprobs", json!(1_000_000)),
        |n| line(n, "stream", json!(true)),
        |n| {
            json!({"custom_id": id(n), "method": "DELETE", "url": "/v1/completions", "body": {}})
                .to_string()
                .into()
        },
        |n| {
            json!({"custom_id": id(n), "method": "POST", "url": "/v1/embeddings", "body": {"input": "x"}})
                .to_string()
                .into()
        },
        |n| {
            json!({"custom_id": id(n), "method": "POST", "url": "/v1/chat/completions", "body": {"messages": "x"}}).to_string().into()
        },
        |_| b"[1, 2]".to_vec(),
        |_| b"null".to_vec(),
    ];
    kinds[number / 10 % kinds.len()](number)
}

fn id(number: usize) -> String {
    format!("hostile-{number}")
}

/// A short completion with one more field.
fn line(number: usize, field: &str, value: Value) -> Vec<u8> {
    let mut body = json!({"prompt": "x", "max_tokens": 4});
    body[field] = value;
    completion(&id(number), body).to_string().into_bytes()
}

/// Definitions, each of which refers to the next one.
fn schema_chain(length: usize, number: usize) -> Value {
    let definition = |i: usize| {
        let next = json!({"$ref": format!("#/$defs/d{}", i + 1)});
        (format!("d{i}"), json!({"type": "object", "properties": {"p": next}}))
    };
    let mut definitions: serde_json::Map<String, Value> = (0..length).map(definition).collect();
    definitions.insert(format!("d{length}"), json!({"const": number}));
    json!({"$ref": "#/$defs/d0", "$defs": definitions})
}

/// A chain in which each definition is a list or a choice.
fn schema_forks(length: usize, number: usize) -> Value {
    let definition = |i: usize| {
        let next = json!({"$ref": format!("#/$defs/d{}", i + 1)});
        (format!("d{i}"), json!({"anyOf": [{"type": "array", "items": next}, next, {"const": i}]}))
    };
    let mut definitions: serde_json::Map<String, Value> = (0..length).map(definition).collect();
    definitions.insert(format!("d{length}"), json!({"const": number}));
    json!({"$ref": "#/$defs/d0", "$defs": definitions})
}

fn nested_arrays(depth: usize, number: usize) -> Value {
    (0..depth).fold(json!({"const": number}), |inner, _| json!({"type": "array", "items": inner}))
}

fn lark_chain(length: usize, number: usize) -> String {
    let rules: String = (0..length).map(|i| format!("r{i}: \"a\" r{}\n", i + 1)).collect();
    format!("start: r0\n{rules}r{length}: \"{number}\"\n")
}

fn nested_groups(depth: usize) -> String {
    format!("{}a{}", "(".repeat(depth), ")".repeat(depth))
}
