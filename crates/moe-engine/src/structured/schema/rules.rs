//! A grammar that consists of rules of terminals and repetitions.

use std::collections::HashMap;

use llguidance::derivre::RegexAst;

/// The number of copies of a unit in one rule.
const STEP: usize = 4;

/// A rule of [`Grammar`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::structured) struct RuleRef(pub usize);

/// A part of an alternative.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::structured) enum Item {
    Rule(RuleRef),
    Terminal(usize),
    /// The special token of the vocabulary with this id.
    Token(u32),
}

/// The texts of a rule.
#[derive(Clone)]
pub(super) enum Rule {
    Either(Vec<Vec<Item>>),
    /// At least `least` and at most `most` of the items, each at most once, in any order, with a separator between
    /// them.
    Distinct {
        items: Vec<Item>,
        separator: Item,
        least: usize,
        most: usize,
    },
}

/// A list of rules. The first rule is the start rule.
#[derive(Default)]
pub(super) struct Grammar {
    pub rules: Vec<Rule>,
    pub terminals: Vec<RegexAst>,
    literals: HashMap<String, usize>,
}

impl Grammar {
    /// Adds a rule whose contents are filled in later.
    pub fn reserve(&mut self) -> RuleRef {
        self.rule(Vec::new())
    }

    pub fn rule(&mut self, alternatives: Vec<Vec<Item>>) -> RuleRef {
        self.rules.push(Rule::Either(alternatives));
        RuleRef(self.rules.len() - 1)
    }

    pub fn distinct(&mut self, items: Vec<Item>, separator: Item, least: usize, most: usize) -> RuleRef {
        self.rules.push(Rule::Distinct { items, separator, least, most });
        RuleRef(self.rules.len() - 1)
    }

    pub fn fill(&mut self, rule: RuleRef, alternatives: Vec<Vec<Item>>) {
        self.rules[rule.0] = Rule::Either(alternatives);
    }

    pub fn literal(&mut self, text: &str) -> Item {
        let next = self.terminals.len();
        let id = *self.literals.entry(text.to_string()).or_insert(next);
        if id == next {
            self.terminals.push(RegexAst::Literal(text.to_string()));
        }
        Item::Terminal(id)
    }

    pub fn terminal(&mut self, texts: RegexAst) -> Item {
        self.terminals.push(texts);
        Item::Terminal(self.terminals.len() - 1)
    }

    /// Returns items for at least `least` and at most `most` units in sequence.
    pub fn repeat(&mut self, unit: Item, least: usize, most: Option<usize>) -> Vec<Item> {
        let mut items = self.exactly(unit, least);
        match most {
            Some(most) => items.extend(self.at_most(unit, most.saturating_sub(least))),
            None => {
                let many = self.reserve();
                self.fill(many, vec![Vec::new(), vec![Item::Rule(many), unit]]);
                items.push(Item::Rule(many));
            }
        }
        items
    }

    fn exactly(&mut self, unit: Item, n: usize) -> Vec<Item> {
        if n < 2 * STEP {
            return vec![unit; n];
        }
        let several = Item::Rule(self.rule(vec![vec![unit; STEP]]));
        let mut items = self.exactly(several, n / STEP);
        items.extend(vec![unit; n % STEP]);
        items
    }

    /// Returns items for at most `n` units. There is exactly one way to derive each number of units.
    fn at_most(&mut self, unit: Item, n: usize) -> Vec<Item> {
        if n == 0 {
            return Vec::new();
        }
        if n < 2 * STEP {
            return vec![Item::Rule(self.rule((0..=n).map(|n| vec![unit; n]).collect()))];
        }
        let several = Item::Rule(self.rule(vec![vec![unit; STEP]]));
        let mut fewer = self.at_most(several, n / STEP - 1);
        fewer.extend(self.at_most(unit, STEP - 1));
        let mut most = self.exactly(several, n / STEP);
        most.extend(self.at_most(unit, n % STEP));
        vec![Item::Rule(self.rule(vec![fewer, most]))]
    }

    /// Returns for each rule whether it has a text.
    pub fn productive(&self) -> Vec<bool> {
        let mut users: Vec<Vec<usize>> = vec![Vec::new(); self.rules.len()];
        for (rule, items) in
            self.rules.iter().enumerate().flat_map(|(at, rule)| rule.items().map(move |i| (at, i)))
        {
            if let Item::Rule(used) = items {
                users[used.0].push(rule);
            }
        }
        let mut productive = vec![false; self.rules.len()];
        let mut left: Vec<usize> = (0..self.rules.len()).collect();
        while let Some(at) = left.pop() {
            if !productive[at] && self.rules[at].is_productive(&productive) {
                productive[at] = true;
                left.extend(&users[at]);
            }
        }
        productive
    }
}

/// Returns whether an item has a text.
pub(super) fn has_text(item: &Item, productive: &[bool]) -> bool {
    match item {
        Item::Rule(rule) => productive[rule.0],
        Item::Terminal(_) | Item::Token(_) => true,
    }
}

impl Rule {
    fn items(&self) -> Box<dyn Iterator<Item = Item> + '_> {
        match self {
            Self::Either(alternatives) => Box::new(alternatives.iter().flatten().copied()),
            Self::Distinct { items, .. } => Box::new(items.iter().copied()),
        }
    }

    fn is_productive(&self, productive: &[bool]) -> bool {
        match self {
            Self::Either(alternatives) => {
                alternatives.iter().any(|items| items.iter().all(|item| has_text(item, productive)))
            }
            Self::Distinct { items, least, .. } => {
                items.iter().filter(|item| has_text(item, productive)).count() >= *least
            }
        }
    }
}
