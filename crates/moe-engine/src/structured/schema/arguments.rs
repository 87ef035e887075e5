//! Writes the rules of the arguments of a tool call in the forms that put each argument in tags. Strings have no
//! quotation marks there. All texts can be read back, and what is read satisfies the schema.
//!
//! ```text
//! <parameter=city>
//! Rome
//! </parameter>
//! ```
//!
//! A string is written as it is. So the texts of a string leave out its closing tag, and also the texts that the reader
//! would take for a value of another type that the schema allows.

use std::collections::{BTreeSet, HashSet};

use llguidance::derivre::RegexAst;

use super::number::Numbers;
use super::rules::Item;
use super::shape::{Goal, Objects, Shape};
use super::text::Strings;
use super::values::Values;

/// The tags of the arguments of one function, and how the reader takes them.
pub(in crate::structured) struct ArgumentForm<'a> {
    /// The text before the name of an argument.
    pub before_name: String,
    /// The tag that ends the name.
    pub name_close: &'a str,
    /// The text between that tag and the value.
    pub before_value: String,
    /// The tag that ends the value.
    pub value_close: &'a str,
    /// A line end on either side of the value belongs to the form.
    pub lines: bool,
    /// Returns the types that the reader knows of an argument. If there are none, it takes any.
    pub types: &'a dyn Fn(&str) -> BTreeSet<&'a str>,
}

/// What surrounds the value of an argument.
struct Around {
    open: String,
    close: String,
    /// A line end on either side of the value belongs to the form.
    lines: bool,
}

impl<'d> Values<'d> {
    /// Returns the items of all arguments of a function. They are the named members of the object, each once and in
    /// order. Members without a name in the schema are left out, also where the schema would allow them.
    ///
    /// # Errors
    /// The schema is wrong, not supported, or too large, or the form cannot write its values.
    pub fn arguments(&mut self, goal: &Goal, form: &ArgumentForm) -> Result<Vec<Item>, String> {
        let shape = self.schemas.shape(goal)?;
        let [object] = &shape.objects[..] else {
            return Err("expected the schema of one object, without alternatives".into());
        };
        let names = names(object);
        let required: HashSet<&str> = object.required.iter().copied().collect();
        if !object.names.is_empty()
            || object.least > required.len()
            || object.most.is_some_and(|most| most < names.len())
        {
            return Err(
                "propertyNames, minProperties and maxProperties are not supported where each argument \
                        is in tags"
                    .into(),
            );
        }
        let mut items = Vec::with_capacity(names.len());
        for name in names {
            let goal = self.schemas.member(object, name)?;
            let alternatives = self.argument(name, &goal, form).map_err(|e| format!("{name}: {e}"))?;
            let none = (!required.contains(name)).then(Vec::new);
            items.push(Item::Rule(self.grammar.rule(none.into_iter().chain(alternatives).collect())));
        }
        Ok(items)
    }

    /// Returns the texts of one argument.
    fn argument(&mut self, name: &str, goal: &Goal, form: &ArgumentForm) -> Result<Vec<Vec<Item>>, String> {
        if name.trim() != name || name.is_empty() || name.contains(form.name_close) {
            return Err("an argument in tags cannot have this name".into());
        }
        let shape = self.schemas.shape(goal)?;
        let types = (form.types)(name);
        let around = Around {
            open: format!("{}{name}{}{}", form.before_name, form.name_close, form.before_value),
            close: form.value_close.to_string(),
            lines: form.lines,
        };
        // The reader takes everything for a string.
        let text_only = types.iter().copied().eq(["string"]);
        let mut scalars = Vec::new();
        if !text_only {
            for (there, word) in [(shape.null, "null"), (shape.no, "false"), (shape.yes, "true")] {
                scalars.extend(there.then(|| RegexAst::Literal(word.into())));
            }
            scalars.extend(shape.numbers.iter().map(Numbers::texts));
        }
        for strings in &shape.strings {
            scalars.push(self.raw(strings, &types, &around));
        }
        let lists_or_objects = !shape.arrays.is_empty() || !shape.objects.is_empty();
        let nested = lists_or_objects && !text_only;
        if nested && shape.strings.iter().any(|strings| *strings != Strings::default()) {
            return Err(
                "strings with conditions next to lists or objects are not supported where each argument \
                        is in tags"
                    .into(),
            );
        }
        match nested {
            false => Ok(self.scalar(scalars, &around)),
            true => self.nested(&shape, scalars, &around),
        }
    }

    /// Returns the argument as one terminal, so that no white space can come between its tags and its value.
    fn scalar(&mut self, scalars: Vec<RegexAst>, around: &Around) -> Vec<Vec<Item>> {
        if scalars.is_empty() {
            return Vec::new();
        }
        let open = RegexAst::Literal(around.open.clone());
        let texts = RegexAst::Concat(vec![open, around.closed(RegexAst::Or(scalars))]);
        vec![vec![self.grammar.terminal(texts)]]
    }

    /// Returns the argument where it may be a list or an object.
    fn nested(
        &mut self,
        shape: &Shape<'d>,
        scalars: Vec<RegexAst>,
        around: &Around,
    ) -> Result<Vec<Vec<Item>>, String> {
        let open = self.grammar.literal(&around.open);
        let mut alternatives = Vec::new();
        if !scalars.is_empty() {
            let texts = around.closed(RegexAst::Or(scalars));
            alternatives.push(vec![open, self.grammar.terminal(texts)]);
        }
        let mut values = Vec::with_capacity(shape.arrays.len() + shape.objects.len());
        for array in &shape.arrays {
            values.push(self.array(array)?);
        }
        for object in &shape.objects {
            values.push(self.object(object)?);
        }
        let value = Item::Rule(self.grammar.rule(values));
        let close = self.grammar.literal(&around.close);
        alternatives.push(vec![open, value, close]);
        if around.lines {
            let line = self.grammar.literal("\n");
            let close = self.grammar.literal(&format!("\n{}", around.close));
            alternatives.push(vec![open, line, value, close]);
        }
        Ok(alternatives)
    }

    /// Returns the strings that the reader takes for these strings.
    fn raw(&self, strings: &Strings, types: &BTreeSet<&str>, around: &Around) -> RegexAst {
        let mut not = vec![RegexAst::Concat(vec![any(), RegexAst::Literal(around.close.clone()), any()])];
        let read_as = |names: &[&str]| types.is_empty() || names.iter().any(|name| types.contains(name));
        let others = [
            (&["null"][..], r"\s*(null|None)\s*"),
            (&["boolean"], r"\s*(true|false|True|False)\s*"),
            (&["integer", "number"], r"\s*-?[0-9]+(\.[0-9]+)?([eE][+\-]?[0-9]+)?\s*"),
            (&["array"], r"(?s:\s*\[.*)"),
            (&["object"], r"(?s:\s*\{.*)"),
        ];
        not.extend(
            others
                .iter()
                .filter(|(names, _)| read_as(names))
                .map(|(_, texts)| RegexAst::Regex((*texts).to_string())),
        );
        let texts = self.schemas.rules.texts(strings);
        RegexAst::And(vec![texts, RegexAst::Not(Box::new(RegexAst::Or(not)))])
    }
}

impl Around {
    /// Returns the values with what comes after them. If line ends belong to the form, the value may be on lines of its
    /// own. Without these lines it neither begins nor ends with a line end, because the reader would drop it.
    fn closed(&self, values: RegexAst) -> RegexAst {
        let close = RegexAst::Literal(self.close.clone());
        if !self.lines {
            return RegexAst::Concat(vec![values, close]);
        }
        let line = || RegexAst::Literal("\n".into());
        let edges = RegexAst::Regex(r"(?s:\n.*|.*\n)".into());
        let without = RegexAst::And(vec![values.clone(), RegexAst::Not(Box::new(edges))]);
        let with = RegexAst::Concat(vec![line(), values, line()]);
        RegexAst::Concat(vec![RegexAst::Or(vec![with, without]), close])
    }
}

/// Returns the names of properties and of required members, in order.
fn names<'d>(object: &Objects<'d>) -> Vec<&'d str> {
    let properties = object.members.iter().flat_map(|members| members.names.iter().copied());
    let mut known = HashSet::new();
    properties.chain(object.required.iter().copied()).filter(|name| known.insert(*name)).collect()
}

fn any() -> RegexAst {
    RegexAst::Regex("(?s:.*)".into())
}
