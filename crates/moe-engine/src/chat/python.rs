//! Makes minijinja and its pycompat behave like Jinja2 and Python where chat templates depend on the difference.

use minijinja::value::{Kwargs, Rest, StringInput, Value, ValueKind, from_args};
use minijinja::{Environment, Error, Output, State, filters};
use minijinja_contrib::pycompat::unknown_method_callback;

use super::json;

/// Makes an environment behave like Python.
pub fn register(env: &mut Environment<'_>) {
    env.set_formatter(print);
    env.set_unknown_method_callback(call_method);
    env.add_filter("tojson", json::tojson);
    env.add_filter("string", string);
    env.add_filter("length", length);
    env.add_filter("count", length);
    env.add_filter("default", default);
    env.add_filter("d", default);
    env.add_filter("indent", indent);
    env.add_test("iterable", is_iterable);
    env.add_test("sequence", is_sequence);
}

/// Prints the value of `{{ ... }}`.
fn print(out: &mut Output, _: &mut State, value: &Value) -> Result<(), Error> {
    match json::as_float(value) {
        Some(x) => out.write_str(&json::float(x))?,
        None => write!(out, "{value}")?,
    }
    Ok(())
}

fn call_method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let Some(text) = value.as_str() else { return unknown_method_callback(state, value, name, args) };
    match name {
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Ok(text.strip_prefix(prefix).unwrap_or(text).into())
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Ok(text.strip_suffix(suffix).unwrap_or(text).into())
        }
        "split" | "rsplit" => {
            let (by, limit, kwargs): (Option<&str>, Option<i64>, Kwargs) = from_args(args)?;
            let by = by.or(kwargs.get("sep")?);
            let limit = limit.or(kwargs.get("maxsplit")?);
            kwargs.assert_all_used()?;
            let (Some(by), Some(limit @ 0..), "rsplit") = (by, limit, name) else {
                return unknown_method_callback(state, value, "split", &[by.into(), limit.into()]);
            };
            let mut parts: Vec<&str> = text.rsplitn(limit as usize + 1, by).collect();
            parts.reverse();
            Ok(parts.into_iter().collect())
        }
        _ => unknown_method_callback(state, value, name, args),
    }
}

fn string(value: &Value) -> Value {
    match json::as_float(value) {
        Some(x) => json::float(x).into(),
        None if value.kind() == ValueKind::String => value.clone(),
        None => value.to_string().into(),
    }
}

fn length(value: &Value) -> Result<usize, Error> {
    if value.is_undefined() { Ok(0) } else { filters::length(value) }
}

/// The filter `default(default_value, boolean)`. minijinja takes these arguments only by position.
fn default(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let argument = |at: usize, name: &str| match args.get(at) {
        Some(value) => value.clone(),
        None => kwargs.get(name).unwrap_or_default(),
    };
    let other = argument(0, "default_value");
    let boolean = argument(1, "boolean");
    kwargs.assert_all_used()?;
    match value.is_undefined() || (boolean.is_true() && !value.is_true()) {
        true if other.is_undefined() => Ok("".into()),
        true => Ok(other),
        false => Ok(value.clone()),
    }
}

/// The filter `indent`. Jinja2 keeps a line end at the end of the text, and minijinja does not.
fn indent(
    text: StringInput<'_>,
    width: Option<usize>,
    first: Option<bool>,
    blank: Option<bool>,
    kwargs: Kwargs,
) -> Result<Value, Error> {
    let end = if text.as_str().ends_with('\n') { "\n" } else { "" };
    let indented = filters::indent(text, width, first, blank, kwargs)?;
    Ok(format!("{indented}{end}").into())
}

/// The test `iterable`. In Python `none` is not iterable, but minijinja iterates over it.
fn is_iterable(value: &Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

/// The test `sequence`. Everything that has a length and items is a sequence: also texts, dicts and slices of lists.
fn is_sequence(value: &Value) -> bool {
    match value.kind() {
        ValueKind::Undefined | ValueKind::String | ValueKind::Map | ValueKind::Seq => true,
        ValueKind::Iterable => value.len().is_some(),
        _ => false,
    }
}
