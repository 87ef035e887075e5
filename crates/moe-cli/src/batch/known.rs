//! Which lines are answered and which `custom_id`s have been met, in a few bytes each.
//!
//! A line is known by its `custom_id`, so that an input may be extended or sorted anew between
//! runs. Error records of lines that cannot be told apart by it (not JSON, no or a repeated
//! `custom_id`) are known by the line's number, in their `id`.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher, RandomState};

use super::fingerprint::Fingerprint;

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

/// Whether an `id` is of the form of [`line_id`].
pub fn is_line_id(id: &str) -> bool {
    id.starts_with(LINE)
}

/// What is known of an input and its output.
pub struct Known {
    hashers: [RandomState; 2],
    /// Hashes of the `custom_id`s that an earlier run answered, and what they asked for, where the record says it.
    answered: HashMap<u128, Option<Fingerprint>>,
    /// Hashes of the `custom_id`s of the input so far.
    met: HashSet<u128>,
    /// Numbers of answered lines that no `custom_id` names.
    lines: HashSet<u64>,
}

/// Lines whose room is made in advance at most: 68 MiB.
const MAX_ROOM: u64 = 3 << 20;

impl Known {
    /// Nothing is known; room is made for so many lines of input.
    pub fn with_lines(lines: u64) -> Self {
        Self {
            hashers: Default::default(),
            answered: HashMap::new(),
            met: HashSet::with_capacity(lines.min(MAX_ROOM) as usize),
            lines: HashSet::new(),
        }
    }

    /// 128 bits of SipHash with keys of this run: among n of them two are alike with a chance of
    /// n^2 / 2^129, which is below 10^-20 for a billion, whatever the ids are.
    fn hash(&self, custom_id: &str) -> u128 {
        let [high, low] = self.hashers.each_ref().map(|hasher| hasher.hash_one(custom_id));
        (high as u128) << 64 | low as u128
    }

    /// Notes a record of the output.
    pub fn answered(&mut self, id: &str, custom_id: Option<&str>, request: Option<Fingerprint>) {
        let line = id.strip_prefix(LINE).and_then(|number| number.parse().ok());
        if let Some(line) = line {
            self.lines.insert(line);
        } else if let Some(custom_id) = custom_id {
            self.answered.insert(self.hash(custom_id), request);
        }
    }

    /// Notes a line of the input; whether its `custom_id` is met for the first time.
    pub fn meet(&mut self, custom_id: &str) -> bool {
        self.met.insert(self.hash(custom_id))
    }

    /// What an earlier run answered under a `custom_id`, if the record says it.
    pub fn earlier_request(&self, custom_id: &str) -> Option<Fingerprint> {
        self.answered.get(&self.hash(custom_id)).copied().flatten()
    }

    /// Whether an earlier run answered a line, known by its `custom_id` or else by its number.
    pub fn is_done(&self, line: u64, custom_id: Option<&str>) -> bool {
        match custom_id {
            Some(custom_id) => self.answered.contains_key(&self.hash(custom_id)),
            None => self.lines.contains(&line),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_told_apart_by_custom_id_or_line() {
        let mut known = Known::with_lines(0);
        known.answered(&request_id(1), Some("a"), None);
        known.answered(&line_id(7), None, None);
        known.answered(&line_id(8), Some("b"), None);
        assert!(known.is_done(5, Some("a")), "wherever the line is now");
        assert!(!known.is_done(8, Some("b")), "the record of a repeated custom_id answers only its line");
        assert!(known.is_done(7, None) && known.is_done(8, None) && !known.is_done(1, None));
        assert!(known.meet("a") && !known.meet("a") && known.meet("b"), "answered is not met");
    }

    #[test]
    fn nothing_is_forgotten() {
        let mut known = Known::with_lines(0);
        let id = |i: u64| format!("request {i}");
        for i in 0..10_000 {
            match i % 2 {
                0 => known.answered(&request_id(i), Some(&id(i)), None),
                _ => assert!(known.meet(&id(i)), "{i} is new"),
            }
        }
        for i in 0..20_000 {
            assert_eq!(known.is_done(i, Some(&id(i))), i < 10_000 && i % 2 == 0, "{i}");
            assert_eq!(known.meet(&id(i)), i >= 10_000 || i % 2 == 0, "{i}");
        }
    }

    #[test]
    fn room_is_made_in_advance_within_limits() {
        assert!(Known::with_lines(u64::MAX).met.capacity() < 2 * MAX_ROOM as usize);
        let mut known = Known::with_lines(10_000);
        let room = known.met.capacity();
        assert!((0..10_000).all(|i| known.meet(&i.to_string())));
        assert_eq!(known.met.capacity(), room, "it did not grow");
    }
}
