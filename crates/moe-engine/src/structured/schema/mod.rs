//! JSON schemas: from their text to a grammar whose texts are all valid.
//!
//! ```text
//! text ─► Json ─► Schemas: which values satisfy a goal (a set of parts of the schema), by their kind
//!                    └─► Values: a rule for each goal ─► emit: llguidance's grammar
//! ```
//!
//! llguidance has a compiler of its own, which reads numbers as floats, lets numbers be endless, and allows texts that
//! cannot end. What is not understood here is refused by its name; only annotations are ignored.

mod decimal;
mod document;
mod ecmascript;
mod emit;
mod format;
mod json;
mod keywords;
mod language;
mod multiple;
mod number;
mod objects;
mod one_of;
mod pattern;
mod range;
mod rules;
mod schemas;
mod shape;
#[cfg(test)]
mod tests;
mod text;
mod values;

use llguidance::api::GrammarInit;
use llguidance::derivre::RegexAst;

use json::Json;
use schemas::Schemas;
use values::Values;

/// White space that may stand between the tokens of JSON, as Outlines has it: nothing or one blank. Were line breaks with
/// their indentation allowed, small models would go on with blanks until the limit of tokens cuts the text off.
const WHITE_SPACE: &str = " ";

/// The grammar of a schema.
///
/// # Errors
/// It is not JSON, wrong, not supported, too large, or allows no text.
pub(super) fn compile(text: &str) -> Result<GrammarInit, String> {
    let schema = Json::read(text)?;
    match schema {
        Json::Object(_) | Json::Bool(true) => (),
        Json::Bool(false) => return Err("the schema false allows no text".into()),
        other => return Err(format!("expected a JSON object, got {}", other.short())),
    }
    let options = Options::read(schema.get("x-guidance"))?;
    let mut schemas = Schemas::new(&schema, options.coerce_one_of);
    let goal = shape::all(vec![schemas.schema(&schema)]);
    let grammar = Values::write(schemas, goal, options.item_separator, options.key_separator)?;
    emit::emit(&grammar, options.white_space)
}

/// What `x-guidance` says.
struct Options {
    white_space: RegexAst,
    item_separator: RegexAst,
    key_separator: RegexAst,
    coerce_one_of: bool,
}

impl Options {
    fn read(options: Option<&Json>) -> Result<Self, String> {
        let mut flexible = true;
        let mut pattern = WHITE_SPACE.to_string();
        let mut read = Self {
            white_space: RegexAst::NoMatch,
            item_separator: RegexAst::Literal(",".into()),
            key_separator: RegexAst::Literal(":".into()),
            coerce_one_of: false,
        };
        let wrong =
            |name: &str, value: &Json| format!("x-guidance: {name} {} is not supported", value.short());
        let members = match options {
            None => &[][..],
            Some(options) => options
                .object()
                .ok_or_else(|| format!("x-guidance: expected an object, got {}", options.short()))?,
        };
        for (name, value) in members {
            match (&name[..], value) {
                ("whitespace_flexible", Json::Bool(value)) => flexible = *value,
                ("coerce_one_of", Json::Bool(value)) => read.coerce_one_of = *value,
                ("whitespace_pattern", Json::String(value)) => pattern = value.clone(),
                ("item_separator", Json::String(value)) => {
                    read.item_separator = RegexAst::Regex(value.clone())
                }
                ("key_separator", Json::String(value)) => read.key_separator = RegexAst::Regex(value.clone()),
                (_, Json::Null) => (),
                _ => return Err(wrong(name, value)),
            }
        }
        if flexible {
            read.white_space = RegexAst::Regex(pattern);
        }
        Ok(read)
    }
}
