//! Writes a rule for each goal. All places with the same goal use the same rule.

use std::collections::HashMap;

use llguidance::derivre::RegexAst;

use super::rules::{Grammar, Item, RuleRef};
use super::schemas::Schemas;
use super::shape::{Arrays, Goal};
use super::text::quoted;

/// The largest number of goals of a schema.
const MOST_GOALS: usize = 20_000;
/// The largest number of values that a list without equal items can choose from. llguidance has a bit for each.
const MOST_DISTINCT: usize = 64;

/// Writes the rules of a schema.
pub(super) struct Values<'d> {
    pub schemas: Schemas<'d>,
    pub grammar: Grammar,
    of_goals: HashMap<Goal, RuleRef>,
    /// The rules that are not filled in yet.
    left: Vec<(Goal, RuleRef)>,
    pub comma: Item,
    pub colon: Item,
}

impl<'d> Values<'d> {
    /// Starts with a grammar to which the rules are added.
    pub fn new(mut grammar: Grammar, schemas: Schemas<'d>, comma: RegexAst, colon: RegexAst) -> Self {
        let comma = grammar.terminal(comma);
        let colon = grammar.terminal(colon);
        Self { schemas, grammar, of_goals: HashMap::new(), left: Vec::new(), comma, colon }
    }

    /// Writes the rules that are referred to and not filled in yet, and returns the grammar.
    ///
    /// # Errors
    /// The schema is wrong, not supported, or too large.
    pub fn finish(mut self) -> Result<Grammar, String> {
        while let Some((goal, rule)) = self.left.pop() {
            let alternatives = self.alternatives(&goal)?;
            self.grammar.fill(rule, alternatives);
        }
        Ok(self.grammar)
    }

    /// Returns the rule of a goal.
    ///
    /// # Errors
    /// There are too many goals.
    pub fn value(&mut self, goal: &Goal) -> Result<Item, String> {
        if let Some(&rule) = self.of_goals.get(goal) {
            return Ok(Item::Rule(rule));
        }
        if self.of_goals.len() == MOST_GOALS {
            return Err(format!("the schema is too large: it has more than {MOST_GOALS} different parts"));
        }
        let rule = self.grammar.reserve();
        self.of_goals.insert(goal.clone(), rule);
        self.left.push((goal.clone(), rule));
        Ok(Item::Rule(rule))
    }

    fn alternatives(&mut self, goal: &Goal) -> Result<Vec<Vec<Item>>, String> {
        let shape = self.schemas.shape(goal)?;
        self.schemas.spend(shape.len())?;
        let mut scalars = Vec::new();
        for (there, word) in [(shape.null, "null"), (shape.no, "false"), (shape.yes, "true")] {
            scalars.extend(there.then(|| RegexAst::Literal(word.into())));
        }
        scalars.extend(shape.numbers.iter().map(super::number::Numbers::texts));
        scalars.extend(shape.strings.iter().map(|strings| quoted(self.schemas.rules.texts(strings))));
        let mut alternatives = Vec::new();
        if !scalars.is_empty() {
            alternatives.push(vec![self.grammar.terminal(RegexAst::Or(scalars))]);
        }
        for array in &shape.arrays {
            alternatives.push(self.array(array)?);
        }
        for object in &shape.objects {
            alternatives.push(self.object(object)?);
        }
        Ok(alternatives)
    }

    pub fn array(&mut self, array: &Arrays) -> Result<Vec<Item>, String> {
        let open = self.grammar.literal("[");
        let close = self.grammar.literal("]");
        let items = match array.unique && array.most.is_none_or(|most| most > 1) {
            true => self.distinct_items(array)?,
            false => self.items(array)?,
        };
        Ok([vec![open], items, vec![close]].concat())
    }

    fn items(&mut self, array: &Arrays) -> Result<Vec<Item>, String> {
        let least = array.least;
        let most = array.most;
        let prefix = array.prefix.len().min(most.unwrap_or(usize::MAX));
        let item = self.value(&array.rest)?;
        let after = Item::Rule(self.grammar.rule(vec![vec![self.comma, item]]));
        let left = most.map(|most| most - prefix);
        let mut rest = match prefix {
            0 if left == Some(0) => Vec::new(),
            0 => {
                let more = self.grammar.repeat(after, least.max(1) - 1, left.map(|left| left - 1));
                let some = [vec![item], more].concat();
                let none = (least == 0).then(Vec::new);
                vec![Item::Rule(self.grammar.rule(none.into_iter().chain([some]).collect()))]
            }
            _ => self.grammar.repeat(after, least.saturating_sub(prefix), left),
        };
        for at in (0..prefix).rev() {
            let comma = (at > 0).then_some(self.comma);
            let item = self.value(&array.prefix[at])?;
            let some = comma.into_iter().chain([item]).chain(rest).collect();
            let none = (at >= least).then(Vec::new);
            rest = vec![Item::Rule(self.grammar.rule(none.into_iter().chain([some]).collect()))];
        }
        Ok(rest)
    }

    /// Returns the items of a list without equal items. Its items must come from a list of values, because a grammar
    /// cannot compare other values.
    fn distinct_items(&mut self, array: &Arrays) -> Result<Vec<Item>, String> {
        let hard = || {
            format!(
                "uniqueItems is supported where items are at most {MOST_DISTINCT} values, such as an enum's, and where maxItems is at most 1: leave it out, or list the values"
            )
        };
        if !array.prefix.is_empty() {
            return Err(hard());
        }
        let shape = self.schemas.shape(&array.rest)?;
        if !shape.arrays.is_empty() || !shape.objects.is_empty() {
            return Err(hard());
        }
        let mut values = Vec::new();
        for (there, word) in [(shape.null, "null"), (shape.no, "false"), (shape.yes, "true")] {
            values.extend(there.then(|| RegexAst::Literal(word.into())));
        }
        let mut numbers: Vec<_> = Vec::new();
        for number in &shape.numbers {
            numbers.extend(number.list(MOST_DISTINCT).ok_or_else(hard)?);
        }
        numbers.sort();
        numbers.dedup();
        values.extend(numbers.into_iter().map(|number| RegexAst::Literal(number.plain())));
        let mut strings: Vec<&str> = Vec::new();
        for string in &shape.strings {
            strings.push(string.text.as_deref().ok_or_else(hard)?);
        }
        strings.sort_unstable();
        strings.dedup();
        values.extend(strings.into_iter().map(|text| quoted(RegexAst::Literal(text.into()))));
        if values.len() > MOST_DISTINCT {
            return Err(hard());
        }
        let most = array.most.unwrap_or(usize::MAX).min(values.len());
        let values = values.into_iter().map(|value| self.grammar.terminal(value)).collect();
        Ok(vec![Item::Rule(self.grammar.distinct(values, self.comma, array.least, most))])
    }
}
