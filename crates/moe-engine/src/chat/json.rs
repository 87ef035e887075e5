//! Writes JSON in exactly the form of Python's `json.dumps`: a space after `,` and `:`, no HTML escapes, and floats as
//! Python prints them. The filter `tojson` of chat templates means this form, and prompts must match it to the byte.

use std::fmt::Write;

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind};

/// The filter `tojson`. Its parameters have the names and the order of transformers; `sort_keys` has no position.
pub fn tojson(
    value: &Value,
    ensure_ascii: Option<Value>,
    indent: Option<Value>,
    separators: Option<Value>,
    kwargs: Kwargs,
) -> Result<String, Error> {
    let option = |given: Option<Value>, name: &str| match given {
        None => kwargs.get::<Option<Value>>(name),
        given => Ok(given),
    };
    let ensure_ascii = option(ensure_ascii, "ensure_ascii")?.is_some_and(|v| v.is_true());
    let sort_keys = option(None, "sort_keys")?.is_some_and(|v| v.is_true());
    let indent = option(indent, "indent")?.map(indentation).transpose()?;
    let separators = option(separators, "separators")?.map(pair).transpose()?;
    kwargs.assert_all_used()?;
    let (item, key) = separators
        .unwrap_or_else(|| (if indent.is_some() { "," } else { ", " }.to_string(), ": ".to_string()));
    let mut writer = Writer { out: String::new(), ensure_ascii, sort_keys, indent, item, key };
    writer.value(value, 0)?;
    Ok(writer.out)
}

fn fail<T>(message: impl Into<std::borrow::Cow<'static, str>>) -> Result<T, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

/// The largest indentation. A template with a larger one would only fill the memory.
const MAX_INDENT: usize = 64;

fn indentation(value: Value) -> Result<String, Error> {
    match (value.as_str(), value.as_i64()) {
        (Some(text), _) if text.len() <= MAX_INDENT => Ok(text.to_string()),
        (_, Some(n)) if n <= MAX_INDENT as i64 => Ok(" ".repeat(n.max(0) as usize)),
        _ => fail(format!("tojson: indent must be at most {MAX_INDENT} spaces or a text, not {value}")),
    }
}

fn pair(value: Value) -> Result<(String, String), Error> {
    let texts: Vec<Value> = value.try_iter()?.collect();
    match texts.iter().map(Value::as_str).collect::<Vec<_>>()[..] {
        [Some(item), Some(key)] => Ok((item.to_string(), key.to_string())),
        _ => fail(format!("tojson: separators must be two texts, not {value}")),
    }
}

/// Writes a float as Python's `repr` does. Rust's `Debug` uses exponents for the same numbers, but writes `1e-5` and
/// `1e20` instead of `1e-05` and `1e+20`.
pub fn float(x: f64) -> String {
    let text = format!("{x:?}");
    let Some((digits, exponent)) = text.split_once('e') else { return text };
    let (sign, exponent) = match exponent.strip_prefix('-') {
        Some(exponent) => ('-', exponent),
        None => ('+', exponent),
    };
    format!("{digits}e{sign}{exponent:0>2}")
}

/// Returns the number in a value that is a float, and `None` for an integer.
pub fn as_float(value: &Value) -> Option<f64> {
    let float = value.is_number() && !value.is_integer();
    float.then(|| f64::try_from(value.clone()).ok()).flatten()
}

struct Writer {
    out: String,
    ensure_ascii: bool,
    sort_keys: bool,
    /// The indentation of one level. If it is set, every item has a line of its own.
    indent: Option<String>,
    /// The text between two items.
    item: String,
    /// The text between a key and its value.
    key: String,
}

impl Writer {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        match value.kind() {
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items = value.try_iter()?.map(|item| (None, item)).collect();
                self.container(['[', ']'], items, depth)?;
            }
            ValueKind::Map => {
                let pairs = value.as_object().and_then(|object| object.try_iter_pairs());
                let mut entries: Vec<_> =
                    pairs.into_iter().flatten().map(|(key, v)| (Some(key), v)).collect();
                if self.sort_keys {
                    entries.sort_by(|a, b| a.0.cmp(&b.0));
                }
                self.container(['{', '}'], entries, depth)?;
            }
            _ => match scalar(value) {
                Some(text) => self.out.push_str(&text),
                None => return fail(format!("tojson: {} is not JSON serializable", value.kind())),
            },
        }
        Ok(())
    }

    fn container(
        &mut self,
        brackets: [char; 2],
        entries: Vec<(Option<Value>, Value)>,
        depth: usize,
    ) -> Result<(), Error> {
        self.out.push(brackets[0]);
        for (i, (key, item)) in entries.iter().enumerate() {
            if i > 0 {
                self.out.push_str(&self.item);
            }
            self.new_line(depth + 1);
            if let Some(key) = key {
                match key.as_str().map(str::to_string).or_else(|| scalar(key)) {
                    Some(key) => self.string(&key),
                    None => return fail(format!("tojson: {} cannot be a key", key.kind())),
                }
                self.out.push_str(&self.key);
            }
            self.value(item, depth + 1)?;
        }
        if !entries.is_empty() {
            self.new_line(depth);
        }
        self.out.push(brackets[1]);
        Ok(())
    }

    fn new_line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(indent.as_str(), depth));
        }
    }

    fn string(&mut self, s: &str) {
        self.out.push('"');
        for c in s.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if c < ' ' || (self.ensure_ascii && c > '~') => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        let _ = write!(self.out, "\\u{unit:04x}");
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

/// Returns the JSON text of a value that is neither a text nor a container.
fn scalar(value: &Value) -> Option<String> {
    match (value.kind(), as_float(value)) {
        (ValueKind::None, _) => Some("null".to_string()),
        (ValueKind::Bool, _) => Some(value.is_true().to_string()),
        (_, Some(x)) if x.is_infinite() => Some(if x > 0. { "Infinity" } else { "-Infinity" }.to_string()),
        (_, Some(x)) => Some(float(x)),
        (ValueKind::Number, None) => Some(value.to_string()),
        _ => None,
    }
}
