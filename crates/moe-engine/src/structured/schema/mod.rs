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
use rules::{Grammar, RuleRef};
use schemas::Schemas;
use values::Values;

pub(super) use rules::Item;

/// White space that may stand between the tokens of JSON, as Outlines has it: nothing or one blank. Were line breaks with
/// their indentation allowed, small models would go on with blanks until the limit of tokens cuts the text off.
const WHITE_SPACE: &str = " ";

/// The grammar of a schema.
///
/// # Errors
/// It is not JSON, wrong, not supported, too large, or allows no text.
pub(super) fn compile(text: &str) -> Result<GrammarInit, String> {
    let mut texts = Texts::new();
    let value = texts.value(text)?;
    texts.finish(vec![value])
}

/// A grammar of values that follow schemas, and of text around them.
pub(super) struct Texts {
    grammar: Grammar,
    start: RuleRef,
    /// What may stand between terminals, as a regular expression; the same for all values.
    white_space: Option<Option<String>>,
}

impl Texts {
    pub fn new() -> Self {
        let mut grammar = Grammar::default();
        // The first rule is the start.
        let start = grammar.reserve();
        Self { grammar, start, white_space: None }
    }

    /// A value that follows a schema.
    ///
    /// # Errors
    /// The schema is not JSON, wrong, not supported, too large, or wants other white space than an earlier one.
    pub fn value(&mut self, text: &str) -> Result<Item, String> {
        let schema = Json::read(text)?;
        match schema {
            Json::Object(_) | Json::Bool(true) => (),
            Json::Bool(false) => return Err("the schema false allows no text".into()),
            other => return Err(format!("expected a JSON object, got {}", other.short())),
        }
        let options = Options::read(schema.get("x-guidance"))?;
        if *self.white_space.get_or_insert_with(|| options.white_space.clone()) != options.white_space {
            return Err("x-guidance: other schemas of the same text have other white space".into());
        }
        let mut schemas = Schemas::new(&schema, options.coerce_one_of);
        let goal = shape::all(vec![schemas.schema(&schema)]);
        let grammar = std::mem::take(&mut self.grammar);
        let (grammar, value) =
            Values::write(grammar, schemas, goal, options.item_separator, options.key_separator)?;
        self.grammar = grammar;
        Ok(Item::Rule(value))
    }

    /// This text.
    pub fn literal(&mut self, text: &str) -> Item {
        self.grammar.literal(text)
    }

    /// One of these sequences.
    pub fn either(&mut self, alternatives: Vec<Vec<Item>>) -> Item {
        Item::Rule(self.grammar.rule(alternatives))
    }

    /// Any number of a part after each other.
    pub fn repeated(&mut self, part: Item) -> Vec<Item> {
        self.grammar.repeat(part, 0, None)
    }

    /// The grammar of the texts that are these parts after each other.
    ///
    /// # Errors
    /// There is no such text, or the grammar is too large.
    pub fn finish(mut self, parts: Vec<Item>) -> Result<GrammarInit, String> {
        self.grammar.fill(self.start, vec![parts]);
        let white_space = match self.white_space {
            Some(Some(pattern)) => RegexAst::Regex(pattern),
            Some(None) | None => RegexAst::NoMatch,
        };
        emit::emit(&self.grammar, white_space)
    }
}

/// What `x-guidance` says.
struct Options {
    /// What may stand between terminals, if anything.
    white_space: Option<String>,
    item_separator: RegexAst,
    key_separator: RegexAst,
    coerce_one_of: bool,
}

impl Options {
    fn read(options: Option<&Json>) -> Result<Self, String> {
        let mut flexible = true;
        let mut pattern = WHITE_SPACE.to_string();
        let mut read = Self {
            white_space: None,
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
            read.white_space = Some(pattern);
        }
        Ok(read)
    }
}
