//! Which values of each kind a schema allows.

use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use super::number::Numbers;
use super::text::{RuleId, Strings};

/// A part of the schema, in the table of [`super::schemas::Schemas`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct NodeId(pub u32);

/// Parts of the schema that a value must satisfy all; sorted. None of them allows everything.
pub(super) type Goal = Rc<[NodeId]>;

/// The goal of what satisfies two goals.
pub(super) fn both(a: &Goal, b: &Goal) -> Goal {
    if a.is_empty() || a == b {
        return b.clone();
    }
    all([&a[..], b].concat())
}

/// The goal of what satisfies all of some parts.
pub(super) fn all(mut parts: Vec<NodeId>) -> Goal {
    parts.sort_unstable();
    parts.dedup();
    parts.into()
}

/// Values, by their kind.
#[derive(Clone, Default)]
pub(super) struct Shape<'d> {
    pub null: bool,
    pub no: bool,
    pub yes: bool,
    pub numbers: Vec<Numbers>,
    pub strings: Vec<Strings>,
    pub arrays: Vec<Arrays>,
    pub objects: Vec<Objects<'d>>,
}

impl Shape<'_> {
    /// Every value.
    pub fn any() -> Self {
        Self {
            null: true,
            no: true,
            yes: true,
            numbers: vec![Numbers::default()],
            strings: vec![Strings::default()],
            arrays: vec![Arrays::any()],
            objects: vec![Objects::any()],
        }
    }

    /// Whether it has nothing but lists and objects.
    pub fn has_no_scalars(&self) -> bool {
        !self.null && !self.no && !self.yes && self.numbers.is_empty() && self.strings.is_empty()
    }

    /// How many alternatives it has.
    pub fn len(&self) -> usize {
        self.numbers.len() + self.strings.len() + self.arrays.len() + self.objects.len()
    }

    /// Adds the values of another.
    pub fn or(&mut self, other: &Self)
    where
        Self: Clone,
    {
        self.null |= other.null;
        self.no |= other.no;
        self.yes |= other.yes;
        self.numbers.extend_from_slice(&other.numbers);
        self.strings.extend_from_slice(&other.strings);
        self.arrays.extend_from_slice(&other.arrays);
        self.objects.extend(other.objects.iter().cloned());
    }
}

/// What a list must be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Arrays {
    /// Of the first items.
    pub prefix: Vec<Goal>,
    /// Of the items after them.
    pub rest: Goal,
    pub least: usize,
    pub most: Option<usize>,
    /// No two items are equal.
    pub unique: bool,
}

impl Arrays {
    pub fn any() -> Self {
        Self { prefix: Vec::new(), rest: all(Vec::new()), least: 0, most: None, unique: false }
    }

    /// What an item must be.
    pub fn item(&self, at: usize) -> &Goal {
        self.prefix.get(at).unwrap_or(&self.rest)
    }

    /// Those that are of both; `None` if the lengths exclude each other.
    pub fn and(&self, other: &Self) -> Option<Self> {
        let least = self.least.max(other.least);
        let most = self.most.into_iter().chain(other.most).min();
        if most.is_some_and(|most| most < least) {
            return None;
        }
        let prefix = self.prefix.len().max(other.prefix.len());
        Some(Self {
            prefix: (0..prefix).map(|at| both(self.item(at), other.item(at))).collect(),
            rest: both(&self.rest, &other.rest),
            least,
            most,
            unique: self.unique || other.unique,
        })
    }
}

/// What an object must be.
#[derive(Clone)]
pub(super) struct Objects<'d> {
    /// What each says about the members holds.
    pub members: Vec<Rc<Members<'d>>>,
    /// In the order in which they are named.
    pub required: Vec<&'d str>,
    pub least: usize,
    pub most: Option<usize>,
    /// Of the names of members, as strings.
    pub names: Goal,
}

impl<'d> Objects<'d> {
    pub fn any() -> Self {
        Self { members: Vec::new(), required: Vec::new(), least: 0, most: None, names: all(Vec::new()) }
    }

    /// Those that are of both; `None` if the numbers of members exclude each other.
    pub fn and(&self, other: &Self) -> Option<Self> {
        let least = self.least.max(other.least);
        let most = self.most.into_iter().chain(other.most).min();
        if most.is_some_and(|most| most < least) {
            return None;
        }
        let mut members = self.members.clone();
        let is_new = |new: &Rc<Members<'d>>| !self.members.iter().any(|old| Rc::ptr_eq(old, new));
        members.extend(other.members.iter().filter(|new| is_new(new)).cloned());
        let mut both = self.clone();
        both.require(&other.required);
        Some(Self { members, least, most, names: self::both(&self.names, &other.names), ..both })
    }

    /// Requires members.
    pub fn require(&mut self, names: &[&'d str]) {
        let known: HashSet<&str> = self.required.iter().copied().collect();
        let new: Vec<&'d str> = names.iter().filter(|name| !known.contains(**name)).copied().collect();
        self.required.extend(new);
    }
}

/// What one schema says about the members of an object.
#[derive(Default)]
pub(super) struct Members<'d> {
    /// In the order in which they are named.
    pub names: Vec<&'d str>,
    pub properties: HashMap<&'d str, NodeId>,
    pub patterns: Vec<(RuleId, NodeId)>,
    /// Of members that are neither named nor match an expression.
    pub additional: Option<NodeId>,
}
