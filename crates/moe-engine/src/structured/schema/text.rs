//! The conditions of strings: lengths, expressions and single texts. It also decides whether any string satisfies them.

use std::collections::HashMap;

use llguidance::derivre::{JsonQuoteOptions, Regex, RegexAst, RegexBuilder};

use super::pattern::Pattern;
use super::{format, language};

/// The largest amount of work to decide whether expressions have a common text.
const MOST_WORK: u64 = 50_000;

/// An expression in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct RuleId(usize);

/// The conditions of a string.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Strings {
    /// The least and the largest number of characters.
    pub least: usize,
    pub most: Option<usize>,
    /// The single text that is allowed.
    pub text: Option<String>,
    /// The expressions, which the string must all match, sorted.
    pub rules: Vec<RuleId>,
}

impl Strings {
    pub fn one(text: &str) -> Self {
        Self { text: Some(text.to_string()), ..Self::default() }
    }

    pub fn of_rule(rule: RuleId) -> Self {
        Self { rules: vec![rule], ..Self::default() }
    }

    /// Returns the strings that satisfy both, or `None` if there is certainly no such string.
    pub fn and(&self, other: &Self) -> Option<Self> {
        let text = match (&self.text, &other.text) {
            (Some(a), Some(b)) if a != b => return None,
            (a, b) => a.clone().or_else(|| b.clone()),
        };
        let least = self.least.max(other.least);
        let most = self.most.into_iter().chain(other.most).min();
        if most.is_some_and(|most| most < least) {
            return None;
        }
        let mut rules = [&self.rules[..], &other.rules].concat();
        rules.sort_unstable();
        rules.dedup();
        Some(Self { least, most, text, rules })
    }
}

/// The table of the expressions of a schema.
#[derive(Default)]
pub(super) struct Rules {
    texts: Vec<RegexAst>,
    ids: HashMap<String, RuleId>,
    /// The automata that match all of several expressions.
    matchers: HashMap<Vec<RuleId>, Regex>,
    empty: HashMap<Strings, bool>,
}

impl Rules {
    /// Adds the expression of a `pattern`.
    ///
    /// # Errors
    /// The expression is not well-formed or uses an unsupported feature.
    pub fn pattern(&mut self, text: &str) -> Result<RuleId, String> {
        self.add(format!("/{text}/"), || language::texts(&Pattern::read(text)?))
    }

    /// Adds the expression of a `format` that is enforced.
    pub fn format(&mut self, name: &str) -> Result<Option<RuleId>, String> {
        format::texts(name).map(|texts| self.add(name.to_string(), || Ok(texts))).transpose()
    }

    fn add(
        &mut self,
        name: String,
        texts: impl FnOnce() -> Result<RegexAst, String>,
    ) -> Result<RuleId, String> {
        if let Some(&id) = self.ids.get(&name) {
            return Ok(id);
        }
        let texts = texts()?;
        // An expression that the regex crate does not accept is reported here.
        RegexBuilder::new().mk(&texts).map_err(|e| format!("{name}: {e:#}"))?;
        let id = RuleId(self.texts.len());
        self.texts.push(texts);
        self.ids.insert(name, id);
        Ok(id)
    }

    /// Returns the texts of the strings, without quotation marks.
    pub fn texts(&self, strings: &Strings) -> RegexAst {
        if let Some(text) = &strings.text {
            return RegexAst::Literal(text.clone());
        }
        let mut all: Vec<RegexAst> = strings.rules.iter().map(|rule| self.texts[rule.0].clone()).collect();
        if all.is_empty() || strings.least > 0 || strings.most.is_some() {
            all.push(RegexAst::Regex(length(strings.least, strings.most)));
        }
        if all.len() == 1 { all.swap_remove(0) } else { RegexAst::And(all) }
    }

    /// Returns whether no string satisfies the conditions.
    ///
    /// # Errors
    /// The question is too hard to decide.
    pub fn is_empty(&mut self, strings: &Strings) -> Result<bool, String> {
        if let Some(text) = &strings.text {
            let length = text.chars().count();
            let fits = length >= strings.least && strings.most.is_none_or(|most| length <= most);
            return Ok(!fits || !self.matches(&strings.rules, text)?);
        }
        if strings.most.is_some_and(|most| most < strings.least) {
            return Ok(true);
        }
        if strings.rules.is_empty() {
            return Ok(false);
        }
        if let Some(&empty) = self.empty.get(strings) {
            return Ok(empty);
        }
        let empty = self.have_none(&self.texts(strings))?;
        self.empty.insert(strings.clone(), empty);
        Ok(empty)
    }

    /// Returns whether the set of texts is empty.
    ///
    /// # Errors
    /// The question is too hard to decide.
    pub fn have_none(&self, texts: &RegexAst) -> Result<bool, String> {
        let mut builder = RegexBuilder::new();
        let all = builder.mk(texts).map_err(|e| format!("{e:#}"))?;
        let regex = builder.into_regex_limited(all, MOST_WORK);
        let hard = |_| "it is too hard to tell whether a string can match what it must".to_string();
        Ok(regex.map_err(hard)?.always_empty())
    }

    /// Returns whether a text matches all of the expressions.
    ///
    /// # Errors
    /// The expressions are too large.
    pub fn matches(&mut self, rules: &[RuleId], text: &str) -> Result<bool, String> {
        if rules.is_empty() {
            return Ok(true);
        }
        if !self.matchers.contains_key(rules) {
            let all = RegexAst::And(rules.iter().map(|rule| self.texts[rule.0].clone()).collect());
            let mut builder = RegexBuilder::new();
            let all = builder.mk(&all).map_err(|e| format!("{e:#}"))?;
            let regex = builder.into_regex_limited(all, MOST_WORK).map_err(|e| format!("{e:#}"))?;
            self.matchers.insert(rules.to_vec(), regex);
        }
        Ok(self.matchers.get_mut(rules).is_some_and(|regex| regex.is_match(text)))
    }
}

/// Returns an expression for texts of at least `least` and at most `most` characters.
fn length(least: usize, most: Option<usize>) -> String {
    match most {
        None if least == 0 => "(?s:.*)".into(),
        most => format!("(?s:.{{{least},{}}})", most.map_or_else(String::new, |most| most.to_string())),
    }
}

/// Returns the texts as JSON writes them.
pub(super) fn quoted(texts: RegexAst) -> RegexAst {
    RegexAst::JsonQuote(Box::new(texts), JsonQuoteOptions::regular())
}
