//! Reads the keywords of each type.

use std::rc::Rc;

use super::decimal::Decimal;
use super::json::{Json, list, wrong};
use super::multiple::Divisor;
use super::number::{Bound, Numbers};
use super::schemas::Schemas;
use super::shape::{Arrays, Goal, Members, Objects, Shape, all};
use super::text::Strings;

const TYPES: [&str; 7] = ["null", "boolean", "number", "integer", "string", "array", "object"];

impl<'d> Schemas<'d> {
    /// Returns the values that the keywords of each type allow.
    pub fn of_types(&mut self, schema: &'d Json) -> Result<Shape<'d>, String> {
        let types = types(schema)?;
        let has = |name: &str| types.contains(&name);
        let mut shape =
            Shape { null: has("null"), no: has("boolean"), yes: has("boolean"), ..Shape::default() };
        if has("number") || has("integer") {
            let numbers = Numbers { integer: !has("number"), ..numbers(schema)? };
            if !numbers.is_empty()? {
                shape.numbers.push(numbers);
            }
        }
        if has("string") {
            let strings = self.strings(schema)?;
            if !self.rules.is_empty(&strings)? {
                shape.strings.push(strings);
            }
        }
        if has("array") {
            shape.arrays.extend(Arrays::any().and(&self.arrays(schema)?));
        }
        if has("object") {
            shape.objects.extend(Objects::any().and(&self.objects(schema)?));
        }
        Ok(shape)
    }

    fn strings(&mut self, schema: &Json) -> Result<Strings, String> {
        let mut rules = Vec::new();
        if let Some(pattern) = schema.get("pattern") {
            let pattern = pattern.str().ok_or_else(|| wrong("pattern", "a string", pattern))?;
            rules.push(self.rules.pattern(pattern)?);
        }
        if let Some(format) = schema.get("format") {
            let format = format.str().ok_or_else(|| wrong("format", "a string", format))?;
            rules.extend(self.rules.format(format)?);
        }
        rules.sort_unstable();
        let least = size(schema, "minLength")?.unwrap_or(0);
        let most = size(schema, "maxLength")?;
        Ok(Strings { least, most, rules, text: None })
    }

    fn arrays(&mut self, schema: &'d Json) -> Result<Arrays, String> {
        let items = schema.get("items");
        let before = schema.get("prefixItems");
        // Older drafts have a list of schemas in `items`, and `additionalItems` for the items after them.
        let (prefix, rest) = match items {
            Some(Json::Array(items)) => (&items[..], schema.get("additionalItems")),
            _ => (before.map_or(Ok(&[][..]), |before| list(before, "prefixItems"))?, items),
        };
        let unique = match schema.get("uniqueItems") {
            None => false,
            Some(Json::Bool(unique)) => *unique,
            Some(other) => return Err(wrong("uniqueItems", "true or false", other)),
        };
        Ok(Arrays {
            prefix: prefix.iter().map(|item| self.goal(Some(item))).collect(),
            rest: self.goal(rest),
            least: size(schema, "minItems")?.unwrap_or(0),
            most: size(schema, "maxItems")?,
            unique,
        })
    }

    /// Returns the goal of a schema, if there is a schema.
    fn goal(&mut self, schema: Option<&'d Json>) -> Goal {
        let everything = |schema: &Json| match schema {
            Json::Bool(allowed) => *allowed,
            schema => schema.object().is_some_and(<[_]>::is_empty),
        };
        all(schema
            .filter(|schema| !everything(schema))
            .map(|schema| self.schema(schema))
            .into_iter()
            .collect())
    }

    fn objects(&mut self, schema: &'d Json) -> Result<Objects<'d>, String> {
        let object = |name: &'static str| match schema.get(name) {
            None => Ok(&[][..]),
            Some(value) => value.object().ok_or_else(|| wrong(name, "an object", value)),
        };
        let mut members = Members::default();
        for (name, schema) in object("properties")? {
            members.names.push(name);
            members.properties.insert(name, self.schema(schema));
        }
        for (pattern, schema) in object("patternProperties")? {
            members.patterns.push((self.rules.pattern(pattern)?, self.schema(schema)));
        }
        members.additional = self.goal(schema.get("additionalProperties")).first().copied();
        let mut required = Vec::new();
        if let Some(names) = schema.get("required") {
            for name in list(names, "required")? {
                required.push(name.str().ok_or_else(|| wrong("required", "a list of strings", name))?);
            }
        }
        let mut objects = Objects {
            members: vec![Rc::new(members)],
            required: Vec::new(),
            least: size(schema, "minProperties")?.unwrap_or(0),
            most: size(schema, "maxProperties")?,
            names: self.goal(schema.get("propertyNames")),
        };
        objects.require(&required);
        Ok(objects)
    }
}

/// Returns the names of the types that a schema allows.
fn types(schema: &Json) -> Result<Vec<&str>, String> {
    match schema.get("type") {
        None => Ok(TYPES.to_vec()),
        Some(Json::Array(types)) => types.iter().map(one_type).collect(),
        Some(other) => Ok(vec![one_type(other)?]),
    }
}

fn one_type(value: &Json) -> Result<&str, String> {
    match value {
        Json::String(name) if TYPES.contains(&&name[..]) => Ok(name),
        Json::String(name) => Err(format!("Invalid type: {name}")),
        other => Err(wrong("type", "a string or a list of strings", other)),
    }
}

fn numbers(schema: &Json) -> Result<Numbers, String> {
    let number = |name: &'static str| match schema.get(name) {
        None | Some(Json::Bool(_)) => Ok(None),
        Some(Json::Number(text)) => Decimal::read(text).map(Some).map_err(|e| format!("{name}: {e}")),
        Some(other) => Err(wrong(name, "a number", other)),
    };
    let bound = |name: &'static str, exclusive: &'static str| -> Result<[Option<Bound>; 2], String> {
        // In draft 4 the exclusive keyword is true or false.
        let or_equal = !matches!(schema.get(exclusive), Some(Json::Bool(true)));
        let bound = number(name)?.map(|value| Bound { value, or_equal });
        Ok([bound, number(exclusive)?.map(|value| Bound { value, or_equal: false })])
    };
    let [low, above] = bound("minimum", "exclusiveMinimum")?;
    let [high, below] = bound("maximum", "exclusiveMaximum")?;
    let divisors = number("multipleOf")?.map(|value| Divisor::of(&value)).transpose()?;
    let numbers = Numbers { low, high, divisors: divisors.into_iter().collect(), ..Numbers::default() };
    Ok(numbers.and(&Numbers { low: above, high: below, ..Numbers::default() }))
}

fn size(schema: &Json, name: &str) -> Result<Option<usize>, String> {
    let Some(value) = schema.get(name) else { return Ok(None) };
    value.size().map(Some).ok_or_else(|| wrong(name, "an integer from 0", value))
}
