//! Tests of grammars that nest deep or take long. Each of them compiles or returns an error, and the process survives.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::compiler::reason;
use super::*;
use crate::tokenizer::Tokenizer;

/// Returns a schema of definitions, each of which refers to the next one.
fn chain(len: usize, definition: impl Fn(Value) -> Value) -> StructuredOutput {
    let next = |i: usize| match i + 1 < len {
        true => json!({"$ref": format!("#/$defs/d{}", i + 1)}),
        false => json!({"type": "null"}),
    };
    let defs: serde_json::Map<_, _> = (0..len).map(|i| (format!("d{i}"), definition(next(i)))).collect();
    StructuredOutput::JsonSchema(json!({"$defs": defs, "$ref": "#/$defs/d0"}).to_string())
}

fn object(next: Value) -> Value {
    json!({"type": "object", "properties": {"a": next}, "required": ["a"]})
}

fn array_of_any(next: Value) -> Value {
    json!({"type": "array", "items": {"anyOf": [next, {"type": "null"}]}})
}

fn lark_chain(len: usize, rule: impl Fn(usize) -> String) -> StructuredOutput {
    let rules: Vec<String> = (0..len).map(rule).collect();
    StructuredOutput::Grammar(format!("start: r0\n{}\nr{len}: \"x\"\n", rules.join("\n")))
}

/// Compiles a grammar and reads the first tokens on a small stack, because masks must not recurse. Returns what went
/// wrong.
fn run(output: &StructuredOutput) -> Result<(), String> {
    let grammar = Grammars::new(Tokenizer::bytes().unwrap()).compile(output).map_err(|e| e.reason)?;
    let steps = move || -> Result<(), String> {
        let mut constraint = Constraint::after_reasoning(None, grammar);
        let mut tokens = Vec::new();
        for _ in 0..40 {
            if constraint.is_complete(&tokens)? {
                break;
            }
            let Some(mask) = constraint.mask(&tokens, &[], &[])? else { break };
            let allowed = |id: &u32| mask.words()[*id as usize / 32] >> (id % 32) & 1 == 1;
            tokens.extend((0..mask.words().len() as u32 * 32).find(allowed));
        }
        Ok(())
    };
    thread::Builder::new().stack_size(256 << 10).spawn(steps).unwrap().join().unwrap()
}

#[test]
fn what_nests_deep_compiles() {
    let cases = [
        chain(1_000, object),
        chain(600, array_of_any),
        chain(3_000, object),
        chain(3_000, |next| json!({"type": "array", "items": next})),
        lark_chain(5_000, |i| format!("r{i}: r{}", i + 1)),
        lark_chain(20_000, |i| format!("r{i}: \"a\" r{}", i + 1)),
        lark_chain(1_000, |i| format!("r{i}: (((((((((r{} | \"b\")+ | \"c\")))))))", i + 1) + "?"),
    ];
    for (i, output) in cases.iter().enumerate() {
        let done = run(output);
        // Schemas have limits of their own, so they may be refused.
        assert!(done.is_ok() || i < 4 || i == 6, "{i}: {done:?}");
    }
    // A chain of tokens is one regular expression.
    let tokens: Vec<String> = (0..5_000).map(|i| format!("T{i}: \"a\" T{} | \"b\"", i + 1)).collect();
    let text = format!("start: T0\n{}\nT5000: \"x\"\n", tokens.join("\n"));
    let done = run(&StructuredOutput::Grammar(text));
    assert!(done.as_ref().map_or_else(|e| e.contains("too"), |()| true), "{done:?}");
}

#[test]
fn what_may_nest_too_deep_is_refused() {
    assert!(run(&chain(12_000, object)).is_err());
    let error = run(&lark_chain(31_000, |i| format!("r{i}: r{}", i + 1))).unwrap_err();
    assert!(error.starts_with("it has 31002 rules and groups, and at most 30000 are taken"), "{error}");
    // A text of one regular expression has no rules.
    for open in ["(a", "(?:a", "[[a"] {
        let text = open.repeat(100_000);
        let error = run(&StructuredOutput::Regex(text)).unwrap_err();
        assert!(error.contains("regex") && error.len() < 3_000, "{error}");
    }
    let classes = |n: u32| (0..n).filter_map(|i| char::from_u32(0x4e00 + i)).map(|c| format!("[^\\w{c}]"));
    let error = run(&StructuredOutput::Regex(classes(3_000).collect())).unwrap_err();
    assert!(error.contains("character classes of many code points"), "{error}");
}

#[test]
fn the_largest_that_is_let_through_fits_the_stack() {
    // These cases are as deep as the limit allows, in the densest forms.
    let cases = [
        chain(7_000, object),
        chain(5_900, array_of_any),
        lark_chain(29_990, |i| format!("r{i}: r{}", i + 1)),
        lark_chain(2_500, |i| format!("r{i}: ((((((((((r{}))))))))))", i + 1)),
    ];
    for (i, output) in cases.iter().enumerate() {
        let done = run(output);
        let refused = |e: &String| e.contains("too large") || e.contains("too big");
        assert!(i < 2 || done.is_ok() || done.as_ref().is_err_and(refused), "{i}: {done:?}");
    }
}

#[test]
fn counted_repetitions_and_alternations_are_bounded() {
    let begin = Instant::now();
    let regex = |text: String| StructuredOutput::Regex(text);
    let cases = [
        regex("((((a{1000}){1000}){1000}){1000}){1000}".into()),
        regex(format!("({})*", "(a|b)?".repeat(1_000))),
        regex((0..20_000).map(|i| format!("x{i}y+")).collect::<Vec<_>>().join("|")),
        regex("(a?){5000}b".into()),
        regex("(.*a){500}".into()),
        StructuredOutput::Grammar("start: (((\"a\"{1000}){1000}){1000}){1000}".into()),
        StructuredOutput::Grammar("start: A\nA: ((((\"a\"|\"b\"){1000}){1000}){1000}){1000}".into()),
        StructuredOutput::JsonSchema(
            json!({"type": "string", "pattern": "^((a{1000}){1000}){1000}$"}).to_string(),
        ),
    ];
    for output in &cases {
        // The test passes if the call returns.
        let _ = run(output);
    }
    assert!(begin.elapsed() < Duration::from_secs(60), "{:?}", begin.elapsed());
}

#[test]
fn a_long_regular_expression_delays_no_other() {
    let grammars = Arc::new(Grammars::new(Tokenizer::bytes().unwrap()));
    let slow = |i: usize| StructuredOutput::Regex(format!("{i}{}", "(foo|bar)+[a-z]{1,3}".repeat(40_000)));
    let others: Vec<_> = (0..3)
        .map(|i| {
            let grammars = grammars.clone();
            thread::spawn(move || grammars.compile(&slow(i)).map(drop))
        })
        .collect();
    let begin = Instant::now();
    grammars.compile(&StructuredOutput::Regex("a+".into())).unwrap();
    assert!(begin.elapsed() < Duration::from_secs(8), "{:?}", begin.elapsed());
    for other in others {
        let _ = other.join().unwrap();
    }
}

#[test]
fn errors_are_short() {
    let long = anyhow::anyhow!("x".repeat(100_000));
    assert!(reason(&long).len() < 1_000);
}
