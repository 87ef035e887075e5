//! The grammar of tool calls. The arguments of each call follow the schema of its function, between the tags of the
//! model's form. They are a JSON object, or each is in tags of its own.
//!
//! ```text
//! <tool_call>
//! {"name": "f", "arguments": {"x": 1}}
//! </tool_call>
//! ```

use llguidance::api::GrammarInit;
use serde_json::json;

use super::output::Function;
use super::schema::{ArgumentForm, Item, Texts};
use crate::chat::{CallBody, CallParser, Schemas, Tags};

/// The largest number of calls of an answer in a form that numbers them.
const MOST_NUMBERED: usize = 32;

/// Compiles the grammar of at least one call, or of exactly one call.
pub(super) fn compile(
    parser: &CallParser,
    functions: &[Function],
    parallel: bool,
) -> Result<GrammarInit, String> {
    parser.check_grammar()?;
    if functions.is_empty() {
        return Err("expected at least one function".into());
    }
    let mut texts = Texts::new();
    let mut calls = Vec::with_capacity(functions.len());
    for function in functions {
        let call = one_call(parser, function, &mut texts);
        calls.push(
            call.map_err(|reason| format!("the parameters of the function {:?}: {reason}", function.name))?,
        );
    }
    let call = texts.either(calls);
    let mut parts = vec![call];
    if parallel {
        let mut further = vec![call];
        if !matches!(parser.body, CallBody::Named { numbered: true, .. }) {
            further.insert(0, texts.literal("\n"));
        }
        let further = texts.either(vec![further]);
        parts.extend(texts.repeated(further));
    }
    if let Some(Tags { open, close }) = &parser.section {
        let line = if matches!(parser.body, CallBody::Arguments(_)) { "\n" } else { "" };
        parts.insert(0, texts.literal(&format!("{open}{line}")));
        parts.push(texts.literal(&format!("{line}{close}")));
    }
    texts.finish(parts)
}

/// Returns the items of one call of a function.
fn one_call(parser: &CallParser, function: &Function, texts: &mut Texts) -> Result<Vec<Item>, String> {
    let Function { name, parameters } = function;
    let CallBody::Arguments(tags) = &parser.body else {
        let mut call = begin(parser, name, texts);
        call.push(texts.value(parameters)?);
        call.push(texts.literal(&end(parser)));
        return Ok(call);
    };
    // A name stands between tags, without quotation marks.
    if name.is_empty() || name.contains(|c: char| c.is_whitespace() || c.is_control() || "<>{}\"".contains(c))
    {
        return Err(format!("the tool-call parser {} cannot write this name of a function", parser.name));
    }
    let schemas = Schemas::new([(&name[..], &parameters[..])]);
    let between = if tags.value.open.is_empty() { "" } else { "\n" };
    let form = ArgumentForm {
        before_name: format!("{}{}", tags.line, tags.key.open),
        name_close: tags.key.close,
        before_value: format!("{between}{}", tags.value.open),
        value_close: tags.value.close,
        lines: tags.lines,
        types: &|argument| schemas.types(name, argument),
    };
    let arguments = texts.arguments(parameters, &form)?;
    let open = texts.literal(&format!("{}{}{name}{}", parser.open, tags.function.open, tags.function.close));
    let close = texts.literal(&format!("{}{}", tags.end, parser.close));
    Ok([vec![open], arguments, vec![close]].concat())
}

/// Returns the text before the arguments, which are a JSON object.
fn begin(parser: &CallParser, name: &str, texts: &mut Texts) -> Vec<Item> {
    let open = parser.open;
    match parser.body {
        CallBody::Named { before, between, numbered: true, .. } => {
            let head = texts.literal(&format!("{open}{before}functions.{name}:"));
            let numbers = (0..MOST_NUMBERED).map(|number| vec![texts.literal(&number.to_string())]).collect();
            vec![head, texts.either(numbers), texts.literal(between)]
        }
        CallBody::Named { before, between, .. } => {
            vec![texts.literal(&format!("{open}{before}{name}{between}"))]
        }
        _ => vec![texts.literal(&format!("{open}\n{{\"name\": {}, \"arguments\": ", json!(name)))],
    }
}

/// Returns the text after the arguments, which are a JSON object.
fn end(parser: &CallParser) -> String {
    let close = parser.close;
    match parser.body {
        CallBody::Named { after, .. } => format!("{after}{close}"),
        _ => format!("}}\n{close}"),
    }
}
