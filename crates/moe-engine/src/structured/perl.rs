//! Writes `\d`, `\w` and `\s` of regular expressions as classes of ASCII characters.
//!
//! The regex crate reads them as Unicode classes, in which `\d` also holds Arabic digits. xgrammar and JSON Schema read
//! ASCII classes, and a user who writes `\d{3}` means `[0-9]{3}`.

/// Returns the inside of the class that a letter stands for.
pub(super) fn class(letter: char) -> Option<&'static str> {
    match letter.to_ascii_lowercase() {
        'd' => Some("0-9"),
        'w' => Some("0-9A-Za-z_"),
        's' => Some(r"\x09-\x0D\x20"),
        _ => None,
    }
}

/// Returns the expression with every `\d`, `\D`, `\w`, `\W`, `\s` and `\S` written as a class of ASCII characters.
pub(super) fn ascii(regex: &str) -> String {
    let mut out = String::with_capacity(regex.len());
    let mut chars = regex.chars();
    while let Some(c) = chars.next() {
        if c != '\\' {
            out.push(c);
            continue;
        }
        match chars.next() {
            Some(letter) => match class(letter) {
                Some(class) => {
                    let negation = if letter.is_ascii_uppercase() { "^" } else { "" };
                    out.extend(["[", negation, class, "]"]);
                }
                None => out.extend(['\\', letter]),
            },
            None => out.push('\\'),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::ascii;

    #[test]
    fn classes_are_of_ascii() {
        assert_eq!(ascii(r"\d{3}-\D+"), "[0-9]{3}-[^0-9]+");
        assert_eq!(ascii(r"[\w.]\s"), r"[[0-9A-Za-z_].][\x09-\x0D\x20]");
        assert_eq!(ascii(r"\\d\p{L}\.\"), r"\\d\p{L}\.\", "an escaped backslash is no class");
    }
}
