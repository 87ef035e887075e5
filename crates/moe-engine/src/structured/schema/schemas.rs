//! Finds the values that the keywords of a schema allow.
//!
//! The schemas inside objects and lists stay goals. A goal is a set of parts of the document. So references are never
//! expanded and recursion ends. The combined conditions of several schemas for one member are one more goal.

use std::collections::HashMap;
use std::rc::Rc;

use super::document::Document;
use super::json::{Json, list, wrong};
use super::number::Numbers;
use super::shape::{Arrays, Goal, Members, NodeId, Objects, Shape, all};
use super::text::{Rules, Strings};

/// The deepest nesting of references and combinations.
const DEEPEST: usize = 100;
/// The largest number of alternatives that are examined.
const MOST_WORK: usize = 1_000_000;
/// The keywords that are neither ignored nor understood.
const UNSUPPORTED: [&str; 13] = [
    "not",
    "if",
    "contains",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "unevaluatedItems",
    "unevaluatedProperties",
    "$dynamicRef",
    "$recursiveRef",
    "extends",
    "disallow",
    "divisibleBy",
];

/// A part of the document.
#[derive(Clone, Copy)]
enum Node<'d> {
    Schema(&'d Json),
    /// A single value that is allowed.
    Value(&'d Json),
}

/// The parts of a schema, and the values that they allow.
pub(super) struct Schemas<'d> {
    document: Document<'d>,
    nodes: Vec<Node<'d>>,
    ids: HashMap<(*const Json, bool), NodeId>,
    pub rules: Rules,
    of_nodes: HashMap<NodeId, Rc<Shape<'d>>>,
    of_goals: HashMap<Goal, Rc<Shape<'d>>>,
    /// The nodes whose values are being computed.
    busy: Vec<NodeId>,
    work: usize,
    /// Whether several alternatives of `oneOf` may hold together.
    pub any_of_one_of: bool,
}

impl<'d> Schemas<'d> {
    pub fn new(root: &'d Json, any_of_one_of: bool) -> Self {
        Self {
            document: Document::new(root),
            nodes: Vec::new(),
            ids: HashMap::new(),
            rules: Rules::default(),
            of_nodes: HashMap::new(),
            of_goals: HashMap::new(),
            busy: Vec::new(),
            work: MOST_WORK,
            any_of_one_of,
        }
    }

    /// Returns the node of a schema.
    pub fn schema(&mut self, schema: &'d Json) -> NodeId {
        self.node(schema, Node::Schema(schema), false)
    }

    fn value(&mut self, value: &'d Json) -> NodeId {
        self.node(value, Node::Value(value), true)
    }

    fn node(&mut self, json: &'d Json, node: Node<'d>, value: bool) -> NodeId {
        let next = NodeId(self.nodes.len() as u32);
        let id = *self.ids.entry((json, value)).or_insert(next);
        if id == next {
            self.nodes.push(node);
        }
        id
    }

    /// Counts some work.
    ///
    /// # Errors
    /// The work exceeds the limit.
    pub fn spend(&mut self, work: usize) -> Result<(), String> {
        self.work = self.work.checked_sub(work + 1).ok_or("the schema is too large")?;
        Ok(())
    }

    /// Returns the values that satisfy all parts of a goal.
    ///
    /// # Errors
    /// The schema is wrong, not supported, or too large.
    pub fn shape(&mut self, goal: &Goal) -> Result<Rc<Shape<'d>>, String> {
        if let Some(shape) = self.of_goals.get(goal) {
            return Ok(shape.clone());
        }
        let shape = match &goal[..] {
            [] => Rc::new(Shape::any()),
            [first, more @ ..] => {
                let mut shape = self.of_node(*first)?;
                for node in more {
                    let other = self.of_node(*node)?;
                    shape = Rc::new(self.and(&shape, &other)?);
                }
                shape
            }
        };
        self.of_goals.insert(goal.clone(), shape.clone());
        Ok(shape)
    }

    fn of_node(&mut self, node: NodeId) -> Result<Rc<Shape<'d>>, String> {
        if let Some(shape) = self.of_nodes.get(&node) {
            return Ok(shape.clone());
        }
        if self.busy.contains(&node) {
            return Err("it allows no text: a reference leads back to itself".into());
        }
        if self.busy.len() >= DEEPEST {
            return Err(format!("references and combinations are nested more than {DEEPEST} levels deep"));
        }
        self.busy.push(node);
        let shape = match self.nodes[node.0 as usize] {
            Node::Schema(schema) => self.of_schema(schema),
            Node::Value(value) => self.of_value(value),
        };
        self.busy.pop();
        let shape = Rc::new(shape?);
        self.of_nodes.insert(node, shape.clone());
        Ok(shape)
    }

    /// Returns the values that satisfy both shapes. Alternatives without values are left out.
    pub fn and(&mut self, a: &Shape<'d>, b: &Shape<'d>) -> Result<Shape<'d>, String> {
        self.spend(a.numbers.len() * b.numbers.len() + a.strings.len() * b.strings.len())?;
        self.spend(10 * (a.arrays.len() * b.arrays.len() + a.objects.len() * b.objects.len()))?;
        let mut numbers = Vec::new();
        for one in a.numbers.iter().flat_map(|x| b.numbers.iter().map(|y| x.and(y))) {
            if !one.is_empty()? {
                numbers.push(one);
            }
        }
        let mut strings = Vec::new();
        for one in a.strings.iter().flat_map(|x| b.strings.iter().filter_map(|y| x.and(y))) {
            if !self.rules.is_empty(&one)? {
                strings.push(one);
            }
        }
        Ok(Shape {
            null: a.null && b.null,
            no: a.no && b.no,
            yes: a.yes && b.yes,
            numbers,
            strings,
            arrays: a.arrays.iter().flat_map(|x| b.arrays.iter().filter_map(|y| x.and(y))).collect(),
            objects: a.objects.iter().flat_map(|x| b.objects.iter().filter_map(|y| x.and(y))).collect(),
        })
    }

    fn of_schema(&mut self, schema: &'d Json) -> Result<Shape<'d>, String> {
        self.spend(1)?;
        let members = match schema {
            Json::Bool(true) => return Ok(Shape::any()),
            Json::Bool(false) => return Ok(Shape::default()),
            Json::Object(members) => members,
            other => {
                return Err(format!(
                    "expected a schema, which is an object, true or false, got {}",
                    other.short()
                ));
            }
        };
        let says_something = |value: &Json| match value {
            Json::Object(members) => !members.is_empty(),
            value => !matches!(value, Json::Bool(true)),
        };
        for (name, value) in members {
            let never_empty = matches!(&name[..], "not" | "if" | "contains");
            if UNSUPPORTED.contains(&&name[..]) && (never_empty || says_something(value)) {
                return Err(format!("the keyword {name:?} is not supported"));
            }
        }
        let mut shape = self.of_types(schema)?;
        for (name, value) in members {
            let other = match &name[..] {
                "const" => self.of_value(value)?,
                "enum" => {
                    let mut any = Shape::default();
                    for value in list(value, "enum")? {
                        any.or(&self.of_value(value)?);
                    }
                    any
                }
                "$ref" => {
                    let reference = value.str().ok_or_else(|| wrong("$ref", "a string", value))?;
                    let part = self.document.resolve(reference)?;
                    self.part(part)?.as_ref().clone()
                }
                "allOf" => {
                    for part in list(value, "allOf")? {
                        let part = self.part(part)?;
                        shape = self.and(&shape, &part)?;
                    }
                    continue;
                }
                "anyOf" => {
                    let mut any = Shape::default();
                    for part in list(value, "anyOf")? {
                        let part = self.part(part)?;
                        self.spend(part.len())?;
                        any.or(&part);
                    }
                    any
                }
                "oneOf" => {
                    let parts = list(value, "oneOf")?;
                    let parts: Result<Vec<_>, String> = parts.iter().map(|part| self.part(part)).collect();
                    self.one_of(&parts?)?
                }
                _ => continue,
            };
            shape = self.and(&shape, &other)?;
        }
        Ok(shape)
    }

    fn part(&mut self, schema: &'d Json) -> Result<Rc<Shape<'d>>, String> {
        let node = self.schema(schema);
        self.of_node(node)
    }

    /// Returns the shape of one value.
    fn of_value(&mut self, value: &'d Json) -> Result<Shape<'d>, String> {
        self.spend(1)?;
        let mut shape = Shape::default();
        match value {
            Json::Null => shape.null = true,
            Json::Bool(value) => (shape.yes, shape.no) = (*value, !value),
            Json::Number(text) => shape.numbers.push(Numbers::one(text)?),
            Json::String(text) => shape.strings.push(Strings::one(text)),
            Json::Array(items) => shape.arrays.push(Arrays {
                prefix: items.iter().map(|item| all(vec![self.value(item)])).collect(),
                least: items.len(),
                most: Some(items.len()),
                ..Arrays::any()
            }),
            Json::Object(members) => {
                let names: Vec<&'d str> = members.iter().map(|(name, _)| &name[..]).collect();
                let properties = members.iter().map(|(name, value)| (&name[..], self.value(value))).collect();
                let members = Members { names: names.clone(), properties, ..Members::default() };
                let members = vec![Rc::new(members)];
                let most = Some(names.len());
                shape.objects.push(Objects { members, required: names, most, ..Objects::any() });
            }
        }
        Ok(shape)
    }
}
