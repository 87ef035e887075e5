//! Compiles a JSON schema to a grammar. All texts of the grammar satisfy the schema.
//!
//! ```text
//! text ─► Json ─► Schemas: which values satisfy a goal (a set of parts of the schema), by their kind
//!                    └─► Values: a rule for each goal ─► emit: llguidance's grammar
//! ```
//!
//! llguidance has a compiler of its own. It reads numbers as floats, allows numbers of any length, and allows texts
//! that cannot end. This compiler names every keyword that it does not understand in an error, and ignores only
//! annotations.

mod arguments;
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
use shape::Goal;
use values::Values;

pub(super) use arguments::ArgumentForm;
pub(super) use rules::Item;

/// The white space that may stand between the tokens of JSON, as in Outlines: nothing or one blank. If line breaks and
/// indentation were allowed, small models would write blanks until the token limit cuts the text off.
const WHITE_SPACE: &str = " ";

/// Compiles the grammar of a schema.
///
/// # Errors
/// The text is not JSON, or the schema is wrong, is not supported, is too large, or allows no text.
pub(super) fn compile(text: &str) -> Result<GrammarInit, String> {
    let mut texts = Texts::new();
    let value = texts.value(text)?;
    texts.finish(vec![value])
}

/// Builds a grammar of values that follow schemas, and of the text around them.
pub(super) struct Texts {
    grammar: Grammar,
    start: RuleRef,
    /// A regular expression of the white space between terminals. It is the same for all values.
    white_space: Option<Option<String>>,
}

impl Texts {
    pub fn new() -> Self {
        let mut grammar = Grammar::default();
        // The first rule is the start rule.
        let start = grammar.reserve();
        Self { grammar, start, white_space: None }
    }

    /// Returns the item of a value that follows a schema.
    ///
    /// # Errors
    /// The schema is not JSON, wrong, not supported, or too large, or it asks for other white space than an earlier
    /// schema.
    pub fn value(&mut self, text: &str) -> Result<Item, String> {
        self.write(text, |values, goal| values.value(goal))
    }

    /// Returns the items of the arguments of a function that follow a schema, each in tags.
    ///
    /// # Errors
    /// As [`Self::value`], or the form cannot write the values.
    pub fn arguments(&mut self, text: &str, form: &ArgumentForm) -> Result<Vec<Item>, String> {
        self.write(text, |values, goal| values.arguments(goal, form))
    }

    /// Adds the rules that `part` writes for the values of a schema.
    fn write<T>(
        &mut self,
        text: &str,
        part: impl FnOnce(&mut Values, &Goal) -> Result<T, String>,
    ) -> Result<T, String> {
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
        let mut values = Values::new(grammar, schemas, options.item_separator, options.key_separator);
        let items = part(&mut values, &goal)?;
        self.grammar = values.finish()?;
        Ok(items)
    }

    /// Returns the item of this text.
    pub fn literal(&mut self, text: &str) -> Item {
        self.grammar.literal(text)
    }

    /// Returns the item of one of these sequences.
    pub fn either(&mut self, alternatives: Vec<Vec<Item>>) -> Item {
        Item::Rule(self.grammar.rule(alternatives))
    }

    /// Returns the items of any number of repetitions of a part.
    pub fn repeated(&mut self, part: Item) -> Vec<Item> {
        self.grammar.repeat(part, 0, None)
    }

    /// Returns the grammar of the texts that consist of these parts in order.
    ///
    /// # Errors
    /// No such text exists, or the grammar is too large.
    pub fn finish(mut self, parts: Vec<Item>) -> Result<GrammarInit, String> {
        self.grammar.fill(self.start, vec![parts]);
        let white_space = match self.white_space {
            Some(Some(pattern)) => RegexAst::Regex(pattern),
            Some(None) | None => RegexAst::NoMatch,
        };
        emit::emit(&self.grammar, white_space)
    }
}

/// The options of `x-guidance`.
struct Options {
    /// A regular expression of the white space between terminals, if there may be any.
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
