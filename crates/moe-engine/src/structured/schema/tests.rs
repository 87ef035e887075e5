//! Tests which texts the grammars of schemas allow, with schemas that people and generators write. Random schemas are
//! in `tests/schemas`.

use llguidance::derivre::RegexAst;
use serde_json::{Value, json};

use super::super::tests::tokenizer;
use super::super::{Constraint, Grammars, StructuredOutput};

/// Returns whether the grammar of a schema contains a text.
fn allows(schema: &Value, text: &str) -> bool {
    let tokenizer = tokenizer();
    let output = StructuredOutput::JsonSchema(schema.to_string());
    let grammar =
        Grammars::new(tokenizer.clone()).compile(&output).unwrap_or_else(|e| panic!("{schema}: {e}"));
    let mut constraint = Constraint::new(grammar);
    let tokens = tokenizer.encode(text).unwrap();
    let end = tokenizer.token_to_id("<|end|>").unwrap();
    // After a complete text, the constraint accepts every token.
    if (0..tokens.len()).any(|n| constraint.is_complete(&tokens[..n]) != Ok(false)) {
        return false;
    }
    match constraint.mask(&tokens, &[end], &[end]) {
        Ok(None) => true,
        Ok(Some(mask)) => mask.words()[end as usize / 32] >> (end % 32) & 1 == 1,
        Err(_) => false,
    }
}

fn refused(schema: &str) -> String {
    super::compile(schema).err().unwrap_or_else(|| panic!("{schema} is taken"))
}

/// Checks the texts that a schema allows, and texts that it does not allow.
fn check(schema: Value, good: &[&str], bad: &[&str]) {
    for text in good {
        assert!(allows(&schema, text), "{schema} does not allow {text}");
    }
    for text in bad {
        assert!(!allows(&schema, text), "{schema} allows {text}");
    }
}

#[test]
fn bounds_hold_exactly() {
    check(
        json!({"type": "number", "exclusiveMinimum": 5, "exclusiveMaximum": 5.5}),
        &["5.1", "5.49", "5.000001"],
        &["5", "5.0", "5.5", "5.50", "4.9"],
    );
    check(
        json!({"type": "integer", "exclusiveMinimum": -3, "maximum": 2.5}),
        &["-2", "0", "2"],
        &["-3", "3", "-0", "1.0"],
    );
    check(json!({"type": "number", "minimum": 5, "exclusiveMinimum": true}), &["5.1", "6"], &["5"]);
    check(json!({"type": "number", "maximum": -0.25}), &["-0.25", "-0.3", "-12"], &["-0.2", "0", "0.25"]);
    check(
        json!({"type": "number", "multipleOf": 0.05, "minimum": 1}),
        &["1", "1.05", "12.5"],
        &["1.01", "0.95"],
    );
    check(json!({"multipleOf": 0.25, "type": "number"}), &["0.5", "-1.25", "3", "0.50"], &["0.2", "0.255"]);
    check(
        json!({"type": "integer", "multipleOf": 1200, "maximum": 5000}),
        &["0", "1200", "-2400"],
        &["600", "6000", "120"],
    );
    check(
        json!({"allOf": [{"multipleOf": 4}, {"multipleOf": 6}], "type": "integer"}),
        &["12", "24"],
        &["4", "6"],
    );
}

#[test]
fn integers_of_any_size_are_exact() {
    check(
        json!({"enum": [1234567890123456789i64, 7]}),
        &["1234567890123456789", "7"],
        &["1234567890123456788", "1234567890123456800"],
    );
    check(json!({"const": -9007199254740993i64}), &["-9007199254740993"], &["-9007199254740992"]);
    check(
        json!({"type": "integer", "minimum": 9007199254740993i64, "maximum": 9007199254740994i64}),
        &["9007199254740993"],
        &["9007199254740992", "9007199254740995"],
    );
    check(
        json!({"type": "integer", "minimum": i64::MIN, "maximum": u64::MAX}),
        &["-9223372036854775808", "18446744073709551615"],
        &["18446744073709551616", "-9223372036854775809"],
    );
    let constant = super::Json::read(r#"{"const": 12345678901234567890123}"#).unwrap();
    assert_eq!(constant.get("const").unwrap().short(), "12345678901234567890123");
    assert!(super::compile(r#"{"const": 12345678901234567890123}"#).is_ok());
}

#[test]
fn numbers_end() {
    let digits = |n: usize| "7".repeat(n);
    for schema in [
        json!({}),
        json!({"type": "number"}),
        json!({"type": "integer"}),
        json!({"minimum": 3}),
        json!({"maximum": 1e300}),
    ] {
        check(schema.clone(), &[&digits(16)], &[&digits(17)]);
    }
    let fraction = format!("1.{}", digits(18));
    check(json!({}), &["1e5", "-0.25"], &[&fraction, "1e100"]);
    check(
        json!({"type": "integer", "minimum": 100_000_000_000_000_000_000f64}),
        &["100000000000000000000"],
        &[&digits(20)],
    );
}

#[test]
fn members_of_all_kinds() {
    let score = json!({"type": "object", "properties": {"score": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["score"],
        "additionalProperties": false, "patternProperties": {"^score$": {"type": "integer", "maximum": 5}}});
    check(score, &[r#"{"score":5}"#], &[r#"{"score":6}"#, r#"{"score":5,"#, "{}"]);
    check(
        json!({"patternProperties": {"^a": {"type": "null"}, "b$": {"type": ["null", "boolean"]}}, "additionalProperties": false, "type": "object"}),
        &["{}", r#"{"ab":null}"#, r#"{"b":true,"a":null}"#],
        &[r#"{"ab":true}"#, r#"{"c":null}"#],
    );
    check(
        json!({"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "null"}}),
        &["{}", r#"{"b":null}"#, r#"{"a":null,"b":null}"#],
        &[r#"{"c":null}"#, r#"{"a":null,"a":null}"#],
    );
    check(
        json!({"type": "object", "propertyNames": {"pattern": "^[a-c]+$"}}),
        &[r#"{"ab":1}"#],
        &[r#"{"d":1}"#, r#"{"":1}"#],
    );
    check(
        json!({"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2, "maxProperties": 2, "additionalProperties": false}),
        &[r#"{"a":1,"c":1}"#, r#"{"b":1,"c":1}"#],
        &["{}", r#"{"a":1}"#, r#"{"a":1,"b":1,"c":1}"#],
    );
    assert!(refused(r#"{"type": "object", "minProperties": 2}"#).contains("minProperties 2"));
}

#[test]
fn forms_that_generators_write() {
    check(json!({"type": "string", "format": "binary", "maxLength": 2}), &["\"ab\""], &["\"abc\""]);
    // These are the Decimal of pydantic, and the email address and a password of zod.
    let decimal = json!({"type": "string", "pattern": "^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$"});
    check(decimal, &["\"1.5\"", "\"+.5\"", "\"-7\""], &["\"\"", "\"-.\"", "\"1.5.\"", "\"a\""]);
    let email = "^(?!\\.)(?!.*\\.\\.)([A-Za-z0-9_'+\\-\\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\\-]*\\.)+[A-Za-z]{2,}$";
    check(
        json!({"type": "string", "pattern": email}),
        &["\"a.b@c.de\""],
        &["\".a@c.de\"", "\"a..b@c.de\"", "\"a@c\""],
    );
    let password = json!({"type": "string", "pattern": "^(?=.*[A-Z])(?=.*\\d).{4,6}$"});
    check(password, &["\"aB3x\""], &["\"ab3x\"", "\"aBcx\"", "\"aB3\""]);
    check(
        json!({"$defs": {"a/b": {"enum": [1]}, "c d": {"enum": [2]}}, "anyOf": [{"$ref": "#/$defs/a~1b"}, {"$ref": "#/$defs/c%20d"}]}),
        &["1", "2"],
        &["3"],
    );
    check(
        json!({"definitions": {"x": {"$anchor": "here", "type": "integer"}}, "$ref": "#here", "minimum": 4}),
        &["4"],
        &["3", "true"],
    );
    check(
        json!({"$id": "https://a.b/c.json", "$ref": "d.json", "$defs": {"d": {"$id": "https://a.b/d.json", "const": 1}}}),
        &["1"],
        &["2"],
    );
    check(
        json!({"type": "array", "items": {"enum": ["a", "b", 1]}, "uniqueItems": true, "minItems": 2}),
        &[r#"["b","a"]"#, r#"["a",1,"b"]"#],
        &[r#"["a"]"#, r#"["a","a"]"#, "[]"],
    );
    check(
        json!({"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 3}, "uniqueItems": true}),
        &["[3,1,2]"],
        &["[1,1]"],
    );
    let tagged = |tag: &str| json!({"type": "object", "properties": {"k": {"const": tag, "default": tag}}, "additionalProperties": false});
    check(
        json!({"oneOf": [tagged("a"), tagged("b")], "discriminator": {"propertyName": "k"}}),
        &[r#"{"k":"a"}"#, r#"{"k":"b"}"#],
        &["{}", r#"{"k":"c"}"#],
    );
    check(
        json!({"oneOf": [{"type": "string"}, {"type": "null"}, {"type": ["null", "boolean"]}]}),
        &["true", "\"\""],
        &["null"],
    );
}

#[test]
fn what_is_not_enforced_is_refused_by_its_name() {
    for (schema, want) in [
        (
            r#"{"type": "array", "items": {"type": "string"}, "uniqueItems": true}"#,
            "uniqueItems is supported where",
        ),
        (
            r#"{"oneOf": [{"type": "integer"}, {"type": "number"}]}"#,
            "oneOf: alternatives 0 and 1 may hold together for the same numbers",
        ),
        (r#"{"if": {}}"#, "the keyword \"if\" is not supported"),
        (r#"{"contains": true}"#, "\"contains\""),
        (r#"{"type": "string", "pattern": "(a)\\1"}"#, "back-references are not supported"),
        (r#"{"type": "string", "pattern": "(?<=a)b"}"#, "look-behind is not supported"),
        (
            r#"{"type": "string", "pattern": "(?:(?!a).)*"}"#,
            "look-ahead and anchors in a part that is repeated",
        ),
        (r#"{"type": "string", "pattern": "a{3,2}"}"#, "a repetition of 3 to 2"),
        (r#"{"$ref": "https://a.b/c"}"#, "leads out of the schema"),
        (r#"{"multipleOf": 0}"#, "multipleOf: expected a number above 0"),
        (r#"{"multipleOf": 123456789}"#, "multipleOf 123456789: at most 500 is supported"),
        (r#"{"allOf": [{"multipleOf": 499}, {"multipleOf": 491}]}"#, "whose product is at most 500"),
        (r#"{"minimum": "5"}"#, "minimum: expected a number, got \"5\""),
        (r#"{"maximum": 1e999}"#, "maximum: 1e999: at most 400 digits"),
        (r#"{"x-guidance": {"lenient": true}}"#, "x-guidance: lenient true is not supported"),
        (r#"{"properties": {"a": 5}}"#, "expected a schema, which is an object, true or false, got 5"),
    ] {
        let error = refused(schema);
        assert!(error.contains(want), "{schema}: {error}");
    }
}

#[test]
fn nesting_and_size_are_bounded() {
    let begin = std::time::Instant::now();
    let nested = format!("{}{{}}{}", "{\"items\": ".repeat(400), "}".repeat(400));
    assert!(refused(&nested).contains("nested more than 128 levels"));
    let chain: serde_json::Map<String, Value> =
        (0..5000).map(|i| (format!("d{i}"), json!({"$ref": format!("#/$defs/d{}", i + 1)}))).collect();
    assert!(
        refused(&json!({"$ref": "#/$defs/d0", "$defs": chain}).to_string())
            .contains("nested more than 100 levels")
    );
    // Each definition names the next one twice. Expanded, they would have 2^300 parts.
    let lists: serde_json::Map<String, Value> = (0..300)
        .map(|i| {
            let next = json!({"$ref": format!("#/$defs/d{}", (i + 1) % 300)});
            (
                format!("d{i}"),
                json!({"anyOf": [{"type": "null"}, {"type": "array", "prefixItems": [next, next]}]}),
            )
        })
        .collect();
    assert!(super::compile(&json!({"$ref": "#/$defs/d0", "$defs": lists}).to_string()).is_ok());
    let groups = format!("{{\"pattern\": \"{}a{}\"}}", "(".repeat(10_000), ")".repeat(10_000));
    assert!(refused(&groups).contains("more than 100 groups"));
    let anchors = format!("{{\"pattern\": \"{}\"}}", "a$^".repeat(100_000));
    assert!(refused(&anchors).contains("too many anchors"));
    let many: Vec<Value> =
        (0..2000).map(|i| json!({"type": "string", "pattern": format!("^a{i}")})).collect();
    assert!(refused(&json!({"oneOf": many}).to_string()).len() < 500);
    assert!(begin.elapsed() < std::time::Duration::from_secs(20), "{:?}", begin.elapsed());
}

#[test]
fn expressions_find_what_ecmascript_finds() {
    for (pattern, good, bad) in [
        ("b", &["abc", "b"][..], &["ac", ""][..]),
        ("^a|c$", &["ab", "bc"], &["ba", "cb"]),
        ("a(?=b)", &["ab", "xab"], &["a", "ba"]),
        ("a(?!b)", &["a", "ac", "aba"], &["ab", "b"]),
        ("^(?:a|(?!c).)d$", &["ad", "bd"], &["cd", "d"]),
        ("(^a|b)c", &["ac", "xbc"], &["xac"]),
        ("^\\u{1F600}\\uD83D\\uDE00[\\x41-\\x43]\\/$", &["😀😀B/"], &["😀B/"]),
        ("^[^a-c\\d]+$", &["xyz"], &["xa", "1", ""]),
        ("^\\w\\s\\D$", &["a b"], &["é b", "a 1"]),
        ("^(?i)aB$", &["Ab", "aB"], &["b"]),
        ("^a{2,}?$", &["aa", "aaa"], &["a"]),
        ("^a{x$", &["a{x"], &["a"]),
    ] {
        let texts: RegexAst =
            super::language::texts(&super::pattern::Pattern::read(pattern).unwrap()).unwrap();
        let mut builder = llguidance::derivre::RegexBuilder::new();
        let whole = builder.mk(&texts).unwrap();
        let mut regex = builder.to_regex(whole);
        for (text, want) in good.iter().map(|text| (text, true)).chain(bad.iter().map(|text| (text, false))) {
            assert_eq!(regex.is_match(text), want, "/{pattern}/ in {text:?}");
        }
    }
}
