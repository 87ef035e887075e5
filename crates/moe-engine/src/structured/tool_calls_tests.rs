//! Tests of the grammars of tool calls: what they allow, and that it can be read back.

use serde_json::json;

use super::output::Function;
use super::{Constraint, Grammars, StructuredOutput};
use crate::chat::{Answer, AnswerForm, Begun, CallParser, Schemas, ToolCall};
use crate::tokenizer::Tokenizer;

fn functions() -> Vec<Function> {
    let function = |name: &str, parameters: serde_json::Value| Function {
        name: name.into(),
        parameters: parameters.to_string(),
    };
    let x = json!({"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"],
        "additionalProperties": false});
    vec![function("f", x), function("say \"hi\"", json!({"type": "object"}))]
}

/// Returns how much of a text follows the grammar, whether it is complete, and whether it may be complete.
fn follow(parallel: bool, text: &str) -> (usize, bool, bool) {
    follow_calls(functions(), parallel, text)
}

fn follow_calls(functions: Vec<Function>, parallel: bool, text: &str) -> (usize, bool, bool) {
    follow_form("hermes", functions, parallel, text)
}

fn follow_form(form: &str, functions: Vec<Function>, parallel: bool, text: &str) -> (usize, bool, bool) {
    let parser = CallParser::named(form).unwrap();
    let tokenizer = Tokenizer::bytes().unwrap();
    let output = StructuredOutput::ToolCalls { parser, functions, parallel };
    let mut constraint = Constraint::new(Grammars::new(tokenizer.clone()).compile(&output).unwrap());
    let tokens = tokenizer.encode(text).unwrap();
    let end = 5_000;
    let mut fits = |n: usize, id: u32| match constraint.mask(&tokens[..n], &[end], &[]).unwrap() {
        Some(mask) => mask.words().get(id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 1),
        None => false,
    };
    let len = (0..tokens.len()).find(|&n| !fits(n, tokens[n])).unwrap_or(tokens.len());
    let may_end = len == tokens.len() && fits(len, end);
    let complete = len == tokens.len() && constraint.is_complete(&tokens).unwrap();
    (len, complete, may_end)
}

#[test]
fn calls_follow_the_schemas_of_their_functions() {
    let f = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 12}}\n</tool_call>";
    let g = "<tool_call>\n{\"name\": \"say \\\"hi\\\"\", \"arguments\": {\"a\": [1]}}\n</tool_call>";
    assert_eq!(follow(false, f), (f.len(), true, false), "one call, and nothing after it it");
    assert_eq!(follow(true, f), (f.len(), false, true));
    let both = format!("{g}\n{f}");
    assert_eq!(follow(true, &both), (both.len(), false, true));
    assert_eq!(follow(false, g).0, g.len());
    let wrong = f.replace("12", "\"12\"");
    assert_eq!(follow(true, &wrong).0, f.find("12").unwrap());
    assert_eq!(follow(true, &f.replace("\"f\"", "\"h\"")).0, f.find("f\"").unwrap());
    assert_eq!(follow(true, "Hi").0, 0);
}

/// Arguments have the guarantees of structured output: numbers are exact, and each function has definitions of its
/// own.
#[test]
fn arguments_are_as_exact_as_structured_output() {
    let bounded = json!({"$defs": {"x": {"type": "number", "exclusiveMinimum": 5, "exclusiveMaximum": 5.5}},
        "type": "object", "properties": {"x": {"$ref": "#/$defs/x"}}, "required": ["x"],
        "additionalProperties": false});
    let large = json!({"$defs": {"x": {"enum": [9_007_199_254_740_993_u64]}},
        "type": "object", "properties": {"x": {"$ref": "#/$defs/x"}}, "required": ["x"],
        "additionalProperties": false});
    let functions = vec![
        Function { name: "f".into(), parameters: bounded.to_string() },
        Function { name: "fg".into(), parameters: large.to_string() },
    ];
    let call = |name: &str, x: &str| {
        format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {{\"x\": {x}}}}}\n</tool_call>")
    };
    let takes = |text: &str| follow_calls(functions.clone(), false, text).1;
    assert!(takes(&call("f", "5.25")) && takes(&call("fg", "9007199254740993")));
    for (name, x) in [("f", "5"), ("f", "5.5"), ("fg", "9007199254740992"), ("fg", "5.25")] {
        assert!(!takes(&call(name, x)), "{name} {x}");
    }
}

/// Returns the reason why these functions are refused, or nothing.
fn refusal(form: &str, functions: &[Function]) -> String {
    let parser = CallParser::named(form).unwrap();
    let output = StructuredOutput::ToolCalls { parser, functions: functions.to_vec(), parallel: true };
    output.check(Some(&Tokenizer::bytes().unwrap())).err().map(|error| error.reason).unwrap_or_default()
}

#[test]
fn what_is_wrong_names_the_function() {
    let wrong = [Function { name: "f".into(), parameters: "5".into() }];
    let error = refusal("hermes", &wrong);
    assert_eq!(error, "the parameters of the function \"f\": expected a JSON object, got 5");
    assert_eq!(refusal("hermes", &[]), "expected at least one function");
}

/// Texts that the grammar of a form allows can be read by the form's parser.
#[test]
fn forms_with_json_arguments_have_their_grammar() {
    let mut functions = functions();
    functions[1].name = "g".into();
    let arguments = [("f", r#"{"x":12}"#), ("g", r#"{"a":[1]}"#), ("f", r#"{"x":3}"#)];
    let calls = arguments.map(|(name, arguments)| ToolCall::new(name, arguments));
    for form in ["hermes", "ernie45", "deepseek_v3", "deepseek_v31", "kimi_k2"] {
        let parser = CallParser::named(form).unwrap();
        // The grammar writes a blank after the colons of its own JSON.
        let text = parser
            .write(&calls)
            .replace("\"name\":", "\"name\": ")
            .replace(",\"arguments\":", ", \"arguments\": ");
        let (len, complete, may_end) = follow_form(form, functions.clone(), true, &text);
        assert_eq!(&text[..len], text, "{form}");
        assert!(complete || may_end, "{form}");
        let wrong = text.replace("12", "true");
        assert_eq!(
            follow_form(form, functions.clone(), true, &wrong).0,
            wrong.find("true").unwrap(),
            "{form}"
        );
        let answer = AnswerForm { reasoning: None, calls: Some(parser) };
        let read = Answer::of(&text, answer, Begun::Nothing, Schemas::default()).calls;
        assert_eq!(
            read.iter().map(|call| &call.arguments).collect::<Vec<_>>(),
            arguments.map(|(_, json)| json)
        );
    }
}

/// Arguments in tags: what the grammar allows is read back as what the schema allows.
#[test]
fn arguments_in_tags_follow_their_schemas() {
    let schema = json!({"$defs": {"n": {"type": "integer", "minimum": 3, "maximum": 40}},
        "type": "object", "required": ["s", "n"], "properties": {
            "s": {"type": "string"}, "n": {"$ref": "#/$defs/n"},
            "short": {"type": "string", "maxLength": 3}, "one": {"enum": ["1", "two"]},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": null},
            "list": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
            "yes": {"type": "boolean"}, "any": {}}});
    let functions = vec![Function { name: "f".into(), parameters: schema.to_string() }];
    let validator = |arguments: &str| {
        let value: serde_json::Value = serde_json::from_str(arguments).unwrap();
        let whole = value["n"].as_i64().is_some_and(|n| (3..=40).contains(&n)) && value["s"].is_string();
        let short = value.get("short").is_none_or(|s| s.as_str().is_some_and(|s| s.chars().count() <= 3));
        let one = value.get("one").is_none_or(|one| one == "1" || one == "two");
        let list = value.get("list").is_none_or(|l| l.as_array().is_some_and(|l| l.len() <= 2));
        whole && short && one && list
    };
    let right = [
        json!({"s": "5", "n": 3}),
        json!({"s": "", "n": 40, "yes": true}),
        json!({"s": "a </tool_call> <b>\n", "n": 7, "short": "a\n", "one": "1"}),
        json!({"s": "[1]", "n": 7, "maybe": null, "list": [1, 2], "any": {"x": ["\"y\""]}}),
        json!({"s": "\u{e4}", "n": 7, "maybe": "5", "any": "5 apples"}),
        json!({"s": " x", "n": 7, "any": 1.5}),
    ];
    let wrong = [
        json!({"n": 3}),
        json!({"s": "x", "n": 2}),
        json!({"s": "x", "n": "three"}),
        json!({"s": "x", "n": 3, "short": "abcd"}),
        json!({"s": "x", "n": 3, "short": "  a "}),
        json!({"s": "x", "n": 3, "one": 1.0}),
        json!({"s": "x", "n": 3, "list": [1, 2, 3]}),
        json!({"s": "x", "n": 3, "yes": "true."}),
        json!({"s": "x", "n": 3, "unknown": 1}),
    ];
    for form in ["glm45", "qwen3_coder", "minimax_m2"] {
        let parser = CallParser::named(form).unwrap();
        let write = |arguments: &serde_json::Value| {
            // The members in the order of the schema, which `json!` does not keep.
            let order = ["s", "n", "short", "one", "maybe", "list", "yes", "any", "unknown"];
            let members: Vec<String> = order
                .iter()
                .filter_map(|name| Some(format!("{}:{}", json!(name), arguments.get(name)?)))
                .collect();
            parser.write(&[ToolCall::new("f", format!("{{{}}}", members.join(",")))])
        };
        for arguments in &right {
            let text = write(arguments);
            let (len, complete, may_end) = follow_form(form, functions.clone(), true, &text);
            assert_eq!(&text[..len], text, "{form} {arguments}");
            assert!(complete || may_end, "{form} {text}");
            let answer = AnswerForm { reasoning: None, calls: Some(parser) };
            let schemas = Schemas::new([("f", &functions[0].parameters[..])]);
            let read = Answer::of(&text, answer, Begun::Nothing, schemas).calls;
            let value: serde_json::Value = serde_json::from_str(&read[0].arguments).unwrap();
            assert_eq!(value, *arguments, "{form}");
            assert!(validator(&read[0].arguments), "{form} {arguments}");
        }
        for arguments in &wrong {
            let text = write(arguments);
            assert!(follow_form(form, functions.clone(), true, &text).0 < text.len(), "{form} {arguments}");
        }
        let none = vec![Function { name: "g".into(), parameters: json!({"type": "object"}).to_string() }];
        let text = parser.write(&[ToolCall::new("g", "{}")]);
        assert!(follow_form(form, none, false, &text).1, "{form}");
    }
}

#[test]
fn what_no_tags_can_hold_is_refused() {
    let of = |name: &str, parameters: serde_json::Value| {
        let function = Function { name: name.into(), parameters: parameters.to_string() };
        refusal("glm45", &[function])
    };
    assert!(of("a b", json!({})).contains("cannot write this name"));
    let member = |name: &str, schema: serde_json::Value| {
        of("f", json!({"type": "object", "properties": {name: schema}}))
    };
    assert!(member(" x", json!({})).contains("cannot have this name"));
    let either = json!({"anyOf": [{"type": "string", "maxLength": 2}, {"type": "array"}]});
    assert!(member("x", either).contains("x: strings with conditions next to lists"));
    assert!(of("f", json!({"type": "object", "minProperties": 1})).contains("minProperties"));
    let two = json!({"anyOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]});
    assert!(of("f", two).contains("without alternatives"));
}
