//! Writes the rules of an object. The named members come first, each once and in order, and then the other members.

use std::collections::HashSet;

use llguidance::derivre::RegexAst;
use serde_json::json;

use super::rules::Item;
use super::shape::{Objects, all};
use super::text::{RuleId, Strings, quoted};
use super::values::Values;

/// The largest number of states. A state is the place of a member and the number of members before it.
const MOST_STATES: usize = 50_000;
/// The largest number of kinds of names that expressions distinguish.
const MOST_KINDS: usize = 64;

/// A named member.
struct Member {
    /// The member's name, a colon and the member's value.
    items: Vec<Item>,
    required: bool,
}

/// A set of names that are not listed and that match the same expressions.
struct Kind {
    texts: Vec<RegexAst>,
    matched: Vec<RuleId>,
}

impl<'d> Values<'d> {
    /// Returns the items of an object.
    ///
    /// # Errors
    /// The schema is wrong, not supported, or too large.
    pub fn object(&mut self, object: &Objects<'d>) -> Result<Vec<Item>, String> {
        let (allowed, only_listed) = self.allowed_names(object)?;
        let names = names(object, if only_listed { &allowed } else { &[] });
        let mut members = Vec::with_capacity(names.len());
        let required: HashSet<&str> = object.required.iter().copied().collect();
        for name in &names {
            if !self.is_allowed(&allowed, name)? {
                if required.contains(&name[..]) {
                    return Ok(vec![Item::Rule(self.grammar.reserve())]);
                }
                continue;
            }
            let goal = self.schemas.member(object, name)?;
            let key = self.grammar.literal(&json!(name).to_string());
            let value = self.value(&goal)?;
            members
                .push(Member { items: vec![key, self.colon, value], required: required.contains(&name[..]) });
        }
        let other = if only_listed { None } else { self.other_members(object, &allowed, &names)? };
        let content = self.content(object, &members, other)?;
        let open = self.grammar.literal("{");
        let close = self.grammar.literal("}");
        Ok([vec![open], content, vec![close]].concat())
    }

    /// Returns the names that `propertyNames` allows, and whether they are listed. Returns no names if all are allowed.
    fn allowed_names(&mut self, object: &Objects<'d>) -> Result<(Vec<Strings>, bool), String> {
        if object.names.is_empty() {
            return Ok((vec![Strings::default()], false));
        }
        let names = self.schemas.shape(&object.names)?.strings.clone();
        let listed = names.iter().all(|name| name.text.is_some());
        Ok((names, listed))
    }

    fn is_allowed(&mut self, allowed: &[Strings], name: &str) -> Result<bool, String> {
        for strings in allowed {
            let one = strings.and(&Strings::one(name));
            if one.map_or(Ok(true), |one| self.schemas.rules.is_empty(&one))? {
                continue;
            }
            return Ok(true);
        }
        Ok(false)
    }

    /// Returns the item of a member whose name is not listed, or `None` if there cannot be such a member.
    fn other_members(
        &mut self,
        object: &Objects<'d>,
        allowed: &[Strings],
        names: &[String],
    ) -> Result<Option<Item>, String> {
        let mut alternatives = Vec::new();
        for kind in self.kinds(object, allowed)? {
            let mut goal = Vec::new();
            for members in &object.members {
                let matching = members.patterns.iter().filter(|(rule, _)| kind.matched.contains(rule));
                let before = goal.len();
                goal.extend(matching.map(|(_, schema)| *schema));
                if goal.len() == before {
                    goal.extend(members.additional);
                }
            }
            let goal = all(goal);
            let shape = self.schemas.shape(&goal)?;
            if shape.has_no_scalars() && shape.len() == 0 {
                continue;
            }
            let Some(key) = self.unlisted(kind, allowed, names)? else { continue };
            let key = self.grammar.terminal(quoted(key));
            let value = self.value(&goal)?;
            alternatives.push(vec![key, self.colon, value]);
        }
        Ok((!alternatives.is_empty()).then(|| Item::Rule(self.grammar.rule(alternatives))))
    }

    /// Returns the names of a kind that are not listed, or `None` if there are none.
    fn unlisted(
        &mut self,
        kind: Kind,
        allowed: &[Strings],
        names: &[String],
    ) -> Result<Option<RegexAst>, String> {
        let mut texts = kind.texts;
        let free = kind.matched.is_empty() && allowed == [Strings::default()];
        let mut listed = Vec::new();
        for name in names {
            if self.schemas.rules.matches(&kind.matched, name)? {
                listed.push(RegexAst::Literal(name.clone()));
            }
        }
        if !listed.is_empty() {
            texts.push(RegexAst::Not(Box::new(RegexAst::Or(listed))));
        }
        let texts = RegexAst::And(texts);
        match !free && self.schemas.rules.have_none(&texts)? {
            true => Ok(None),
            false => Ok(Some(texts)),
        }
    }

    /// Sorts all names into kinds, by the expressions that they match.
    fn kinds(&mut self, object: &Objects<'d>, allowed: &[Strings]) -> Result<Vec<Kind>, String> {
        let names = allowed.iter().map(|strings| self.schemas.rules.texts(strings)).collect();
        let mut kinds = vec![Kind { texts: vec![RegexAst::Or(names)], matched: Vec::new() }];
        let mut rules: Vec<RuleId> =
            object.members.iter().flat_map(|m| m.patterns.iter().map(|(rule, _)| *rule)).collect();
        rules.sort_unstable();
        rules.dedup();
        for rule in rules {
            let rule_texts = self.schemas.rules.texts(&Strings::of_rule(rule));
            let mut split = Vec::new();
            for kind in kinds {
                self.schemas.spend(100)?;
                let with = [kind.texts.clone(), vec![rule_texts.clone()]].concat();
                if !self.schemas.rules.have_none(&RegexAst::And(with.clone()))? {
                    split.push(Kind { texts: with, matched: [kind.matched.clone(), vec![rule]].concat() });
                }
                let without = [kind.texts, vec![RegexAst::Not(Box::new(rule_texts.clone()))]].concat();
                if !self.schemas.rules.have_none(&RegexAst::And(without.clone()))? {
                    split.push(Kind { texts: without, matched: kind.matched });
                }
            }
            if split.len() > MOST_KINDS {
                return Err(format!(
                    "patternProperties: the expressions tell more than {MOST_KINDS} kinds of names apart"
                ));
            }
            kinds = split;
        }
        Ok(kinds)
    }

    /// Returns the items between the braces.
    fn content(
        &mut self,
        object: &Objects<'d>,
        members: &[Member],
        other: Option<Item>,
    ) -> Result<Vec<Item>, String> {
        let required = members.iter().filter(|member| member.required).count();
        let least = object.least;
        let most = object.most.unwrap_or(usize::MAX);
        // Two names that are not listed may be equal, and then they count as one.
        if other.is_some() && least > members.len() + 1 {
            return Err(format!(
                "minProperties {least}: at most {} members can be counted here, because only one name that is not listed is certainly new",
                members.len() + 1
            ));
        }
        let all = members.len() + usize::from(other.is_some());
        let counted = least > required || object.most.is_some() && (other.is_some() || most < all);
        // The number of members before a place is counted up to `enough`. More members make no difference.
        let enough = match (counted, object.most) {
            (false, _) => 1,
            (true, Some(most)) => most.min(members.len()).max(least),
            (true, None) => least,
        }
        .max(1);
        if (members.len() + 1).saturating_mul(enough.saturating_add(1)) > MOST_STATES {
            return Err(
                "minProperties and maxProperties are too large to count for this number of members".into()
            );
        }
        let (least, most) = if counted { (least, most) } else { (0, usize::MAX) };
        let mut after = Vec::with_capacity(enough + 1);
        for before in 0..=enough {
            after.push(self.others(other, before, least, most));
        }
        for member in members.iter().rev() {
            let mut states = Vec::with_capacity(enough + 1);
            for before in 0..=enough {
                let mut alternatives = Vec::new();
                if before < most {
                    let comma = (before > 0).then_some(self.comma);
                    let items = comma.into_iter().chain(member.items.iter().copied());
                    alternatives.push(items.chain([after[(before + 1).min(enough)]]).collect());
                }
                if !member.required {
                    alternatives.push(vec![after[before]]);
                }
                states.push(Item::Rule(self.grammar.rule(alternatives)));
            }
            after = states;
        }
        Ok(vec![after[0]])
    }

    /// Returns the members that are not listed, after `before` members that are listed.
    fn others(&mut self, other: Option<Item>, before: usize, least: usize, most: usize) -> Item {
        let mut alternatives = Vec::new();
        if before >= least {
            alternatives.push(Vec::new());
        }
        if let Some(other) = other
            && before < most
            && before + 1 >= least
        {
            let after = Item::Rule(self.grammar.rule(vec![vec![self.comma, other]]));
            let left = (most != usize::MAX).then(|| most - before - 1);
            let more = self.grammar.repeat(after, 0, left);
            let comma = (before > 0).then_some(self.comma);
            alternatives.push(comma.into_iter().chain([other]).chain(more).collect());
        }
        Item::Rule(self.grammar.rule(alternatives))
    }
}

/// Returns the names that are listed: the names of properties, of required members, and the only names that are
/// allowed.
fn names(object: &Objects, allowed: &[Strings]) -> Vec<String> {
    let properties = object.members.iter().flat_map(|members| members.names.iter().copied());
    let all = properties
        .chain(object.required.iter().copied())
        .chain(allowed.iter().filter_map(|n| n.text.as_deref()));
    let mut known = HashSet::new();
    all.filter(|name| known.insert(*name)).map(str::to_string).collect()
}
