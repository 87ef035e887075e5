//! Why lines of a batch have no answer: the number of lines for each reason, with an example.

use std::fmt;

use moe_engine::terminal::shortened;

/// Number of reasons that are counted separately; later ones are counted together.
const KEPT: usize = 64;
/// Number of reasons that are shown, the most frequent first.
const SHOWN: usize = 5;
/// The largest number of characters of a reason.
const LONGEST: usize = 300;

/// The reasons of a run.
#[derive(Default)]
pub struct Reasons {
    reasons: Vec<Reason>,
    others: u64,
}

struct Reason {
    kind: String,
    count: u64,
    line: u64,
    message: String,
}

impl Reasons {
    /// Adds the error of a line.
    pub fn add(&mut self, line: u64, message: &str) {
        let kind = kind(message);
        if let Some(reason) = self.reasons.iter_mut().find(|reason| reason.kind == kind) {
            reason.count += 1;
        } else if self.reasons.len() < KEPT {
            let message = shortened(message, LONGEST).into_owned();
            self.reasons.push(Reason { kind, count: 1, line, message });
        } else {
            self.others += 1;
        }
    }
}

/// The common part of messages with the same reason: everything but numbers and quoted text.
fn kind(message: &str) -> String {
    let mut kind = String::new();
    let mut quoted = false;
    let mut last = ' ';
    for c in message.chars().take(LONGEST) {
        match c {
            '"' => quoted = !quoted,
            _ if quoted => {}
            c if c.is_ascii_digit() => {
                if !last.is_ascii_digit() {
                    kind.push('0');
                }
            }
            c => kind.push(c),
        }
        last = c;
    }
    kind
}

impl fmt::Display for Reasons {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut reasons: Vec<_> = self.reasons.iter().collect();
        reasons.sort_by_key(|reason| (u64::MAX - reason.count, reason.line));
        for Reason { count, line, message, .. } in reasons.iter().take(SHOWN) {
            writeln!(f, "{count:>7} as line {line}: {}", message.replace('\n', " "))?;
        }
        let rest: u64 = reasons.iter().skip(SHOWN).map(|reason| reason.count).sum();
        match rest + self.others {
            0 => Ok(()),
            rest => writeln!(f, "{rest:>7} for other reasons, which their records tell"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_counted_by_reason() {
        let mut reasons = Reasons::default();
        reasons.add(3, "model: \"a\" is not served");
        for line in 4..10 {
            reasons.add(line, &format!("it is not JSON: expected value at column {line}"));
        }
        reasons.add(11, "model: \"b 5\" is not served");
        assert_eq!(
            reasons.to_string(),
            "      6 as line 4: it is not JSON: expected value at column 4\n      2 as line 3: model: \"a\" is not served\n"
        );
    }

    #[test]
    fn memory_and_screen_are_bounded() {
        let mut reasons = Reasons::default();
        for line in 0..1000 {
            let word: String = std::iter::repeat_n('x', line as usize).collect();
            reasons.add(line, &format!("{word} {}", "y".repeat(10_000)));
        }
        let text = reasons.to_string();
        assert!(reasons.reasons.len() == KEPT && text.lines().count() == SHOWN + 1, "{text}");
        assert!(text.len() < 2500 && text.contains("995 for other reasons"), "{text}");
    }
}
