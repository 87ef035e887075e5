//! Tests of the grammars of calls that begin with special tokens (Mistral and harmony): random walks under the masks
//! end in calls that the parsers read, with arguments of the schemas.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::output::{Function, Reasoning};
use super::{Constraint, Grammars, StructuredOutput};
use crate::chat::{Answer, AnswerForm, Begun, CallParser, ReasoningParser, Schemas};
use crate::tokenizer::Tokenizer;

const HARMONY: [&str; 7] =
    ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>"];
const MISTRAL: [&str; 3] = ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"];
const LIST: [&str; 1] = ["[TOOL_CALLS]"];
const MISTRAL_THAT_REASONS: [&str; 4] = ["[TOOL_CALLS]", "[ARGS]", "<think>", "</think>"];
/// A token that ends an answer.
const END: &str = "</s>";

/// Returns the tokenizer of gpt-oss-text with more special tokens.
fn tokenizer(special: &[&str]) -> Tokenizer {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/gpt-oss-text/tokenizer.json");
    let mut json: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let added = json["added_tokens"].as_array_mut().unwrap();
    for content in special.iter().chain([&END]) {
        let id = added.last().unwrap()["id"].as_u64().unwrap() + 1;
        added.push(
            json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true}),
        );
    }
    Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap()
}

/// Random numbers of a seed.
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % end
    }
}

/// Returns the schema of an argument, and a check of its values.
fn kind(number: usize) -> (Value, fn(&Value) -> bool) {
    match number {
        0 => (json!({"type": "integer", "minimum": -3, "maximum": 40}), |v| {
            v.as_i64().is_some_and(|n| (-3..=40).contains(&n))
        }),
        1 => (json!({"type": "string", "maxLength": 4}), |v| {
            v.as_str().is_some_and(|text| text.chars().count() <= 4)
        }),
        2 => (json!({"enum": ["<|call|>", "[ARGS]{", null]}), |v| {
            [json!("<|call|>"), json!("[ARGS]{"), json!(null)].contains(v)
        }),
        3 => (json!({"type": "array", "items": {"type": "boolean"}, "maxItems": 2}), |v| {
            v.as_array().is_some_and(|list| list.len() <= 2 && list.iter().all(Value::is_boolean))
        }),
        _ => (
            json!({"type": "object", "properties": {"in": {"const": 1}}, "required": ["in"],
                "additionalProperties": false}),
            |v| *v == json!({"in": 1}),
        ),
    }
}

/// Random functions, and the kinds of the arguments of each.
struct Tools {
    functions: Vec<Function>,
    kinds: Vec<Vec<(usize, bool)>>,
}

impl Tools {
    fn random(random: &mut Random) -> Self {
        let names = ["get_weather", "f", "a-b.c", "functions.g", "calls2"];
        let first = random.below(names.len());
        let count = 1 + random.below(3);
        let mut tools = Self { functions: Vec::new(), kinds: Vec::new() };
        for at in 0..count {
            let kinds: Vec<_> =
                (0..random.below(4)).map(|_| (random.below(5), random.below(2) == 0)).collect();
            let properties = (0..).zip(&kinds).map(|(i, (number, _))| (format!("a{i}"), kind(*number).0));
            let properties: Map<String, Value> = properties.collect();
            let required = (0..).zip(&kinds).filter(|(_, (_, required))| *required);
            let required: Vec<String> = required.map(|(i, _): (usize, _)| format!("a{i}")).collect();
            let parameters = json!({"type": "object", "properties": properties, "required": required,
                "additionalProperties": false});
            let name = names[(first + at) % names.len()].to_string();
            tools.functions.push(Function { name, parameters: parameters.to_string() });
            tools.kinds.push(kinds);
        }
        tools
    }

    fn check(&self, name: &str, arguments: &str) {
        let at = self.functions.iter().position(|function| function.name == name).unwrap();
        let arguments: Map<String, Value> = serde_json::from_str(arguments).unwrap();
        for (i, (number, required)) in self.kinds[at].iter().enumerate() {
            match arguments.get(&format!("a{i}")) {
                Some(value) => assert!(kind(*number).1(value), "{name} a{i} {value}"),
                None => assert!(!required, "{name} lacks a{i}: {arguments:?}"),
            }
        }
        assert!(arguments.len() <= self.kinds[at].len());
    }
}

/// A form of calls with a tokenizer, and perhaps reasoning before the calls.
struct Case {
    form: AnswerForm,
    tokenizer: Tokenizer,
    grammars: Grammars,
}

impl Case {
    fn new(calls: &str, reasoning: Option<&str>, special: &[&str]) -> Self {
        let reasoning = reasoning.map(|name| ReasoningParser::named(name).unwrap());
        let form = AnswerForm { reasoning, calls: CallParser::named(calls) };
        let tokenizer = tokenizer(special);
        Self { form, grammars: Grammars::new(tokenizer.clone()), tokenizer }
    }

    fn constraint(&self, functions: &[Function], parallel: bool) -> Constraint {
        let parser = self.form.calls.unwrap();
        let output = StructuredOutput::ToolCalls { parser, functions: functions.to_vec(), parallel };
        let reasoning = Reasoning::before(self.form, Begun::Nothing);
        Constraint::after_reasoning(reasoning, self.grammars.compile(&output).unwrap())
    }

    fn end(&self) -> u32 {
        self.tokenizer.token_to_id(END).unwrap()
    }

    /// Returns the ids that may follow, or none if the text is complete.
    fn next(&self, constraint: &mut Constraint, tokens: &[u32]) -> Vec<u32> {
        let end = [self.end()];
        let Some(mask) = constraint.mask(tokens, &end, &end).unwrap() else { return Vec::new() };
        let words = mask.words();
        (0..self.end() + 1).filter(|id| words[*id as usize / 32] >> (id % 32) & 1 == 1).collect()
    }

    /// Returns a random answer.
    fn walk(&self, constraint: &mut Constraint, random: &mut Random) -> Vec<u32> {
        let mut tokens = Vec::new();
        loop {
            let next = self.next(constraint, &tokens);
            if next.is_empty() || next.contains(&self.end()) && random.below(2) == 0 {
                return tokens;
            }
            let next: Vec<u32> = next.into_iter().filter(|id| *id != self.end()).collect();
            tokens.push(next[random.below(next.len())]);
            assert!(tokens.len() < 20_000, "the walk does not end");
            if constraint.is_complete(&tokens).unwrap() {
                return tokens;
            }
        }
    }

    fn text(&self, tokens: &[u32]) -> String {
        self.tokenizer.decode_with(tokens, false).unwrap()
    }

    /// Returns how many of the tokens of a text follow the grammar, the number of its tokens, and whether it is
    /// complete, or may be.
    fn follow(&self, functions: &[Function], parallel: bool, text: &str) -> (usize, usize, bool) {
        let mut constraint = self.constraint(functions, parallel);
        let tokens = self.tokenizer.encode(text).unwrap();
        let len =
            (0..tokens.len()).find(|n| !self.next(&mut constraint, &tokens[..*n]).contains(&tokens[*n]));
        let len = len.unwrap_or(tokens.len());
        let ends = |constraint: &mut Constraint| {
            constraint.is_complete(&tokens).unwrap() || self.next(constraint, &tokens).contains(&self.end())
        };
        (len, tokens.len(), len == tokens.len() && ends(&mut constraint))
    }

    fn takes(&self, functions: &[Function], parallel: bool, text: &str) -> bool {
        self.follow(functions, parallel, text).2
    }
}

#[test]
fn random_walks_end_in_calls_that_the_parser_reads() {
    let cases = [
        Case::new("openai", None, &HARMONY),
        Case::new("openai", Some("openai_gptoss"), &HARMONY),
        Case::new("mistral", None, &MISTRAL),
        Case::new("mistral", None, &LIST),
        Case::new("mistral", Some("qwen3"), &MISTRAL_THAT_REASONS),
    ];
    for (number, case) in cases.iter().enumerate() {
        let mut several = 0;
        let mut reasoned = 0;
        for seed in 0..40 {
            let random = &mut Random::new(seed * 10 + number as u64);
            let tools = Tools::random(random);
            let parallel = seed % 2 == 0;
            let mut constraint = case.constraint(&tools.functions, parallel);
            let text = case.text(&case.walk(&mut constraint, random));
            let answer = Answer::of(&text, case.form, Begun::Nothing, Schemas::default());
            assert_eq!(answer.text, "", "{text}");
            assert!(!answer.calls.is_empty(), "{text}");
            answer.calls.iter().for_each(|call| tools.check(&call.name, &call.arguments));
            let single = !parallel || case.form.calls.unwrap().is_channel();
            assert!(!single || answer.calls.len() == 1, "{text}");
            several += usize::from(answer.calls.len() > 1);
            reasoned += usize::from(answer.reasoning.is_some());
        }
        assert_eq!(several > 0, !case.form.calls.unwrap().is_channel(), "case {number}");
        assert_eq!(reasoned > 0, case.form.reasoning.is_some(), "case {number}");
    }
}

fn functions() -> Vec<Function> {
    let x = json!({"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"],
        "additionalProperties": false});
    vec![
        Function { name: "f".into(), parameters: x.to_string() },
        Function { name: "g".into(), parameters: json!({"type": "object"}).to_string() },
    ]
}

#[test]
fn calls_of_harmony_come_after_messages_of_reasoning() {
    let call = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"x\":12}";
    let thought = "<|channel|>analysis<|message|>Hm, [] \u{e4}<|end|><|start|>assistant";
    let plain = Case::new("openai", None, &HARMONY);
    let reasons = Case::new("openai", Some("openai_gptoss"), &HARMONY);
    for parallel in [false, true] {
        assert!(plain.takes(&functions(), parallel, call) && reasons.takes(&functions(), parallel, call));
        assert!(!plain.takes(&functions(), parallel, &format!("{call}<|call|>")), "the call ends the text");
        assert!(!plain.takes(&functions(), parallel, &format!("{thought}{call}")));
        assert!(reasons.takes(&functions(), parallel, &format!("{thought}{call}")));
        assert!(reasons.takes(&functions(), parallel, &format!("{thought}{thought}{call}")));
    }
    let wrong = [
        call.replace("12", "\"12\""),
        call.replace("functions.f", "functions.h"),
        call.replace("commentary", "final"),
        call.replace(" to=functions.f <|constrain|>json", ""),
        format!("{thought}<|channel|>final<|message|>Hi"),
        format!(
            "<|channel|>analysis<|message|>Hm<|channel|>final<|message|>Hi<|end|><|start|>assistant{call}"
        ),
        format!("<|channel|>analysis<|message|>Hm<|call|>{call}"),
        "Hi".into(),
    ];
    for text in wrong {
        let (len, all, _) = reasons.follow(&functions(), false, &text);
        assert!(len < all, "{text}");
    }
    let tokens = plain.tokenizer.encode(call).unwrap();
    let tags = ["<|channel|>", "<|constrain|>", "<|message|>"].map(|tag| plain.tokenizer.token_to_id(tag));
    assert!(tags.iter().all(|tag| tokens.contains(&tag.unwrap())), "the tags are tokens");
}

/// The prompt may have opened the message of reasoning.
#[test]
fn reasoning_that_the_prompt_has_begun_goes_on() {
    let case = Case::new("openai", Some("openai_gptoss"), &HARMONY);
    let parser = case.form.calls.unwrap();
    let output = StructuredOutput::ToolCalls { parser, functions: functions(), parallel: false };
    let reasoning = Reasoning::before(case.form, Begun::Reasoning);
    let mut constraint = Constraint::after_reasoning(reasoning, case.grammars.compile(&output).unwrap());
    let text =
        "Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.g <|constrain|>json<|message|>{}";
    let tokens = case.tokenizer.encode(text).unwrap();
    for at in 0..tokens.len() {
        assert!(case.next(&mut constraint, &tokens[..at]).contains(&tokens[at]), "{at} of {text}");
    }
    assert!(constraint.is_complete(&tokens).unwrap());
}

#[test]
fn calls_of_mistral_have_the_form_of_the_tokenizer() {
    let named = Case::new("mistral", None, &MISTRAL);
    let list = Case::new("mistral", None, &LIST);
    let f = "[TOOL_CALLS]f[ARGS]{\"x\":12}";
    let objects = "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"x\":12}}]";
    let two =
        "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"x\":12}}, {\"name\": \"g\", \"arguments\": {}}]";
    assert!(named.takes(&functions(), false, f) && named.takes(&functions(), true, f));
    assert!(named.takes(&functions(), true, &format!("{f}[TOOL_CALLS]g[ARGS]{{}}")));
    assert!(!named.takes(&functions(), false, &format!("{f}[TOOL_CALLS]g[ARGS]{{}}")));
    assert!(!named.takes(&functions(), true, objects) && !list.takes(&functions(), true, f));
    assert!(list.takes(&functions(), false, objects) && list.takes(&functions(), true, two));
    assert!(!list.takes(&functions(), false, two));
    for text in [f.replace("12", "true"), f.replace("]f[", "]h["), "Hi".into(), "[TOOL".into()] {
        let (len, all, _) = named.follow(&functions(), true, &text);
        assert!(len < all, "{text}");
    }
}

#[test]
fn a_tokenizer_without_the_tokens_is_refused() {
    let of = |form: &str, name: &str, special: &[&str]| {
        let functions = vec![Function { name: name.into(), parameters: "{}".into() }];
        let parser = CallParser::named(form).unwrap();
        let output = StructuredOutput::ToolCalls { parser, functions, parallel: true };
        assert!(output.check(None).is_ok(), "without a tokenizer nothing is known");
        output.check(Some(&tokenizer(special))).err().map(|error| error.to_string()).unwrap_or_default()
    };
    let lacks = |tag: &str| format!("the tokenizer has no token {tag:?}");
    assert!(of("mistral", "f", &[]).contains(&lacks("[TOOL_CALLS]")));
    assert!(of("openai", "f", &[]).contains(&lacks("<|channel|>")));
    assert!(of("openai", "f", &["<|channel|>", "<|message|>"]).contains(&lacks("<|constrain|>")));
    assert_eq!(of("openai", "f", &HARMONY) + &of("mistral", "f", &MISTRAL), "");
    assert!(of("openai", "a b", &HARMONY).contains("cannot write this name"));
    assert!(of("mistral", "a{b", &MISTRAL).contains("cannot write this name"));
    assert_eq!(of("mistral", "a{b", &LIST), "", "a list holds any name");
}
