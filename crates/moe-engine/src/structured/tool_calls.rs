//! The grammar of tool calls: JSON between tags (Hermes), each with the arguments of its function's schema.
//!
//! ```text
//! <tool_call>
//! {"name": "f", "arguments": {"x": 1}}
//! </tool_call>
//! ```

use llguidance::api::GrammarInit;
use serde_json::json;

use super::output::Function;
use super::schema::Texts;
use crate::chat::{CALL, END_CALL};

/// The grammar of at least one call, or of exactly one.
pub(super) fn compile(functions: &[Function], parallel: bool) -> Result<GrammarInit, String> {
    if functions.is_empty() {
        return Err("expected at least one function".into());
    }
    let mut texts = Texts::new();
    let end = texts.literal(&format!("}}\n{END_CALL}"));
    let mut calls = Vec::with_capacity(functions.len());
    for Function { name, parameters } in functions {
        let name = json!(name);
        let begin = texts.literal(&format!("{CALL}\n{{\"name\": {name}, \"arguments\": "));
        let arguments = texts.value(parameters);
        let arguments =
            arguments.map_err(|reason| format!("the parameters of the function {name}: {reason}"))?;
        calls.push(vec![begin, arguments, end]);
    }
    let call = texts.either(calls);
    let mut parts = vec![call];
    if parallel {
        let between = texts.literal("\n");
        let further = texts.either(vec![vec![between, call]]);
        parts.extend(texts.repeated(further));
    }
    texts.finish(parts)
}

#[cfg(test)]
mod tests {
    use super::super::{Constraint, Grammars, StructuredOutput};
    use super::*;
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

    /// How much of a text follows the grammar, and whether it is complete and may be.
    fn follow(parallel: bool, text: &str) -> (usize, bool, bool) {
        follow_calls(functions(), parallel, text)
    }

    fn follow_calls(functions: Vec<Function>, parallel: bool, text: &str) -> (usize, bool, bool) {
        let tokenizer = Tokenizer::bytes().unwrap();
        let output = StructuredOutput::ToolCalls { functions, parallel };
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
        assert_eq!(follow(false, f), (f.len(), true, false), "one call, and nothing behind it");
        assert_eq!(follow(true, f), (f.len(), false, true));
        let both = format!("{g}\n{f}");
        assert_eq!(follow(true, &both), (both.len(), false, true));
        assert_eq!(follow(false, g).0, g.len());
        let wrong = f.replace("12", "\"12\"");
        assert_eq!(follow(true, &wrong).0, f.find("12").unwrap());
        assert_eq!(follow(true, &f.replace("\"f\"", "\"h\"")).0, f.find("f\"").unwrap());
        assert_eq!(follow(true, "Hi").0, 0);
    }

    /// Arguments have the guarantees of structured output: numbers are exact, and each function has definitions of its own.
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

    #[test]
    fn what_is_wrong_names_the_function() {
        let wrong = [Function { name: "f".into(), parameters: "5".into() }];
        let error = compile(&wrong, true).err().unwrap();
        assert_eq!(error, "the parameters of the function \"f\": expected a JSON object, got 5");
        assert!(compile(&[], true).is_err());
    }
}
