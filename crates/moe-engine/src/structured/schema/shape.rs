//! Describes which values of each kind a schema allows.

use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use super::number::Numbers;
use super::text::{RuleId, Strings};

/// A part of the schema, in the table of [`super::schemas::Schemas`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct NodeId(pub u32);

/// The parts of the schema that a value must satisfy, all of them and sorted. Parts that allow everything are left out.
pub(super) type Goal = Rc<[NodeId]>;

/// Returns the goal that requires both goals.
pub(super) fn both(a: &Goal, b: &Goal) -> Goal {
    if a.is_empty() || a == b {
        return b.clone();
    }
    all([&a[..], b].concat())
}

/// Returns the goal that requires all of the parts.
pub(super) fn all(mut parts: Vec<NodeId>) -> Goal {
    parts.sort_unstable();
    parts.dedup();
    parts.into()
}

/// A set of values, by their kind.
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
    /// Returns the shape of all values.
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

    /// Returns whether the shape has only lists and objects.
    pub fn has_no_scalars(&self) -> bool {
        !self.null && !self.no && !self.yes && self.numbers.is_empty() && self.strings.is_empty()
    }

    /// Returns the number of alternatives.
    pub fn len(&self) -> usize {
        self.numbers.len() + self.strings.len() + self.arrays.len() + self.objects.len()
    }

    /// Adds the values of another shape.
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

/// The conditions of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Arrays {
    /// The goals of the first items.
    pub prefix: Vec<Goal>,
    /// The goal of the items after them.
    pub rest: Goal,
    pub least: usize,
    pub most: Option<usize>,
    /// Whether no two items may be equal.
    pub unique: bool,
}

impl Arrays {
    pub fn any() -> Self {
        Self { prefix: Vec::new(), rest: all(Vec::new()), least: 0, most: None, unique: false }
    }

    /// Returns the goal of the item at an index.
    pub fn item(&self, at: usize) -> &Goal {
        self.prefix.get(at).unwrap_or(&self.rest)
    }

    /// Returns the lists that satisfy both, or `None` if the lengths exclude each other.
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

/// The conditions of an object.
#[derive(Clone)]
pub(super) struct Objects<'d> {
    /// The conditions of several schemas for the members. All of them hold.
    pub members: Vec<Rc<Members<'d>>>,
    /// The required members, in the order in which the schema names them.
    pub required: Vec<&'d str>,
    pub least: usize,
    pub most: Option<usize>,
    /// The goal of the names of members, which are strings.
    pub names: Goal,
}

impl<'d> Objects<'d> {
    pub fn any() -> Self {
        Self { members: Vec::new(), required: Vec::new(), least: 0, most: None, names: all(Vec::new()) }
    }

    /// Returns the objects that satisfy both, or `None` if the numbers of members exclude each other.
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

    /// Adds required members.
    pub fn require(&mut self, names: &[&'d str]) {
        let known: HashSet<&str> = self.required.iter().copied().collect();
        let new: Vec<&'d str> = names.iter().filter(|name| !known.contains(**name)).copied().collect();
        self.required.extend(new);
    }
}

/// The conditions of one schema for the members of an object.
#[derive(Default)]
pub(super) struct Members<'d> {
    /// The named members, in the order in which the schema names them.
    pub names: Vec<&'d str>,
    pub properties: HashMap<&'d str, NodeId>,
    pub patterns: Vec<(RuleId, NodeId)>,
    /// The schema of the members that are not named and match no expression.
    pub additional: Option<NodeId>,
}
