//! The grammar of tool calls. The arguments of each call follow the schema of its function, between the tags of the
//! model's form. They are a JSON object, or each is in tags of its own.
//!
//! ```text
//! <tool_call>
//! {"name": "f", "arguments": {"x": 1}}
//! </tool_call>
//! ```
//!
//! A tag that is a special token of the vocabulary is written as this token.

use llguidance::api::GrammarInit;
use llguidance::toktrie::TokTrie;
use serde_json::json;

use super::output::Function;
use super::schema::{ArgumentForm, Item, Texts};
use crate::chat::{ArgumentTags, CALL_ARGUMENTS, CHANNEL, CallBody, CallParser, JSON_MESSAGE, Schemas, Tags};

/// The largest number of calls of an answer in a form that numbers them.
const MOST_NUMBERED: usize = 32;

/// Compiles the grammar of at least one call, or of exactly one call. An answer in channels has one call, because it
/// ends there.
///
/// # Errors
/// There is no function, the form cannot write its name or arguments, the schema of a function is wrong or not
/// supported, or the vocabulary lacks a token of the form.
pub(super) fn compile(
    parser: &CallParser,
    functions: &[Function],
    parallel: bool,
    tokens: &TokTrie,
) -> Result<GrammarInit, String> {
    if functions.is_empty() {
        return Err("expected at least one function".into());
    }
    let mut writer = Writer::new(parser, tokens)?;
    let mut calls = Vec::with_capacity(functions.len());
    for function in functions {
        let call = writer.call(function);
        calls.push(
            call.map_err(|reason| format!("the parameters of the function {:?}: {reason}", function.name))?,
        );
    }
    let call = writer.texts.either(calls);
    let around = writer.around();
    let mut parts = writer.text(&[Text::Form(&around.open)]);
    parts.push(call);
    if parallel && !parser.is_channel() {
        let mut further = writer.text(&[Text::Form(around.between)]);
        further.push(call);
        let further = writer.texts.either(vec![further]);
        parts.extend(writer.texts.repeated(further));
    }
    parts.extend(writer.text(&[Text::Form(&around.close)]));
    writer.texts.finish(parts)
}

/// The texts around all calls of an answer, and between two of them.
struct Around {
    open: String,
    between: &'static str,
    close: String,
}

/// A part of the text around arguments.
enum Text<'a> {
    /// It belongs to the form and may contain tags.
    Form(&'a str),
    /// It is what the request gives, and contains no tags.
    Given(&'a str),
}

/// Writes calls of a form as items of a grammar.
struct Writer<'a> {
    parser: &'a CallParser,
    texts: Texts,
    /// The tags of the form that are special tokens of the vocabulary, with their ids.
    special: Vec<(&'static str, u32)>,
    /// Whether calls are objects of one list (Mistral before the tag for arguments existed).
    list: bool,
}

impl<'a> Writer<'a> {
    fn new(parser: &'a CallParser, tokens: &TokTrie) -> Result<Self, String> {
        let special = |tag: &'static str| tokens.get_special_token(tag).map(|id| (tag, id));
        let has = |tag: &str| {
            tokens.get_special_token(tag).is_some() || tokens.token_id_at_bytes(tag.as_bytes()).is_some()
        };
        if let Some(tag) = parser.token_tags().iter().find(|tag| !has(tag)) {
            return Err(format!(
                "the tokenizer has no token {tag:?}, which calls of the tool-call parser {} need; choose the parser of \
                 the calls that this model writes",
                parser.name
            ));
        }
        Ok(Self {
            parser,
            texts: Texts::new(),
            special: parser.tags().into_iter().filter_map(special).collect(),
            list: parser.body == CallBody::Untagged && !has(CALL_ARGUMENTS),
        })
    }

    fn around(&self) -> Around {
        let numbered = matches!(self.parser.body, CallBody::Named { numbered: true, .. });
        let line = if matches!(self.parser.body, CallBody::Arguments(_)) { "\n" } else { "" };
        match (&self.parser.section, &self.parser.body) {
            (_, CallBody::Untagged) if self.list => {
                Around { open: format!("{}[", self.parser.open), between: ", ", close: "]".into() }
            }
            (_, CallBody::Untagged) => Around { open: String::new(), between: "", close: String::new() },
            (Some(Tags { open, close }), _) => Around {
                open: format!("{open}{line}"),
                between: if numbered { "" } else { "\n" },
                close: format!("{line}{close}"),
            },
            (None, _) => Around { open: String::new(), between: "\n", close: String::new() },
        }
    }

    /// Returns the items of a text. A tag that is a special token becomes this token.
    fn text(&mut self, parts: &[Text]) -> Vec<Item> {
        let mut items = Vec::new();
        let mut literal = String::new();
        for part in parts {
            let mut rest = match part {
                Text::Given(text) => {
                    literal += text;
                    continue;
                }
                Text::Form(text) => *text,
            };
            while let Some((at, tag, id)) = self.first_token(rest) {
                literal += &rest[..at];
                items.extend(self.literal(&literal));
                literal.clear();
                items.push(Item::Token(id));
                rest = &rest[at + tag.len()..];
            }
            literal += rest;
        }
        items.extend(self.literal(&literal));
        items
    }

    fn literal(&mut self, text: &str) -> Option<Item> {
        (!text.is_empty()).then(|| self.texts.literal(text))
    }

    /// Returns the first tag in a text that is a special token: its place, the tag and its id.
    fn first_token(&self, text: &str) -> Option<(usize, &'static str, u32)> {
        self.special.iter().filter_map(|(tag, id)| Some((text.find(tag)?, *tag, *id))).min()
    }

    /// Returns the items of one call of a function.
    fn call(&mut self, function: &Function) -> Result<Vec<Item>, String> {
        let Function { name, parameters } = function;
        self.check_name(name)?;
        if let CallBody::Arguments(tags) = &self.parser.body {
            return self.tagged(function, tags);
        }
        let mut call = self.begin(name);
        call.push(self.texts.value(parameters)?);
        let end = self.end();
        call.extend(self.text(&[Text::Form(&end)]));
        Ok(call)
    }

    /// Checks that the form can write the name of a function. In JSON it can write any name.
    fn check_name(&self, name: &str) -> Result<(), String> {
        let fits = |c: char| match self.parser.body {
            CallBody::Untagged => c.is_alphanumeric() || "_-.".contains(c),
            _ => !(c.is_whitespace() || c.is_control() || "<>{}\"".contains(c)),
        };
        if self.parser.body == CallBody::Object || self.list || !name.is_empty() && name.chars().all(fits) {
            return Ok(());
        }
        Err(format!("the tool-call parser {} cannot write this name of a function", self.parser.name))
    }

    /// Returns a call whose arguments are in tags.
    fn tagged(&mut self, function: &Function, tags: &ArgumentTags) -> Result<Vec<Item>, String> {
        let Function { name, parameters } = function;
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
        let arguments = self.texts.arguments(parameters, &form)?;
        let CallParser { open, close, .. } = self.parser;
        let open = self.text(&[
            Text::Form(open),
            Text::Form(tags.function.open),
            Text::Given(name),
            Text::Form(tags.function.close),
        ]);
        let close = self.text(&[Text::Form(tags.end), Text::Form(close)]);
        Ok([open, arguments, close].concat())
    }

    /// Returns the text before the arguments, which are a JSON object.
    fn begin(&mut self, name: &str) -> Vec<Item> {
        let open = self.parser.open;
        let member = format!("{{\"name\": {}, \"arguments\": ", json!(name));
        match self.parser.body {
            CallBody::Named { before, between, numbered: true, .. } => {
                let mut call = self.text(&[
                    Text::Form(open),
                    Text::Form(before),
                    Text::Given("functions."),
                    Text::Given(name),
                    Text::Given(":"),
                ]);
                let numbers = (0..MOST_NUMBERED).map(|number| vec![self.texts.literal(&number.to_string())]);
                let numbers = numbers.collect();
                call.push(self.texts.either(numbers));
                call.extend(self.text(&[Text::Form(between)]));
                call
            }
            CallBody::Named { before, between, .. } => {
                self.text(&[Text::Form(open), Text::Form(before), Text::Given(name), Text::Form(between)])
            }
            CallBody::Untagged if self.list => self.text(&[Text::Given(&member)]),
            CallBody::Untagged => {
                self.text(&[Text::Form(open), Text::Given(name), Text::Form(CALL_ARGUMENTS)])
            }
            CallBody::Channel => {
                let channel = format!("{CHANNEL}commentary {open}");
                self.text(&[
                    Text::Form(&channel),
                    Text::Given(name),
                    Text::Given(" "),
                    Text::Form(JSON_MESSAGE),
                ])
            }
            CallBody::Object | CallBody::Arguments(_) => {
                self.text(&[Text::Form(open), Text::Given("\n"), Text::Given(&member)])
            }
        }
    }

    /// Returns the text after the arguments, which are a JSON object. A call in a channel ends with them: the token
    /// `<|call|>` that follows ends the answer.
    fn end(&self) -> String {
        let close = self.parser.close;
        match self.parser.body {
            CallBody::Named { after, .. } => format!("{after}{close}"),
            CallBody::Untagged if self.list => "}".into(),
            CallBody::Untagged | CallBody::Channel => String::new(),
            CallBody::Object | CallBody::Arguments(_) => format!("}}\n{close}"),
        }
    }
}
