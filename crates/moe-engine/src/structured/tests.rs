//! Tests of masks with small tokenizers: which tokens are allowed, and whether random walks under the masks end in a
//! valid text.

use std::time::{Duration, Instant};

use llguidance::toktrie::TokTrie;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::vocabulary::token_bytes;
use super::*;
use crate::tokenizer::Tokenizer;

/// Returns a tokenizer of every byte, of some tokens of several bytes as in a byte-pair encoding, and of two added
/// tokens: `<think>` is an ordinary one, and `<|end|>` is a special one whose text would fit into any string.
pub(super) fn tokenizer() -> Tokenizer {
    let bytes = Tokenizer::bytes().unwrap();
    let mut vocab: serde_json::Map<String, Value> =
        bytes.library.get_vocab(true).into_iter().map(|(token, id)| (token, id.into())).collect();
    let more = ["{\"", "\":", "\":\"", "Ġ\"", "true", "Ġt", "er", "],", "\"}", "Ċ", "ĊĠĠ", "12", "Ã©"];
    for token in more {
        let id = vocab.len();
        vocab.entry(token).or_insert(id.into());
    }
    let added = |id: usize, content: &str, special: bool| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": special})
    };
    let added = [added(vocab.len(), "<think>", false), added(vocab.len() + 1, "<|end|>", true)];
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
    let json = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []},
    });
    Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap()
}

fn schema(value: Value) -> StructuredOutput {
    StructuredOutput::JsonSchema(value.to_string())
}

fn refused(output: &StructuredOutput) -> String {
    output.check(Some(&tokenizer())).unwrap_err().to_string()
}

/// Returns the texts of the tokens that may follow `before`, and whether the text may end there.
fn next(t: &Tokenizer, output: &StructuredOutput, before: &str) -> (Vec<String>, bool) {
    let end = t.token_to_id("<|end|>").unwrap();
    let mut constraint = Constraint::new(Grammars::new(t.clone()).compile(output).unwrap());
    let Some(mask) = constraint.mask(&t.encode(before).unwrap(), &[end], &[end]).unwrap() else {
        return (Vec::new(), true);
    };
    let ids = ids(&mask);
    let texts = ids.iter().filter(|&&id| id != end).map(|&id| t.decode_with(&[id], false).unwrap());
    (texts.collect(), ids.contains(&end))
}

fn ids(mask: &Mask) -> Vec<u32> {
    let set = |i: &u32| mask.words()[*i as usize / 32] >> (i % 32) & 1 == 1;
    (0..mask.words().len() as u32 * 32).filter(set).collect()
}

#[test]
fn tokens_have_the_bytes_of_their_text() {
    let t = tokenizer();
    let words = token_bytes(&t).unwrap();
    let of = |token: &str| words[t.token_to_id(token).unwrap() as usize].clone();
    assert_eq!((of("Ġ\""), of("ĊĠĠ"), of("Ã©")), (b" \"".to_vec(), b"\n  ".to_vec(), "é".into()));
    assert_eq!(of("<think>"), b"<think>");
    assert_eq!(of("<|end|>")[0], TokTrie::SPECIAL_TOKEN_MARKER);
    // Each of the 256 bytes exists exactly once.
    let mut single: Vec<u8> = words.iter().filter(|word| word.len() == 1).map(|word| word[0]).collect();
    single.sort_unstable();
    single.dedup();
    assert_eq!(single.len(), 256);
}

/// Returns a tokenizer like Llama's: one character stands for a space, and bytes without a piece of their own are
/// written as `<0x0A>`.
fn pieces() -> Tokenizer {
    let texts = ["<unk>", "▁", "▁ab", "a", "{", "}", "\"", ":"].map(String::from);
    let texts = texts.into_iter().chain((0..=255).map(|byte| format!("<0x{byte:02X}>")));
    let vocab: Vec<(String, f64)> = texts.map(|text| (text, 0.0)).collect();
    let decoder = json!({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]});
    let json = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": null, "post_processor": null, "decoder": decoder,
        "model": {"type": "Unigram", "unk_id": 0, "vocab": vocab, "byte_fallback": true},
    });
    Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap()
}

#[test]
fn tokens_of_pieces_have_bytes_too() {
    let t = pieces();
    let words = token_bytes(&t).unwrap();
    let of = |token: &str| words[t.token_to_id(token).unwrap() as usize].clone();
    assert_eq!((of("▁ab"), of("<0x0A>"), of("<0xC3>")), (b" ab".to_vec(), vec![b'\n'], vec![0xC3]));
    // The character é is not a piece, but its two bytes are.
    let mut constraint =
        Constraint::new(Grammars::new(t.clone()).compile(&StructuredOutput::Regex("a aé".into())).unwrap());
    let id = |token: &str| t.token_to_id(token).unwrap();
    let text = ["a", "▁", "a", "<0xC3>", "<0xA9>"].map(id);
    let next =
        |constraint: &mut Constraint, n: usize| ids(&constraint.mask(&text[..n], &[], &[]).unwrap().unwrap());
    assert_eq!(next(&mut constraint, 1), [id("▁"), id("<0x20>")]);
    assert_eq!(next(&mut constraint, 3), [id("<0xC3>")]);
    assert_eq!(next(&mut constraint, 4), [id("<0xA9>")]);
    assert!(constraint.is_complete(&text).unwrap());
}

#[test]
fn masks_are_what_the_text_may_go_on_with() {
    let t = tokenizer();
    let choice = StructuredOutput::Choice(vec!["true".into(), "tea.*?".into(), "x/\\\"y".into()]);
    assert_eq!(next(&t, &choice, ""), (vec!["t".into(), "x".into(), "true".into()], false));
    assert_eq!(next(&t, &choice, "te"), (vec!["a".into()], false));
    assert_eq!(next(&t, &choice, "tea"), (vec![".".into()], false), "a choice is no expression");
    assert_eq!(next(&t, &choice, "x/\\"), (vec!["\"".into()], false));
    assert_eq!(next(&t, &choice, "true"), (vec![], true));
    let regex = StructuredOutput::Regex("a(b|12)+".into());
    assert_eq!(next(&t, &regex, "ab"), (vec!["1".into(), "b".into(), "12".into()], true));
    assert_eq!(next(&t, &regex, "a1"), (vec!["2".into()], false));
    // Unicode digits begin with a byte above 127.
    let digit = StructuredOutput::Regex(r"\d-[\w]".into());
    assert_eq!(next(&t, &digit, "").0.len(), 10);
    assert!(next(&t, &digit, "1-").0.iter().all(|text| text.is_ascii()));
    let lark = StructuredOutput::Grammar("start: \"(\" start \")\" | \"x\"".into());
    assert_eq!(next(&t, &lark, "((x"), (vec![")".into()], false));
    assert_eq!(next(&t, &StructuredOutput::JsonObject, "").0, ["{", "{\""]);
}

#[test]
fn special_tokens_are_no_text() {
    let t = tokenizer();
    let (texts, may_end) = next(&t, &schema(json!({"type": "string"})), "\"a");
    assert!(texts.contains(&"<think>".to_string()) && texts.contains(&"er".to_string()));
    assert!(!texts.iter().any(|text| text.contains("<|")) && !may_end, "{texts:?}");
    // A grammar may name special tokens.
    let named = StructuredOutput::Grammar("start: \"a\" <|end|>".into());
    assert_eq!(next(&t, &named, "a"), (vec![], true));
    assert!(
        refused(&StructuredOutput::Grammar("start: <|no such|>".into()))
            .contains("the grammar cannot be used")
    );
}

#[test]
fn white_space_is_one_blank_unless_the_schema_says_otherwise() {
    let t = tokenizer();
    let mut list = json!({"type": "array", "items": {"type": "null"}});
    let blanks = |list: &Value, before: &str| -> Vec<String> {
        let texts = next(&t, &schema(list.clone()), before).0;
        texts.into_iter().filter(|text| text.trim().is_empty()).collect()
    };
    assert_eq!(blanks(&list, "["), [" "]);
    assert!(blanks(&list, "[ ").is_empty());
    list["x-guidance"] = json!({"whitespace_pattern": "[ \n]+"});
    assert_eq!(blanks(&list, "[ "), ["\n", " ", "\n  "]);
    list["x-guidance"] = json!({"whitespace_flexible": false});
    assert!(blanks(&list, "[").is_empty());
}

#[test]
fn a_text_that_is_complete_has_no_mask() {
    let t = tokenizer();
    let output = StructuredOutput::Regex("ab?".into());
    let grammars = Grammars::new(t.clone());
    let mut constraint = Constraint::new(grammars.compile(&output).unwrap());
    let text = t.encode("ab").unwrap();
    assert!(!constraint.is_complete(&text[..1]).unwrap());
    assert!(constraint.mask(&text[..1], &[], &[]).unwrap().is_some());
    assert!(constraint.is_complete(&text).unwrap());
    assert!(constraint.mask(&text, &[], &[]).unwrap().is_none());
    // The tokens after a complete text do not matter.
    assert!(constraint.is_complete(&[&text[..], &[0]].concat()).unwrap());
    // A token that does not follow the grammar is an error of this choice only.
    let mut other = Constraint::new(grammars.compile(&output).unwrap());
    assert!(other.mask(&t.encode("x").unwrap(), &[], &[]).is_err());
    let mut third = Constraint::new(grammars.compile(&output).unwrap());
    assert!(third.mask(&text[..1], &[], &[]).unwrap().is_some());
}

#[test]
fn an_end_that_is_an_ordinary_token_waits_for_the_end() {
    let t = tokenizer();
    let output = StructuredOutput::Regex("a+b".into());
    let a = t.encode("a").unwrap();
    let mut constraint = Constraint::new(Grammars::new(t.clone()).compile(&output).unwrap());
    let mut mask = |only_there: &[u32]| ids(&constraint.mask(&a, &a, only_there).unwrap().unwrap());
    assert_eq!(mask(&[]), t.encode("ab").unwrap());
    assert_eq!(mask(&a), t.encode("b").unwrap());
    // The id is larger than all ids of the tokenizer, as in models with a larger vocabulary.
    let optional = StructuredOutput::Regex("a+".into());
    let mut constraint = Constraint::new(Grammars::new(t.clone()).compile(&optional).unwrap());
    assert_eq!(ids(&constraint.mask(&a, &[5000], &[5000]).unwrap().unwrap()), [a[0], 5000]);
}

#[test]
fn what_cannot_be_used_is_refused_with_the_reason() {
    let regex = |text: &str| StructuredOutput::Regex(text.into());
    let cases = [
        (StructuredOutput::JsonSchema("{".into()), "the JSON schema cannot be used: it is not JSON"),
        (StructuredOutput::JsonSchema("5".into()), "expected a JSON object, got 5"),
        (StructuredOutput::JsonSchema("false".into()), "allows no text"),
        (schema(json!({"type": "wat"})), "Invalid type: wat"),
        (schema(json!({"not": {}})), "\"not\""),
        (schema(json!({"type": "string", "minLength": -1})), "minLength: expected an integer from 0, got -1"),
        (schema(json!({"type": "integer", "minimum": 5, "maximum": 3})), "allows no text"),
        (schema(json!({"$ref": "#/$defs/a"})), "not found"),
        (schema(json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}})), "allows no text"),
        (schema(json!({"x-guidance": 5})), "the JSON schema cannot be used"),
        (regex("a(b"), "unclosed group"),
        (regex("(?=a)b"), "look-around"),
        (regex(""), "it is empty"),
        (StructuredOutput::Choice(vec![]), "the list of choices cannot be used: expected at least one text"),
        (StructuredOutput::Choice(vec!["a".into(), String::new()]), "none that is empty"),
        (StructuredOutput::Grammar("start: X".into()), "unknown name: \"X\""),
        (StructuredOutput::Grammar(String::new()), "no start rule"),
        (StructuredOutput::Grammar("start: \"\"".into()), "allows no text but the empty one"),
    ];
    for (output, want) in cases {
        let error = refused(&output);
        assert!(error.contains(want) && !error.contains("backtrace"), "{output:?}: {error}");
    }
    let words = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": null, "decoder": null, "post_processor": null,
        "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
    });
    let words = Tokenizer::from_bytes(words.to_string().as_bytes()).unwrap();
    let error = StructuredOutput::JsonObject.check(Some(&words)).unwrap_err().to_string();
    assert!(error.contains("needs a tokenizer whose tokens are bytes"), "{error}");
}

/// A request that would take all time or memory becomes an error after a short time.
#[test]
fn hostile_requests_are_bounded() {
    let begin = Instant::now();
    let mut nested = json!({"type": "object"});
    for i in 0..30 {
        let either =
            json!({"anyOf": [{"properties": {format!("p{i}"): {}}}, {"properties": {format!("q{i}"): {}}}]});
        nested = json!({"allOf": [nested, either]});
    }
    assert!(refused(&schema(nested)).contains("too large"));
    let deep = format!("start: {}\"a\"{}", "(".repeat(100_000), ")".repeat(100_000));
    assert!(refused(&StructuredOutput::Grammar(deep)).contains("rules and groups, and at most 30000"));
    assert!(refused(&StructuredOutput::Regex("a".repeat(2 << 20))).contains("at most 1048576 are taken"));
    // The schemas are as large as the limits allow. Each is accepted or refused after a short time.
    let names = |n: usize| (0..n).map(|i| format!("name {i}")).collect::<Vec<_>>();
    let properties: serde_json::Map<_, _> =
        names(20_000).into_iter().map(|name| (name, json!({"type": "string"}))).collect();
    let pattern =
        json!({"type": "string", "pattern": "(a{1,900}){1,900}", "minLength": 100, "maxLength": 1_000_000});
    let cases = [
        (StructuredOutput::Choice(names(60_000)), None),
        (schema(json!({"enum": names(60_000)})), None),
        (schema(json!({"type": "array", "minItems": 1_000_000, "items": {"type": "null"}})), None),
        (StructuredOutput::Regex("(a|b)*a(a|b){900}".into()), None),
        (StructuredOutput::Regex("(x+x+)+y".repeat(100_000)), Some("too big")),
        (schema(json!({"type": "object", "properties": properties})), Some("schema is too large")),
        (schema(pattern), None),
        // llguidance panics for this input.
        (
            StructuredOutput::Grammar(format!("start: {}", "\"a\"? ".repeat(150_000))),
            Some("llguidance gave up on it ("),
        ),
    ];
    for (output, want) in cases {
        let got = output.check(Some(&tokenizer())).map_err(|e| e.reason);
        match want {
            None => assert_eq!(got, Ok(()), "{}", output.what()),
            // On a busy machine the time limit may refuse the request before the other limit does.
            Some(want) => {
                let is_refused = |e: &String| e.contains(want) || e.contains("compiling it takes more than");
                assert!(got.as_ref().is_err_and(is_refused), "{want}: {got:?}");
            }
        }
    }
    // Each mask has a limit, too. The choice fails where the expression becomes too complex.
    let t = tokenizer();
    let repeats = "((([a-z]{1,1000}){1,1000}){1,1000}){1,1000}";
    let grammar = Grammars::new(t.clone()).compile(&StructuredOutput::Regex(repeats.into())).unwrap();
    let mut constraint = Constraint::new(grammar);
    let text = t.encode(&"ab".repeat(30)).unwrap();
    let failed = (0..text.len()).find_map(|n| {
        assert_ne!(constraint.is_complete(&text[..n]), Ok(true), "a limit is no end");
        constraint.mask(&text[..n], &[], &[]).err()
    });
    assert_eq!(failed.as_deref(), Some("lexer error: too many expressions constructed"));
    assert!(begin.elapsed() < Duration::from_secs(60), "{:?}", begin.elapsed());
}

#[test]
fn a_grammar_is_compiled_once_and_few_are_kept() {
    let grammars = Grammars::new(tokenizer());
    let regex = |i: usize| StructuredOutput::Regex(format!("a{{{}}}", i + 1));
    let first = grammars.compile(&regex(0)).unwrap();
    assert!(std::sync::Arc::ptr_eq(&first, &grammars.compile(&regex(0)).unwrap()));
    for i in 0..100 {
        grammars.compile(&regex(i)).unwrap();
        assert!(std::sync::Arc::ptr_eq(&first, &grammars.compile(&regex(0)).unwrap()), "it is in use");
    }
    assert_eq!(grammars.kept(), 32);
    assert!(grammars.compile(&StructuredOutput::Regex("(".into())).is_err());
    assert_eq!(grammars.kept(), 32);
}

type Check = fn(&Value) -> bool;

/// Returns schemas whose texts are short, each with a check of its own.
fn schemas() -> Vec<(Value, Check)> {
    // `-0` is an integer of JSON that serde_json reads as a float.
    fn integer(v: &Value, low: i64, high: i64) -> bool {
        v.as_f64().is_some_and(|n| n.fract() == 0.0 && (low as f64..=high as f64).contains(&n))
    }
    fn text(v: &Value, most: usize) -> bool {
        v.as_str().is_some_and(|text| text.chars().count() <= most)
    }
    vec![
        (json!({"type": "integer", "minimum": -12, "maximum": 345}), |v| integer(v, -12, 345)),
        (json!({"enum": ["a\"b", "é", 5, null, true]}), |v| {
            [json!("a\"b"), json!("é"), json!(5), json!(null), json!(true)].contains(v)
        }),
        (json!({"type": "string", "minLength": 2, "maxLength": 6}), |v| text(v, 6) && !text(v, 1)),
        (json!({"type": "string", "pattern": "^[a-f]{2}-[0-9]+x$", "maxLength": 12}), |v| {
            let parts = v.as_str().and_then(|s| s.strip_suffix('x')?.split_once('-'));
            parts.is_some_and(|(a, b)| {
                a.len() == 2 && a.chars().all(|c| ('a'..='f').contains(&c)) && b.parse::<u64>().is_ok()
            })
        }),
        (
            json!({"type": "array", "minItems": 1, "maxItems": 3, "items": {"$ref": "#/$defs/point"}, "$defs": {"point": {
                "type": "object", "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}, "on": {"type": "boolean"}},
                "required": ["x"], "additionalProperties": false}}}),
            |v| {
                let point = |p: &Value| {
                    let known = p.as_object().is_some_and(|p| p.keys().all(|k| k == "x" || k == "on"));
                    known && integer(&p["x"], 0, 9) && (p["on"].is_null() || p["on"].is_boolean())
                };
                v.as_array().is_some_and(|list| (1..=3).contains(&list.len()) && list.iter().all(point))
            },
        ),
        (
            json!({"anyOf": [{"type": "null"}, {"type": "object", "properties": {"name": {"type": "string", "maxLength": 4},
                "tags": {"type": "array", "maxItems": 2, "items": {"enum": ["r", "g"]}}}, "required": ["name", "tags"],
                "additionalProperties": false}]}),
            |v| {
                let tags = v["tags"].as_array();
                v.is_null()
                    || text(&v["name"], 4)
                        && tags
                            .is_some_and(|tags| tags.len() <= 2 && tags.iter().all(|t| t == "r" || t == "g"))
            },
        ),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Every walk ends in a text that can be parsed and that is valid.
    #[test]
    fn walks_end_in_what_was_asked_for(which in 0usize..6, steps in prop::collection::vec(any::<u32>(), 400)) {
        let t = tokenizer();
        let (value, valid) = schemas().swap_remove(which);
        let end = t.token_to_id("<|end|>").unwrap();
        let mut constraint = Constraint::new(Grammars::new(t.clone()).compile(&schema(value)).unwrap());
        let mut output = Vec::new();
        let mut steps = steps.into_iter();
        while !constraint.is_complete(&output).unwrap() {
            let mask = constraint.mask(&output, &[end], &[end]).unwrap().unwrap();
            let allowed = ids(&mask);
            let step = steps.next().expect("the text is longer than any of the schema");
            let token = allowed[step as usize % allowed.len()];
            if token == end {
                break;
            }
            output.push(token);
        }
        let text = t.decode_with(&output, false).unwrap();
        let parsed: Result<Value, _> = serde_json::from_str(&text);
        prop_assert!(parsed.as_ref().is_ok_and(valid), "{text:?}: {parsed:?}");
    }
}
