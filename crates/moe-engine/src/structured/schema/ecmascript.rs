//! Reads the regular expressions of `pattern` and `patternProperties`. They have the syntax of ECMAScript, with
//! look-ahead.

use super::super::perl;
use super::pattern::{ENDLESS, Pattern};

/// The deepest nesting of groups.
const DEEPEST: usize = 100;

impl Pattern {
    /// Reads an expression.
    ///
    /// # Errors
    /// The expression is not well-formed or uses an unsupported feature.
    pub fn read(text: &str) -> Result<Self, String> {
        let mut reader = Reader { chars: text.chars().collect(), at: 0, depth: 0, fold: false, all: false };
        let pattern = reader.either();
        let pattern = pattern.and_then(|pattern| match reader.peek() {
            None => Ok(pattern),
            Some(_) => Err("unopened group".to_string()),
        });
        pattern.map_err(|e| format!("the regular expression {text:?} at character {}: {e}", reader.at))
    }
}

struct Reader {
    chars: Vec<char>,
    at: usize,
    depth: usize,
    /// Whether upper and lower case are the same.
    fold: bool,
    /// Whether a dot matches every character.
    all: bool,
}

impl Reader {
    fn peek(&self) -> Option<char> {
        self.chars.get(self.at).copied()
    }

    fn next(&mut self) -> Option<char> {
        let c = self.peek();
        self.at += usize::from(c.is_some());
        c
    }

    fn take(&mut self, text: &str) -> bool {
        let found = text.chars().enumerate().all(|(i, c)| self.chars.get(self.at + i) == Some(&c));
        self.at += if found { text.chars().count() } else { 0 };
        found
    }

    fn either(&mut self) -> Result<Pattern, String> {
        let mut parts = vec![self.concat()?];
        while self.take("|") {
            parts.push(self.concat()?);
        }
        Ok(if parts.len() == 1 { parts.swap_remove(0) } else { Pattern::Either(parts) })
    }

    fn concat(&mut self) -> Result<Pattern, String> {
        let mut parts = Vec::new();
        while let Some(c) = self.peek().filter(|c| !matches!(c, '|' | ')')) {
            self.at += 1;
            let atom = match self.atom(c)? {
                Some(atom) => atom,
                None => continue,
            };
            parts.push(self.repeated(atom)?);
        }
        Ok(if parts.len() == 1 { parts.swap_remove(0) } else { Pattern::Concat(parts) })
    }

    /// Reads the atom that begins with a character. Returns `None` if it was a group of flags.
    fn atom(&mut self, c: char) -> Result<Option<Pattern>, String> {
        Ok(Some(match c {
            '(' => return self.group(),
            '[' => self.class()?,
            '\\' => self.escape()?,
            '.' if self.all => Pattern::Class(r"[\x00-\x{10FFFF}]".into()),
            '.' => Pattern::Class(r"[^\n\r\x{2028}\x{2029}]".into()),
            '^' => Pattern::Start,
            '$' => Pattern::End,
            '*' | '+' | '?' => return Err(format!("nothing to repeat before {c}")),
            c => self.char(c),
        }))
    }

    fn char(&self, c: char) -> Pattern {
        if self.fold { self.folded(format!("[{}]", escaped(c))) } else { Pattern::Char(c) }
    }

    fn folded(&self, class: String) -> Pattern {
        Pattern::Class(if self.fold { format!("(?i:{class})") } else { class })
    }

    fn group(&mut self) -> Result<Option<Pattern>, String> {
        self.depth += 1;
        if self.depth > DEEPEST {
            return Err(format!("more than {DEEPEST} groups inside each other"));
        }
        let flags = (self.fold, self.all);
        let mut ahead = None;
        if self.take("?") {
            if self.take("=") {
                ahead = Some(true);
            } else if self.take("!") {
                ahead = Some(false);
            } else if self.take("<=") || self.take("<!") {
                return Err("look-behind is not supported".into());
            } else if self.take("<") || self.take("P<") {
                while self.next().ok_or("unclosed group name")? != '>' {}
            } else if self.flags()? {
                self.depth -= 1;
                return Ok(None);
            }
        }
        let inner = self.either()?;
        if !self.take(")") {
            return Err("unclosed group".into());
        }
        (self.fold, self.all) = flags;
        self.depth -= 1;
        Ok(Some(match ahead {
            Some(must) => Pattern::Ahead(Box::new(inner), must),
            None => inner,
        }))
    }

    /// Reads flags up to the colon, or up to the end of a group that holds only flags. In the second case it returns
    /// true.
    fn flags(&mut self) -> Result<bool, String> {
        let mut on = true;
        loop {
            match self.next() {
                Some(':') => return Ok(false),
                Some(')') => return Ok(true),
                Some('-') => on = false,
                Some('i') => self.fold = on,
                Some('s') => self.all = on,
                Some('u') => (),
                _ => return Err("this kind of group is not supported".into()),
            }
        }
    }

    /// Returns the atom with the repetitions that follow it.
    fn repeated(&mut self, mut atom: Pattern) -> Result<Pattern, String> {
        let mut repeated = false;
        loop {
            let before = self.at;
            let (least, most) = match self.next() {
                Some('*') => (0, ENDLESS),
                Some('+') => (1, ENDLESS),
                Some('?') => (0, 1),
                Some('{') => match self.counts() {
                    Some(counts) => counts,
                    None => {
                        self.at = before;
                        return Ok(atom);
                    }
                },
                _ => {
                    self.at = before;
                    return Ok(atom);
                }
            };
            if repeated {
                return Err("nothing to repeat".into());
            }
            if least > most {
                return Err(format!("a repetition of {least} to {most}"));
            }
            // A lazy repetition matches the same texts, only in another order.
            self.take("?");
            repeated = true;
            atom = Pattern::Repeat(Box::new(atom), least, most);
        }
    }

    /// Reads the counts in braces. A brace without counts is an ordinary character.
    fn counts(&mut self) -> Option<(u32, u32)> {
        let least = self.number()?;
        if self.take("}") {
            return Some((least, least));
        }
        if !self.take(",") {
            return None;
        }
        if self.take("}") {
            return Some((least, ENDLESS));
        }
        let most = self.number()?;
        self.take("}").then_some((least, most))
    }

    fn number(&mut self) -> Option<u32> {
        let begin = self.at;
        while self.peek().is_some_and(|c| c.is_ascii_digit()) {
            self.at += 1;
        }
        self.chars[begin..self.at].iter().collect::<String>().parse().ok().filter(|&n| n < ENDLESS)
    }

    fn escape(&mut self) -> Result<Pattern, String> {
        let c = self.next().ok_or("a backslash at the end")?;
        match c {
            'A' => return Ok(Pattern::Start),
            'Z' | 'z' => return Ok(Pattern::End),
            'b' | 'B' => return Err("word boundaries are not supported".into()),
            'k' | '1'..='9' => return Err("back-references are not supported".into()),
            'p' | 'P' => {
                let class = self.property(c)?;
                return Ok(self.folded(class));
            }
            _ => (),
        }
        if let Some(class) = perl::class(c) {
            let negation = if c.is_ascii_uppercase() { "^" } else { "" };
            return Ok(Pattern::Class(format!("[{negation}{class}]")));
        }
        let c = self.escaped_char(c)?;
        Ok(self.char(c))
    }

    /// Returns the character that an escape stands for.
    fn escaped_char(&mut self, c: char) -> Result<char, String> {
        Ok(match c {
            'n' => '\n',
            'r' => '\r',
            't' => '\t',
            'f' => '\x0C',
            'v' => '\x0B',
            '0' => '\0',
            'x' => self.hex(2)?,
            'u' if self.take("{") => {
                let begin = self.at;
                while self.next().ok_or("unclosed escape")? != '}' {}
                let digits: String = self.chars[begin..self.at - 1].iter().collect();
                u32::from_str_radix(&digits, 16).ok().and_then(char::from_u32).ok_or("no such character")?
            }
            'u' => self.hex(4)?,
            'c' => {
                let letter = self
                    .next()
                    .filter(char::is_ascii_alphabetic)
                    .ok_or("a control character without its letter")?;
                char::from(letter as u8 % 32)
            }
            c if c.is_ascii_alphanumeric() => return Err(format!("the escape \\{c} is not supported")),
            c => c,
        })
    }

    fn hex(&mut self, digits: usize) -> Result<char, String> {
        let first = self.code(digits)?;
        let low = 0xDC00..0xE000;
        if (0xD800..0xDC00).contains(&first) && self.take("\\u") {
            let second = self.code(4)?;
            if low.contains(&second) {
                return char::from_u32(0x10000 + ((first - 0xD800) << 10) + second - 0xDC00)
                    .ok_or("no such character".into());
            }
        }
        char::from_u32(first).ok_or("half a surrogate pair".into())
    }

    fn code(&mut self, digits: usize) -> Result<u32, String> {
        let text: String = self.chars.iter().skip(self.at).take(digits).collect();
        self.at += digits;
        let complete = text.chars().count() == digits && text.chars().all(|c| c.is_ascii_hexdigit());
        u32::from_str_radix(&text, 16)
            .ok()
            .filter(|_| complete)
            .ok_or(format!("expected {digits} hexadecimal digits"))
    }

    /// Returns a class of Unicode in the syntax of the regex crate.
    fn property(&mut self, letter: char) -> Result<String, String> {
        if !self.take("{") {
            return Err(format!("\\{letter} without a name in braces"));
        }
        let mut name = String::new();
        loop {
            match self.next().ok_or("unclosed name")? {
                '}' => return Ok(format!("\\{letter}{{{name}}}")),
                c if c.is_ascii_alphanumeric() || matches!(c, '_' | '=') => name.push(c),
                c => return Err(format!("a name with {c:?}")),
            }
        }
    }

    fn class(&mut self) -> Result<Pattern, String> {
        let mut class = String::from(if self.take("^") { "[^" } else { "[" });
        let empty = class.len();
        loop {
            if self.take("]") {
                break;
            }
            if self.take("[:") {
                return Err("POSIX classes are not supported".into());
            }
            let low = match self.class_item()? {
                Ok(c) => c,
                Err(part) => {
                    class.push_str(&part);
                    continue;
                }
            };
            class.push_str(&escaped(low));
            let range = self.peek() == Some('-') && self.chars.get(self.at + 1).is_some_and(|&c| c != ']');
            if !range {
                continue;
            }
            self.at += 1;
            match self.class_item()? {
                Ok(high) if high < low => return Err(format!("a range from {low:?} down to {high:?}")),
                Ok(high) => class.push_str(&format!("-{}", escaped(high))),
                Err(part) => class.push_str(&format!("{}{part}", escaped('-'))),
            }
        }
        if class.len() == empty {
            return Err("a class without characters".into());
        }
        class.push(']');
        Ok(self.folded(class))
    }

    /// Reads a character of a class, or a class inside it.
    fn class_item(&mut self) -> Result<Result<char, String>, String> {
        let c = self.next().ok_or("unclosed class")?;
        if c != '\\' {
            return Ok(Ok(c));
        }
        let c = self.next().ok_or("unclosed class")?;
        if let Some(class) = perl::class(c) {
            return Ok(Err(if c.is_ascii_uppercase() { format!("[^{class}]") } else { class.to_string() }));
        }
        match c {
            'b' => Ok(Ok('\x08')),
            'p' | 'P' => self.property(c).map(Err),
            c => self.escaped_char(c).map(Ok),
        }
    }
}

/// Returns a character, escaped so that the regex crate reads it as this character anywhere.
fn escaped(c: char) -> String {
    format!(r"\x{{{:X}}}", u32::from(c))
}
