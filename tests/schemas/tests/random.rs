//! Random schemas: every text that their grammars allow is valid, and what is valid is allowed.

use schema_tests::{Random, Vocabulary};
use serde_json::{Map, Value, json};

/// Schemas of a run; `MOE_SCHEMAS` says another number.
const SCHEMAS: usize = 2000;
/// Texts of each.
const TEXTS: usize = 4;

fn scalar(random: &mut Random) -> Value {
    match random.below(6) {
        0 => json!(null),
        1 => json!(random.one_in(2)),
        2 => json!(*random.of(&[0i64, 1, -1, 42, 9_007_199_254_740_993, i64::MIN, i64::MAX])),
        3 => json!(*random.of(&[0.5, -1.25, 3.0, 1e-7])),
        _ => json!(*random.of(&["", "a", "b", "é", "a\"b\\", "line\nend", "12", "x/y"])),
    }
}

fn value(random: &mut Random, depth: usize) -> Value {
    match random.below(if depth == 0 { 4 } else { 6 }) {
        4 => (0..random.below(3)).map(|_| value(random, depth - 1)).collect(),
        5 => names(random)
            .into_iter()
            .map(|name| (name, value(random, depth - 1)))
            .collect::<Map<_, _>>()
            .into(),
        _ => scalar(random),
    }
}

fn names(random: &mut Random) -> Vec<String> {
    let all = ["a", "b", "ab", "x1", "k\"q", "é"];
    all.iter().filter(|_| random.one_in(3)).map(|name| name.to_string()).collect()
}

fn number(random: &mut Random) -> Value {
    let mut schema = json!({"type": *random.of(&["number", "integer"])});
    let low = random.below(400) as f64 / 8.0 - 25.0;
    let bound = |random: &mut Random, x: f64| match random.below(4) {
        0 => json!(x),
        1 => json!(x.floor() as i64),
        2 => json!((x.floor() as i64).saturating_mul(1_000_000_007)),
        _ => json!(x / 1000.0),
    };
    if random.one_in(2) {
        schema[*random.of(&["minimum", "exclusiveMinimum"])] = bound(random, low);
    }
    if random.one_in(2) {
        let width = random.below(200) as f64 / 8.0;
        schema[*random.of(&["maximum", "exclusiveMaximum"])] = bound(random, low + width);
    }
    if random.one_in(5) {
        schema["multipleOf"] =
            random.of(&[json!(2), json!(5), json!(12), json!(100), json!(0.5), json!(0.25)]).clone();
    }
    schema
}

fn string(random: &mut Random) -> Value {
    let mut schema = json!({"type": "string"});
    if random.one_in(3) {
        schema["minLength"] = json!(random.below(4));
    }
    if random.one_in(3) {
        schema["maxLength"] = json!(random.below(4) + 3);
    }
    let patterns = [
        "^[a-c]+$",
        "a|b",
        "^(?!ab)[a-z]{2,5}$",
        "^(?=.*[0-9])[a-z0-9]{2,6}$",
        "\\d{2}",
        "^a?$|^bb",
        "x(?!y)",
        "^(ab|cd)*$",
        "[^\"\\\\]$",
        "^\\w+\\s\\w+$",
        "^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$",
    ];
    if random.one_in(3) {
        schema["pattern"] = json!(*random.of(&patterns));
    } else if random.one_in(4) {
        let formats = [
            "date",
            "time",
            "date-time",
            "duration",
            "ipv4",
            "ipv6",
            "uuid",
            "email",
            "hostname",
            "uri",
            "path",
        ];
        schema["format"] = json!(*random.of(&formats));
    }
    schema
}

fn array(random: &mut Random, depth: usize) -> Value {
    let mut schema = json!({"type": "array"});
    if random.one_in(2) {
        schema["items"] = node(random, depth);
    }
    if random.one_in(4) {
        schema["prefixItems"] = (0..random.below(3) + 1).map(|_| node(random, depth)).collect();
    }
    if random.one_in(3) {
        schema["minItems"] = json!(random.below(3));
    }
    if random.one_in(3) {
        schema["maxItems"] = json!(random.below(12));
    }
    if random.one_in(8) {
        schema = json!({"type": "array", "uniqueItems": true, "items": {"enum": (0..4).map(|_| scalar(random)).collect::<Value>()}});
        schema["minItems"] = json!(random.below(3));
    }
    schema
}

fn object(random: &mut Random, depth: usize) -> Value {
    let mut schema = json!({"type": "object"});
    let named = names(random);
    if random.one_in(4) {
        let required: Vec<_> = names(random);
        schema["required"] = json!(required);
    } else if random.one_in(2) {
        schema["required"] = json!(named.iter().filter(|_| random.one_in(2)).collect::<Vec<_>>());
    }
    schema["properties"] =
        named.into_iter().map(|name| (name, node(random, depth))).collect::<Map<_, _>>().into();
    match random.below(3) {
        0 => schema["additionalProperties"] = json!(false),
        1 => schema["additionalProperties"] = node(random, depth),
        _ => (),
    }
    if random.one_in(4) {
        let expressions = ["^a", "b$", "^[a-z]\\d$", "q", "^x1$"];
        let few = random.below(2) + 1;
        schema["patternProperties"] = (0..few)
            .map(|_| (random.of(&expressions).to_string(), node(random, depth)))
            .collect::<Map<_, _>>()
            .into();
    }
    if random.one_in(6) {
        schema["propertyNames"] = random
            .of(&[
                json!({"enum": ["a", "b", "zz"]}),
                json!({"pattern": "^[a-z]+$"}),
                json!({"maxLength": 2}),
                json!({"minLength": 1}),
            ])
            .clone();
    }
    if random.one_in(5) {
        schema["minProperties"] = json!(random.below(3));
    }
    if random.one_in(5) {
        schema["maxProperties"] = json!(random.below(4));
    }
    schema
}

fn node(random: &mut Random, depth: usize) -> Value {
    if depth == 0 {
        return match random.below(6) {
            0 => number(random),
            1 => string(random),
            2 => json!({"const": scalar(random)}),
            3 => json!({"type": *random.of(&["null", "boolean"])}),
            4 => json!({"enum": [scalar(random), scalar(random), scalar(random)]}),
            _ => json!(true),
        };
    }
    match random.below(14) {
        0..=2 => number(random),
        3 | 4 => string(random),
        5 => json!({"enum": [value(random, 1), value(random, 1), value(random, 2)]}),
        6 => json!({"anyOf": [node(random, depth - 1), node(random, depth - 1)]}),
        7 => json!({"allOf": [object(random, depth - 1), object(random, depth - 1)]}),
        8 => json!({"allOf": [number(random), number(random)]}),
        9 => json!({"oneOf": [tagged(random, "p", depth - 1), tagged(random, "q", depth - 1)]}),
        10 => json!({"$ref": "#/$defs/n~1a%20b"}),
        11 => array(random, depth - 1),
        _ => object(random, depth - 1),
    }
}

fn tagged(random: &mut Random, tag: &str, depth: usize) -> Value {
    json!({"type": "object", "properties": {"k": {"const": tag}, "v": node(random, depth)}, "additionalProperties": false})
}

/// A schema of which a part can be referred to from everywhere.
fn schema(random: &mut Random) -> Value {
    let mut schema = node(random, 2);
    if !schema.is_object() {
        schema = json!({});
    }
    let part = json!({"type": "object", "properties": {"next": {"$ref": "#/$defs/n~1a%20b"}}, "additionalProperties": number(random)});
    schema["$defs"] = json!({"n/a b": part});
    schema
}

/// Whether grammars write a value in this way: members are in the order of the schema, and numbers have few digits and
/// no exponent. An integer is not written as a float.
fn is_written_so(value: &Value) -> bool {
    match value {
        Value::Object(_) => false,
        Value::Array(items) => items.iter().all(is_written_so),
        Value::Number(number) => {
            let text = number.to_string();
            text.len() <= 16 && !text.contains('e') && !text.ends_with(".0")
        }
        _ => true,
    }
}

#[test]
fn texts_of_random_schemas_are_valid() {
    let count = std::env::var("MOE_SCHEMAS").ok().and_then(|n| n.parse().ok()).unwrap_or(SCHEMAS);
    let vocabulary = Vocabulary::new().unwrap();
    let mut compiled = 0;
    let mut refused = 0;
    let mut texts = 0;
    let mut endless = 0;
    let mut taken = 0;
    let mut missed = Vec::new();
    let mut reasons = std::collections::BTreeMap::<String, usize>::new();
    let mut faults = Vec::new();
    for seed in 0..count as u64 {
        let mut random = Random::new(seed + 1);
        let schema = schema(&mut random);
        let validator =
            jsonschema::draft202012::options().should_validate_formats(true).build(&schema).unwrap();
        let matcher = match vocabulary.matcher(&schema.to_string()) {
            Ok(matcher) => matcher,
            Err(e) => {
                refused += 1;
                *reasons.entry(format!("{e}").chars().take(60).collect()).or_default() += 1;
                // If the error says that a schema allows no text, none of some random values may be valid.
                let no_text = format!("{e}").contains("allows no text");
                let found =
                    (0..30).map(|_| value(&mut random, 2)).find(|value| no_text && validator.is_valid(value));
                faults.extend(found.map(|value| format!("{schema} is refused, but {value} is valid")));
                continue;
            }
        };
        compiled += 1;
        for _ in 0..TEXTS {
            match vocabulary.walk(&matcher, &mut random, 600) {
                Ok(Some(text)) => {
                    texts += 1;
                    let valid =
                        serde_json::from_str(&text).is_ok_and(|value: Value| validator.is_valid(&value));
                    if !valid {
                        faults.push(format!("{schema} allows {text}"));
                    }
                }
                Ok(None) => endless += 1,
                Err(e) => faults.push(format!("{schema}: {e}")),
            }
        }
        for _ in 0..20 {
            let value = value(&mut random, 1);
            if value.is_object() || !validator.is_valid(&value) {
                continue;
            }
            if is_written_so(&value) {
                taken += 1;
                if !Vocabulary::takes(&matcher, &value.to_string()) {
                    missed.push(format!("{schema} does not allow {value}"));
                }
            }
        }
    }
    println!(
        "{count} schemas: {compiled} compiled, {refused} refused; {texts} texts, {endless} cut off; {taken} valid values, {} not taken",
        missed.len()
    );
    for (reason, n) in reasons {
        println!("  {n} refused: {reason}");
    }
    for fault in faults.iter().chain(&missed).take(20) {
        println!("  {fault}");
    }
    assert!(faults.is_empty(), "{} faults", faults.len());
    assert!(missed.is_empty(), "{} valid values are not allowed", missed.len());
    assert!(compiled * 10 > count * 8, "too few schemas compile");
}
