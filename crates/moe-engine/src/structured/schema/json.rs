//! JSON values whose numbers keep their digits. A float would change integers above 2^53.

use super::decimal::Decimal;

/// The deepest nesting of lists and objects.
const DEEPEST: usize = 128;

/// A value.
#[derive(Debug)]
pub(super) enum Json {
    Null,
    Bool(bool),
    /// A number as it is written in the text.
    Number(String),
    String(String),
    Array(Vec<Json>),
    /// The members in order. If a name is written twice, only the last value is kept.
    Object(Vec<(String, Json)>),
}

impl Json {
    /// Reads a JSON text.
    ///
    /// # Errors
    /// The text is not JSON, or is nested too deeply.
    pub fn read(text: &str) -> Result<Self, String> {
        // serde_json checks the text and reports what is wrong and where. The reader below relies on a correct text.
        let _: serde::de::IgnoredAny = serde_json::from_str(text).map_err(not_json)?;
        Reader { text, at: 0 }.value(0)
    }

    /// Returns the member of an object.
    pub fn get(&self, name: &str) -> Option<&Self> {
        match self {
            Self::Object(members) => members.iter().find(|(other, _)| other == name).map(|(_, value)| value),
            _ => None,
        }
    }

    /// Returns the text of a string.
    pub fn str(&self) -> Option<&str> {
        match self {
            Self::String(text) => Some(text),
            _ => None,
        }
    }

    /// Returns the items of a list.
    pub fn array(&self) -> Option<&[Self]> {
        match self {
            Self::Array(items) => Some(items),
            _ => None,
        }
    }

    /// Returns the members of an object.
    pub fn object(&self) -> Option<&[(String, Self)]> {
        match self {
            Self::Object(members) => Some(members),
            _ => None,
        }
    }

    /// Returns the value as a count. The number 5.0 is 5.
    pub fn size(&self) -> Option<usize> {
        match self {
            Self::Number(text) => Decimal::read(text).ok()?.size(),
            _ => None,
        }
    }

    /// Returns the first characters of the value, for a message.
    pub fn short(&self) -> String {
        const LONGEST: usize = 60;
        match self {
            Self::Null => "null".into(),
            Self::Bool(value) => value.to_string(),
            Self::Number(text) => text.chars().take(LONGEST).collect(),
            Self::String(text) => format!("{:?}", text.chars().take(LONGEST).collect::<String>()),
            Self::Array(items) => format!("a list of {}", items.len()),
            Self::Object(members) => format!("an object of {}", members.len()),
        }
    }
}

/// Reads a text that is known to be JSON.
struct Reader<'t> {
    text: &'t str,
    at: usize,
}

impl Reader<'_> {
    /// Returns the next byte that is not white space.
    fn peek(&mut self) -> u8 {
        let rest = &self.text.as_bytes()[self.at..];
        self.at += rest.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
        self.text.as_bytes().get(self.at).copied().unwrap_or_default()
    }

    fn take(&mut self, byte: u8) -> bool {
        let found = self.peek() == byte;
        self.at += usize::from(found);
        found
    }

    fn value(&mut self, depth: usize) -> Result<Json, String> {
        if depth > DEEPEST {
            return Err(format!("it is nested more than {DEEPEST} levels deep"));
        }
        match self.peek() {
            b'{' => {
                self.at += 1;
                let mut members = Vec::new();
                while !self.take(b'}') {
                    let name = self.string()?;
                    self.take(b':');
                    members.push((name, self.value(depth + 1)?));
                    self.take(b',');
                }
                Ok(Json::Object(last_of_each(members)))
            }
            b'[' => {
                self.at += 1;
                let mut items = Vec::new();
                while !self.take(b']') {
                    items.push(self.value(depth + 1)?);
                    self.take(b',');
                }
                Ok(Json::Array(items))
            }
            b'"' => self.string().map(Json::String),
            _ => Ok(match self.word() {
                "true" => Json::Bool(true),
                "false" => Json::Bool(false),
                "null" => Json::Null,
                number => Json::Number(number.to_string()),
            }),
        }
    }

    fn string(&mut self) -> Result<String, String> {
        self.peek();
        let rest = &self.text.as_bytes()[self.at..];
        let mut end = 1;
        while rest.get(end).is_some_and(|&byte| byte != b'"') {
            end += if rest[end] == b'\\' { 2 } else { 1 };
        }
        let quoted = self.text.get(self.at..=self.at + end).unwrap_or_default();
        self.at += end + 1;
        serde_json::from_str(quoted).map_err(not_json)
    }

    fn word(&mut self) -> &str {
        let rest = &self.text[self.at..];
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && !matches!(c, '+' | '-' | '.'));
        let word = &rest[..end.unwrap_or(rest.len())];
        self.at += word.len();
        word
    }
}

fn not_json(error: serde_json::Error) -> String {
    format!("it is not JSON: {error}")
}

/// Returns the members without those that a later member of the same name replaces.
fn last_of_each(members: Vec<(String, Json)>) -> Vec<(String, Json)> {
    let last: std::collections::HashMap<String, usize> =
        members.iter().enumerate().map(|(at, (name, _))| (name.clone(), at)).collect();
    if last.len() == members.len() {
        return members;
    }
    let kept = members.into_iter().enumerate().filter(|(at, (name, _))| last[name] == *at);
    kept.map(|(_, member)| member).collect()
}

/// Returns the elements of the value of a keyword.
pub(super) fn list<'d>(value: &'d Json, name: &str) -> Result<&'d [Json], String> {
    value.array().ok_or_else(|| wrong(name, "a list", value))
}

/// Returns the error for a keyword that has a wrong value.
pub(super) fn wrong(name: &str, expected: &str, got: &Json) -> String {
    format!("{name}: expected {expected}, got {}", got.short())
}
