//! Works on the text of JSON. A parsed value would change the digits of long integers, because they become `f64`.

use std::iter::Peekable;
use std::str::CharIndices;

/// Returns the text of the value of a field. `json` must be a valid object. If it has several fields of this name, the
/// last one counts.
pub fn json_field<'a>(json: &'a str, name: &str) -> Option<&'a str> {
    let mut found = None;
    let mut rest = json.trim_start().strip_prefix('{')?.trim_start();
    while rest.starts_with('"') {
        let (key, after) = rest.split_at(string_len(rest)?);
        let value = after.trim_start().strip_prefix(':')?.trim_start();
        let (text, after) = value.split_at(value_len(value)?);
        if serde_json::from_str::<String>(key).ok()? == name {
            found = Some(text.trim_end());
        }
        rest = after.strip_prefix(',').unwrap_or_default().trim_start();
    }
    found
}

/// Returns the texts of the items of a list, or `None` if the JSON is not a list.
pub fn items(json: &str) -> Option<Vec<&str>> {
    serde_json::from_str::<Vec<serde::de::IgnoredAny>>(json).ok()?;
    let mut rest = json.trim().strip_prefix('[')?.trim_start();
    let mut items = Vec::new();
    while !rest.starts_with(']') {
        let (item, after) = rest.split_at(value_len(rest)?);
        items.push(item.trim_end());
        rest = after.strip_prefix(',').unwrap_or(after).trim_start();
    }
    Some(items)
}

/// Returns JSON without white space between its tokens.
pub fn compact(json: &str) -> String {
    spaced(json, "")
}

/// Returns JSON with the white space of Python's `json.dumps`, if it contains an integer that does not fit a machine
/// word. A parsed value would round such an integer. Otherwise returns `None`.
pub fn with_long_integers(json: &str) -> Option<String> {
    has_long_integer(json).then(|| spaced(json, " "))
}

fn spaced(json: &str, separator: &str) -> String {
    let mut out = String::with_capacity(json.len());
    let mut chars = json.char_indices().peekable();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => out += skip_string(json, at, &mut chars),
            c if c.is_ascii_whitespace() => {}
            ',' | ':' => {
                out.push(c);
                out += separator;
            }
            c => out.push(c),
        }
    }
    out
}

/// Whether JSON contains an integer that does not fit a machine word.
pub fn has_long_integer(json: &str) -> bool {
    let mut chars = json.char_indices().peekable();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => drop(skip_string(json, at, &mut chars)),
            '-' | '0'..='9' => {
                let number = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '+' | '-');
                let len = json[at..].find(|c| !number(c)).unwrap_or(json.len() - at);
                let text = &json[at..at + len];
                while chars.next_if(|(next, _)| *next < at + len).is_some() {}
                let integer = !text.contains(['.', 'e', 'E']);
                if integer && text.parse::<i64>().is_err() && text.parse::<u64>().is_err() {
                    return true;
                }
            }
            _ => {}
        }
    }
    false
}

/// Returns the string that begins at `at`, and skips its characters.
fn skip_string<'a>(json: &'a str, at: usize, chars: &mut Peekable<CharIndices>) -> &'a str {
    let end = at + string_len(&json[at..]).unwrap_or(json.len() - at);
    while chars.next_if(|(next, _)| *next < end).is_some() {}
    &json[at..end]
}

/// Returns the length of the string at the beginning of a text.
fn string_len(text: &str) -> Option<usize> {
    let mut escaped = false;
    for (i, byte) in text.bytes().enumerate().skip(1) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => return Some(i + 1),
            _ => {}
        }
    }
    None
}

/// Returns the length of the value at the beginning of a text. The value ends at the next comma or bracket of its
/// level.
fn value_len(text: &str) -> Option<usize> {
    find(text, |byte, depth| depth == 0 && matches!(byte, b'}' | b']' | b','))
}

/// Returns the length of the object or list at the beginning of a text, or `None` if it does not end.
pub fn closed_len(text: &str) -> Option<usize> {
    find(text, |byte, depth| depth <= 1 && matches!(byte, b'}' | b']')).map(|at| at + 1)
}

/// Returns the place of the first byte outside of strings that ends what is searched. `ends` also gets the number of
/// objects and lists that are open.
fn find(text: &str, ends: impl Fn(u8, usize) -> bool) -> Option<usize> {
    let mut depth = 0usize;
    let mut at = 0;
    while let Some(byte) = text.as_bytes().get(at) {
        match byte {
            byte if ends(*byte, depth) => return Some(at),
            b'"' => {
                at += string_len(&text[at..])?;
                continue;
            }
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth -= 1,
            _ => {}
        }
        at += 1;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_as_they_are_written() {
        let json =
            r#" {"a": {"b": "}\",", "x": [1, {"a": 2}]} , "n":12345678901234567890123 ,"\u0061b": "y" } "#;
        assert_eq!(json_field(json, "a"), Some(r#"{"b": "}\",", "x": [1, {"a": 2}]}"#));
        assert_eq!(json_field(json, "n"), Some("12345678901234567890123"));
        assert_eq!((json_field(json, "ab"), json_field(json, "b")), (Some("\"y\""), None));
        assert_eq!(json_field(r#"{"a": 1, "a": 2}"#, "a"), Some("2"));
        assert_eq!((json_field("{}", "a"), json_field("[1]", "a")), (None, None));
    }

    #[test]
    fn items_are_as_they_are_written() {
        let items = items(r#" [ {"a": "],"} , [1, 2],1.50 ] "#);
        assert_eq!(items.unwrap(), [r#"{"a": "],"}"#, "[1, 2]", "1.50"]);
        assert_eq!(super::items("[]"), Some(vec![]));
        assert_eq!((super::items("[1"), super::items("{}")), (None, None));
    }

    #[test]
    fn an_object_ends_with_its_last_bracket() {
        assert_eq!(closed_len(r#"{"a": "}\"]", "b": [{}]} and more"#), Some(24));
        assert_eq!(closed_len("[[1], [2]], 3"), Some(10));
        assert_eq!((closed_len(r#"{"a": ""#), closed_len("[{}")), (None, None));
    }

    #[test]
    fn white_space_is_that_between_tokens() {
        let json = "{ \"a b\" : [ 1 ,\n -2.5e+3, \"é \\\" \" ] }";
        assert_eq!(compact(json), r#"{"a b":[1,-2.5e+3,"é \" "]}"#);
        assert_eq!(with_long_integers(json), None);
        let long = "{\"a\":[ 18446744073709551616,-9223372036854775809,1e400]}";
        let want = "{\"a\": [18446744073709551616, -9223372036854775809, 1e400]}";
        assert_eq!(with_long_integers(long).as_deref(), Some(want));
        for short in ["18446744073709551615", "-9223372036854775808", "1e400", "\"18446744073709551616\""] {
            assert_eq!(with_long_integers(short), None, "{short}");
        }
    }
}
