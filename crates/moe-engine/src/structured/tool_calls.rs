//! The grammar of tool calls: JSON between tags (Hermes), each with the arguments of its function's schema.
//!
//! ```text
//! <tool_call>
//! {"name": "f", "arguments": {"x": 1}}
//! </tool_call>
//! ```

use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use serde_json::{Map, Value, json};

use super::Function;
use crate::chat::{CALL, END_CALL};

/// The grammar of at least one call, or of exactly one.
pub(super) fn describe(functions: &[Function], parallel: bool) -> Result<TopLevelGrammar, String> {
    if functions.is_empty() {
        return Err("expected at least one function".into());
    }
    let mut grammars = Vec::with_capacity(1 + functions.len());
    let mut calls = Vec::with_capacity(functions.len());
    for (i, function) in functions.iter().enumerate() {
        let name = json!(function.name);
        let begin = literal(&format!("{CALL}\n{{\"name\": {name}, \"arguments\": "));
        calls.push(format!("{begin} @arguments_{i} {}", literal(&format!("}}\n{END_CALL}"))));
        let arguments = schema(&function.parameters)
            .map_err(|reason| format!("the parameters of the function {name}: {reason}"))?;
        grammars.push(GrammarWithLexer {
            name: Some(format!("arguments_{i}")),
            ..GrammarWithLexer::from_json_schema(arguments)
        });
    }
    let more = if parallel { " (\"\\n\" call)*" } else { "" };
    let text = format!("start: call{more}\ncall: {}\n", calls.join("\n    | "));
    grammars.insert(0, GrammarWithLexer::from_lark(text));
    Ok(TopLevelGrammar { grammars, max_tokens: None })
}

/// The schema of arguments, for llguidance's own compiler.
fn schema(text: &str) -> Result<Value, String> {
    match serde_json::from_str(text) {
        Ok(Value::Object(schema)) => Ok(with_white_space(schema)),
        // Anything goes.
        Ok(Value::Bool(true)) => Ok(with_white_space(Map::new())),
        Ok(Value::Bool(false)) => Err("the schema false allows no text".into()),
        Ok(other) => Err(format!("expected a JSON object, got {other}")),
        Err(e) => Err(format!("it is not JSON: {e}")),
    }
}

/// The schema with little white space, unless it says itself what it wants.
fn with_white_space(mut schema: Map<String, Value>) -> Value {
    let options = schema.entry("x-guidance").or_insert_with(|| json!({}));
    if let Some(options) = options.as_object_mut()
        && !options.contains_key("whitespace_flexible")
    {
        options.entry("whitespace_pattern").or_insert_with(|| " ".into());
    }
    schema.into()
}

/// A literal of Lark, whose strings are those of JSON.
fn literal(text: &str) -> String {
    json!(text).to_string()
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
        let tokenizer = Tokenizer::bytes().unwrap();
        let output = StructuredOutput::ToolCalls { functions: functions(), parallel };
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

    #[test]
    fn what_is_wrong_names_the_function() {
        let wrong = [Function { name: "f".into(), parameters: "5".into() }];
        let error = describe(&wrong, true).unwrap_err();
        assert_eq!(error, "the parameters of the function \"f\": expected a JSON object, got 5");
        assert!(describe(&[], true).is_err());
    }
}
