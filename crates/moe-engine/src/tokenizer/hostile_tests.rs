//! Tests of files that are wrong by accident or by intent. None of them ends the process, takes all memory, or runs for
//! ever.

use std::time::{Duration, Instant};

use proptest::prelude::*;
use serde_json::{Value, json};

use super::Tokenizer;

/// Returns a tokenizer of the usual kind that has one of every part.
fn whole() -> Value {
    let mut json = serde_json::to_value(&*Tokenizer::bytes().unwrap().library).unwrap();
    json["model"]["vocab"]["ab"] = json!(256);
    json["model"]["merges"] = json!(["a b"]);
    let token = |id: u32, content: &str, special: bool| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": !special, "special": special})
    };
    json["added_tokens"] = json!([token(257, "<|end|>", true), token(258, "<think>", false)]);
    json["normalizer"] = json!({"type": "Sequence", "normalizers": [
        {"type": "NFC"}, {"type": "Replace", "pattern": {"String": "x"}, "content": "yz"},
        {"type": "Prepend", "prepend": "_"}, {"type": "Lowercase"}]});
    let split = json!({"type": "Split", "pattern": {"Regex": "\\s+(?!\\S)|\\s+|\\p{L}+|\\p{N}{1,3}|[^\\s\\p{L}\\p{N}]+"},
        "behavior": "Isolated", "invert": false});
    let digits = json!({"type": "Digits", "individual_digits": true});
    json["pre_tokenizer"] =
        json!({"type": "Sequence", "pretokenizers": [split, digits, json["pre_tokenizer"].clone()]});
    json["post_processor"] = json!({"type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|end|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [], "special_tokens": {"<|end|>": {"id": "<|end|>", "ids": [257], "tokens": ["<|end|>"]}}});
    json
}

/// Loads a file and uses it. The result does not matter.
fn load_and_use(bytes: &[u8]) -> Result<(), String> {
    let tokenizer = Tokenizer::from_bytes(bytes).map_err(|e| format!("{e:#}"))?;
    let ids = tokenizer.encode("x Ab 12 é😀\n<think>").map_err(|e| format!("{e:#}"))?;
    tokenizer.decode(&ids).map_err(|e| format!("{e:#}"))?;
    drop(tokenizer.token_bytes());
    Ok(())
}

fn with(change: impl FnOnce(&mut Value)) -> Result<Tokenizer, String> {
    let mut json = whole();
    change(&mut json);
    Tokenizer::from_bytes(json.to_string().as_bytes()).map_err(|e| format!("{e:#}"))
}

/// Returns the error of a prompt, for a file that can be read.
fn refused_text(text: &str, change: impl FnOnce(&mut Value)) -> String {
    let start = Instant::now();
    let error = format!("{:#}", with(change).unwrap().encode(text).unwrap_err());
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
    error
}

#[test]
fn steps_one_by_one_do_what_the_library_does_at_once() {
    let metaspace =
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true});
    let split = |behavior: &str, invert: bool, pattern: Value| json!({"type": "Split", "pattern": pattern, "behavior": behavior, "invert": invert});
    let mut variants = vec![whole()];
    for pre_tokenizer in [
        Value::Null,
        metaspace,
        split("MergedWithPrevious", false, json!({"String": "b"})),
        split("MergedWithNext", true, json!({"Regex": "[a-z]+"})),
        split("Contiguous", false, json!({"Regex": "(?=b)|1"})),
        json!({"type": "Punctuation", "behavior": "Isolated"}),
        json!({"type": "FixedLength", "length": 2}),
    ] {
        let mut json = whole();
        json["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [pre_tokenizer, {"type": "ByteLevel",
            "add_prefix_space": true, "trim_offsets": true, "use_regex": true}]});
        if pre_tokenizer.is_null() {
            json["pre_tokenizer"] = Value::Null;
        }
        variants.push(json);
    }
    for json in variants {
        let tokenizer = Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap();
        for text in
            ["", "x", "xx Ab<|end|> b12 3<think>  \n e\u{301}é", " ab  ab!?", "<|end|><|end|>x<think>"]
        {
            let want = tokenizer.library.encode_fast(text, true).unwrap().get_ids().to_vec();
            assert_eq!(tokenizer.encode(text).unwrap(), want, "{text:?} {}", json["pre_tokenizer"]);
        }
    }
}

#[test]
fn a_file_that_was_cut_is_an_error() {
    let text = whole().to_string();
    assert_eq!(load_and_use(text.as_bytes()), Ok(()));
    for end in (0..text.len()).step_by(7) {
        load_and_use(&text.as_bytes()[..end]).unwrap_err();
    }
}

#[test]
fn steps_that_the_library_panics_on_are_named() {
    let error = with(|t| t["pre_tokenizer"] = json!({"type": "FixedLength", "length": 0})).err().unwrap();
    assert!(error.contains("pre_tokenizer") && error.contains("at least 1 character"), "{error}");
    let charsmap = |table: &str| {
        let table = json!({"type": "Precompiled", "precompiled_charsmap": table});
        with(|t| t["normalizer"] = table)
    };
    for (table, why) in [
        ("/////w==", "states a trie of 4294967295 bytes, and 0 follow"),
        ("AAA=", "ends before its first 4 bytes"),
        ("?", "not base64"),
    ] {
        let error = charsmap(table).err().unwrap();
        assert!(error.contains("precompiled_charsmap") && error.contains(why), "{error}");
    }
    // The table has one entry, which points outside of the table.
    let error = format!(
        "{:#}",
        charsmap("BwAAAGFhYWFhYWE=").and_then(|t| t.encode("hi").map_err(|e| format!("{e:#}"))).unwrap_err()
    );
    assert!(error.contains("panicked") && error.contains("check tokenizer.json"), "{error}");
}

/// Returns whether the error is about this size, or about the time that unoptimised code needs to reach it.
fn is_bounded(error: &str, size: &str) -> bool {
    error.contains(size) || (cfg!(debug_assertions) && error.contains("takes more than 20 s"))
}

#[test]
fn a_text_does_not_grow_without_end() {
    let double = |pattern: Value| json!({"type": "Replace", "pattern": pattern, "content": "aa"});
    for pattern in [json!({"String": "a"}), json!({"Regex": "a"})] {
        let steps = vec![double(pattern); 40];
        let error =
            refused_text("a", |t| t["normalizer"] = json!({"type": "Sequence", "normalizers": steps}));
        assert!(is_bounded(&error, "more than 16777216 bytes"), "{error}");
    }
    let letters =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
    let steps = vec![letters; 40];
    let error =
        refused_text("é", |t| t["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": steps}));
    assert!(is_bounded(&error, "more than 33554432 bytes"), "{error}");
    // Each piece between two special tokens gets the text before it.
    let prepend = json!({"type": "Prepend", "prepend": "x".repeat(100_000)});
    let error = refused_text(&"a<|end|>".repeat(300), |t| t["normalizer"] = prepend);
    assert!(is_bounded(&error, "more than 16777216 bytes"), "{error}");
    let error = refused_text(&"a".repeat(17 << 20), |_| {});
    assert!(is_bounded(&error, "more than 16777216 bytes"), "{error}");
    // The normalizers are applied to added tokens while the file is read.
    let rare = vec![double(json!({"String": "t"})); 40];
    let error = with(|t| t["normalizer"] = json!({"type": "Sequence", "normalizers": rare})).err();
    assert_eq!(error, None, "no token holds what is doubled twice");
    let doubled = json!({"type": "Replace", "pattern": {"String": "t"}, "content": "tt"});
    // The empty expression matches between all letters.
    for step in [doubled, double(json!({"Regex": ""}))] {
        let steps = vec![step; 40];
        let error =
            with(|t| t["normalizer"] = json!({"type": "Sequence", "normalizers": steps})).err().unwrap();
        assert!(error.contains("added_tokens") && error.contains("<think>"), "{error}");
    }
    let decoder = vec![json!({"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}); 40];
    let error = with(|t| t["decoder"] = json!({"type": "Sequence", "decoders": decoder})).err().unwrap();
    assert!(error.contains("decoder") && error.contains("times larger"), "{error}");
    let many = Value::from(vec![257; 2000]);
    let error = with(|t| t["post_processor"]["special_tokens"]["<|end|>"]["ids"] = many).err().unwrap();
    assert!(error.contains("more than 1024 tokens"), "{error}");
}

#[test]
fn lists_and_patterns_have_a_size() {
    let nested =
        (0..60).fold(json!({"type": "NFC"}), |inner, _| json!({"type": "Sequence", "normalizers": [inner]}));
    let error = with(|t| t["normalizer"] = nested).err().unwrap();
    assert!(error.contains("nested more than 4 deep"), "{error}");
    let error = with(|t| {
        t["normalizer"] = json!({"type": "Sequence", "normalizers": vec![json!({"type": "NFC"}); 65]})
    });
    assert!(error.err().unwrap().contains("at most 64"));
    let replace = |pattern: &str| {
        with(|t| t["normalizer"] = json!({"type": "Replace", "pattern": {"Regex": pattern}, "content": ""}))
    };
    assert!(replace(&"a".repeat(9000)).err().unwrap().contains("more than 8192 bytes"));
    assert!(replace("(\\p{L}{1000}){1000}").err().unwrap().contains("cannot be used"));
    assert!(replace("(").err().unwrap().contains("cannot be used"));
    // This expression tries every way to split a word.
    let error = refused_text(&"a".repeat(60), |t| {
        t["pre_tokenizer"] = json!({"type": "Split", "pattern": {"Regex": "(?:(?:a|aa)(?=a|$))+b"}, "behavior": "Isolated",
            "invert": false});
    });
    assert!(error.contains("gives up") || error.contains("takes more than"), "{error}");
    let error = with(|t| {
        t["model"] = json!({"type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 1_000_000, "vocab": {"a": 0}});
    });
    assert!(error.err().unwrap().contains("max_input_chars_per_word"));
}

/// Replaces one value, whose number is `at`, by another one.
fn mutate(json: &mut Value, mut at: usize, with: &Value) -> bool {
    let mut next = vec![json];
    while let Some(value) = next.pop() {
        if at == 0 {
            *value = with.clone();
            return true;
        }
        at -= 1;
        match value {
            Value::Array(list) => next.extend(list),
            // The letters of the alphabet are all alike, so maps of them are skipped.
            Value::Object(map) if map.len() < 100 => next.extend(map.values_mut()),
            _ => {}
        }
    }
    false
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn another_value_anywhere_is_an_error_or_works(
        at in prop::collection::vec(0usize..90, 1..4),
        with in prop::sample::select(vec![json!(null), json!(0), json!(-1), json!(u32::MAX), json!(1e300), json!(""),
            json!("a"), json!("ByteLevel"), json!([]), json!({}), json!([[]]), json!(true), json!({"type": "Sequence"}),
            json!({"String": ""}), json!({"Regex": "("}), json!({"type": "FixedLength", "length": 0}),
            json!({"type": "Precompiled", "precompiled_charsmap": "AAAAAA=="}), json!({"type": "WordLevel"}),
            json!({"type": "Strip", "content": "a", "start": usize::MAX, "stop": 1}), json!({"type": "Fuse"}),
            json!({"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": true})]),
    ) {
        let mut json = whole();
        for at in at {
            mutate(&mut json, at, &with);
        }
        drop(load_and_use(json.to_string().as_bytes()));
    }
}
