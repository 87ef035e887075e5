//! Implements `oneOf`, and finds goals that no value satisfies.
//!
//! A grammar cannot state that a text is not in another grammar. So the alternatives must exclude each other. Two kinds
//! of objects exclude each other if they have different values for the same member. That member is then made required,
//! like the discriminators of OpenAPI.

use std::rc::Rc;

use super::schemas::Schemas;
use super::shape::{Goal, Objects, Shape, all};

/// The number of levels of members and items in which contradictions are searched.
const LEVELS: usize = 6;

impl<'d> Schemas<'d> {
    /// Returns the values of exactly one of the shapes.
    ///
    /// # Errors
    /// For two of the shapes it cannot be decided whether they exclude each other.
    pub fn one_of(&mut self, parts: &[Rc<Shape<'d>>]) -> Result<Shape<'d>, String> {
        let mut any = Shape::default();
        if self.any_of_one_of {
            parts.iter().for_each(|part| any.or(part));
            return Ok(any);
        }
        let mut exclusive: Vec<Shape<'d>> = parts.iter().map(|part| part.as_ref().clone()).collect();
        for (second, b) in parts.iter().enumerate() {
            for (first, a) in parts[..second].iter().enumerate() {
                let overlap = |what| {
                    format!(
                        "oneOf: alternatives {first} and {second} may hold together for the same {what}; use anyOf, or tell them apart by the value of a member"
                    )
                };
                let scalars = Shape { arrays: Vec::new(), objects: Vec::new(), ..a.as_ref().clone() };
                let common = self.and(&scalars, b)?;
                if !common.numbers.is_empty() || !common.strings.is_empty() {
                    return Err(overlap(if common.numbers.is_empty() { "strings" } else { "numbers" }));
                }
                for array in a.arrays.iter().flat_map(|x| b.arrays.iter().filter_map(|y| x.and(y))) {
                    let array = Shape { arrays: vec![array], ..Shape::default() };
                    if !self.is_nothing(&array, LEVELS)? {
                        return Err(overlap("lists"));
                    }
                }
                for (i, x) in a.objects.iter().enumerate() {
                    for (j, y) in b.objects.iter().enumerate() {
                        let Some(common) = x.and(y) else { continue };
                        match self.apart(common)? {
                            Apart::Always => (),
                            Apart::With(name) => {
                                exclusive[first].objects[i].require(&[name]);
                                exclusive[second].objects[j].require(&[name]);
                            }
                            Apart::Unknown => return Err(overlap("objects")),
                        }
                    }
                }
            }
        }
        exclusive.iter().for_each(|part| any.or(part));
        let once = |of: fn(&Shape) -> bool| parts.iter().filter(|part| of(part)).count() == 1;
        (any.null, any.no, any.yes) = (once(|part| part.null), once(|part| part.no), once(|part| part.yes));
        Ok(any)
    }

    /// Returns whether no object is of both kinds.
    fn apart(&mut self, common: Objects<'d>) -> Result<Apart<'d>, String> {
        self.spend(20)?;
        let named: Vec<&'d str> = common.members.iter().flat_map(|members| members.names.clone()).collect();
        let twice = |name: &&str| {
            common.members.iter().filter(|members| members.properties.contains_key(*name)).count() > 1
        };
        let candidates: Vec<&'d str> = named.into_iter().filter(twice).collect();
        let shape = Shape { objects: vec![common], ..Shape::default() };
        if self.is_nothing(&shape, LEVELS)? {
            return Ok(Apart::Always);
        }
        for name in candidates {
            let goal = self.member(&shape.objects[0], name)?;
            if self.is_unsatisfiable(&goal, LEVELS)? {
                return Ok(Apart::With(name));
            }
        }
        Ok(Apart::Unknown)
    }

    /// Returns the conditions of a member.
    pub fn member(&mut self, objects: &Objects<'d>, name: &str) -> Result<Goal, String> {
        let mut goal = Vec::new();
        for members in &objects.members {
            let before = goal.len();
            goal.extend(members.properties.get(name));
            for (pattern, schema) in &members.patterns {
                if self.rules.matches(&[*pattern], name)? {
                    goal.push(*schema);
                }
            }
            if goal.len() == before {
                goal.extend(members.additional);
            }
        }
        Ok(all(goal))
    }

    /// Returns whether no value satisfies a goal. The function searches only a few levels.
    fn is_unsatisfiable(&mut self, goal: &Goal, levels: usize) -> Result<bool, String> {
        let Some(levels) = levels.checked_sub(1) else { return Ok(false) };
        let shape = self.shape(goal)?;
        self.is_nothing(&shape, levels)
    }

    fn is_nothing(&mut self, shape: &Shape<'d>, levels: usize) -> Result<bool, String> {
        if !shape.has_no_scalars() {
            return Ok(false);
        }
        self.spend(1)?;
        for array in &shape.arrays {
            let items = array.prefix.iter().chain([&array.rest]).take(array.least);
            if !self.any_is_unsatisfiable(items.cloned().collect(), levels)? {
                return Ok(false);
            }
        }
        for object in &shape.objects {
            let mut members = Vec::new();
            for name in &object.required {
                members.push(self.member(object, name)?);
            }
            if !self.any_is_unsatisfiable(members, levels)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn any_is_unsatisfiable(&mut self, goals: Vec<Goal>, levels: usize) -> Result<bool, String> {
        for goal in goals {
            if self.is_unsatisfiable(&goal, levels)? {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// How two kinds of objects are distinguished.
enum Apart<'d> {
    Always,
    /// They are distinguished if they have this member.
    With(&'d str),
    Unknown,
}
