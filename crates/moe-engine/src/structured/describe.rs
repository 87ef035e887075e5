//! Translates a structured output to the types of llguidance.

use llguidance::api::{GrammarInit, TopLevelGrammar};
use llguidance::toktrie::TokTrie;

use super::output::StructuredOutput;
use super::{bounds, perl, schema, tool_calls};

/// The largest number of bytes of a schema, an expression, a list or a grammar.
const LONGEST: usize = 1 << 20;
/// The schema of an object with any members.
const ANY_OBJECT: &str = r#"{"type": "object"}"#;

/// Returns the output in the types of llguidance. It may use special tokens of the vocabulary.
pub(super) fn describe(output: &StructuredOutput, tokens: &TokTrie) -> Result<GrammarInit, String> {
    if output.text_len() > LONGEST {
        return Err(format!("it has {} bytes, and at most {LONGEST} are taken", output.text_len()));
    }
    let grammar = match output {
        StructuredOutput::JsonObject => return schema::compile(ANY_OBJECT),
        StructuredOutput::JsonSchema(text) => return schema::compile(text),
        StructuredOutput::Regex(text) if text.is_empty() => return Err("it is empty".into()),
        StructuredOutput::Regex(text) => TopLevelGrammar::from_regex(&perl::ascii(text)),
        StructuredOutput::Choice(texts) => TopLevelGrammar::from_regex(&alternatives(texts)?),
        StructuredOutput::Grammar(text) => TopLevelGrammar::from_lark(text.clone()),
        StructuredOutput::ToolCalls { parser, functions, parallel } => {
            return tool_calls::compile(parser, functions, *parallel, tokens);
        }
    };
    bounds::check(&grammar)?;
    Ok(GrammarInit::Serialized(grammar))
}

/// Returns a regular expression that matches each of the texts.
fn alternatives(texts: &[String]) -> Result<String, String> {
    if texts.is_empty() || texts.iter().any(String::is_empty) {
        return Err("expected at least one text, and none that is empty".into());
    }
    let escaped = |text: &String| {
        let special = |c: char| c.is_ascii_punctuation() && !matches!(c, '<' | '>' | '/');
        text.chars().flat_map(|c| special(c).then_some('\\').into_iter().chain([c])).collect()
    };
    Ok(texts.iter().map(escaped).collect::<Vec<String>>().join("|"))
}
