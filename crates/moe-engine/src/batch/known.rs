//! Which lines are answered and which `custom_id`s have been met, in a few bytes each.
//!
//! A line is known by its `custom_id`, so that an input may be extended or sorted anew between
//! runs. Error records of lines that cannot be told apart by it (not JSON, no or a repeated
//! `custom_id`) are known by the line's number, in their `id`.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher, RandomState};

/// How the `id` of a record begins that is known by its line number.
const LINE: &str = "line-";

/// The `id` of a record of a line that its `custom_id` names.
pub fn request_id(line: u64) -> String {
    format!("request-{line}")
}

/// The `id` of an error record of a line that nothing but its number names.
pub fn line_id(line: u64) -> String {
    format!("{LINE}{line}")
}

/// What is known of an input and its output.
#[derive(Default)]
pub struct Known {
    hashers: [RandomState; 2],
    /// By the hash of a `custom_id`.
    ids: HashMap<[u64; 2], State>,
    /// Numbers of answered lines that no `custom_id` names.
    lines: HashSet<u64>,
}

#[derive(Clone, Copy, Default)]
struct State {
    answered: bool,
    met: bool,
}

impl Known {
    /// 128 bits, so that among billions no two are alike.
    fn hash(&self, custom_id: &str) -> [u64; 2] {
        [0, 1].map(|i: usize| self.hashers[i].hash_one(custom_id))
    }

    /// Notes a record of the output.
    pub fn answered(&mut self, id: &str, custom_id: Option<&str>) {
        let line = id.strip_prefix(LINE).and_then(|number| number.parse().ok());
        match (line, custom_id) {
            (Some(line), _) => {
                self.lines.insert(line);
            }
            (None, Some(custom_id)) => {
                let hash = self.hash(custom_id);
                self.ids.entry(hash).or_default().answered = true;
            }
            (None, None) => {}
        }
    }

    /// Notes a line of the input; whether its `custom_id` is met for the first time.
    pub fn meet(&mut self, custom_id: &str) -> bool {
        let hash = self.hash(custom_id);
        !std::mem::replace(&mut self.ids.entry(hash).or_default().met, true)
    }

    /// Whether an earlier run answered a line, known by its `custom_id` or else by its number.
    pub fn is_done(&self, line: u64, custom_id: Option<&str>) -> bool {
        match custom_id {
            Some(custom_id) => self.ids.get(&self.hash(custom_id)).is_some_and(|state| state.answered),
            None => self.lines.contains(&line),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_told_apart_by_custom_id_or_line() {
        let mut known = Known::default();
        known.answered(&request_id(1), Some("a"));
        known.answered(&line_id(7), None);
        known.answered(&line_id(8), Some("b"));
        assert!(known.is_done(5, Some("a")), "wherever the line is now");
        assert!(!known.is_done(8, Some("b")), "the record of a repeated custom_id answers only its line");
        assert!(known.is_done(7, None) && known.is_done(8, None) && !known.is_done(1, None));
        assert!(known.meet("a") && !known.meet("a") && known.meet("b"), "answered is not met");
    }
}
