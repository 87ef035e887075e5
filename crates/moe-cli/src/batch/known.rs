//! Which lines are answered, and which `custom_id`s have occurred, in a few bytes each.
//!
//! A line is identified by its `custom_id`, so that an input may be extended or reordered between runs. Error records
//! of lines without a usable `custom_id` (not JSON, no or a repeated `custom_id`) are identified by the line's number,
//! in their `id`.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher, RandomState};

use super::fingerprint::Fingerprint;

/// The beginning of the `id` of a record that is identified by its line number.
const LINE: &str = "line-";

/// The `id` of a record whose line is identified by its `custom_id`.
pub fn request_id(line: u64) -> String {
    format!("request-{line}")
}

/// The `id` of an error record whose line is only identified by its number.
pub fn line_id(line: u64) -> String {
    format!("{LINE}{line}")
}

/// What identifies the line of a record over several runs: its `custom_id`, or else its number.
pub fn name(id: &str, custom_id: Option<&str>) -> String {
    match custom_id {
        Some(custom_id) if !id.starts_with(LINE) => format!("custom-{custom_id}"),
        _ => id.to_string(),
    }
}

/// A line that an earlier run answered.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Answered {
    /// The offset of its record in the output.
    pub at: u64,
    /// The fingerprint of its request, if the record has one.
    pub request: Option<Fingerprint>,
}

/// What is known of an input and its output.
pub struct Known {
    hashers: [RandomState; 2],
    /// By the hash of the line's name.
    answered: HashMap<u128, Answered>,
    /// Hashes of the names of the input so far.
    met: HashSet<u128>,
}

/// The largest number of lines for which memory is reserved in advance: 68 MiB.
const MAX_ROOM: u64 = 3 << 20;

impl Known {
    /// Nothing is known yet; memory is reserved for this number of lines.
    pub fn with_lines(lines: u64) -> Self {
        Self {
            hashers: Default::default(),
            answered: HashMap::new(),
            met: HashSet::with_capacity(lines.min(MAX_ROOM) as usize),
        }
    }

    /// 128 bits of SipHash with random keys of this run. The probability that two of n names have the same hash is
    /// n^2 / 2^129, which is below 10^-20 for a billion, whatever the names are.
    fn hash(&self, name: &str) -> u128 {
        let [high, low] = self.hashers.each_ref().map(|hasher| hasher.hash_one(name));
        (high as u128) << 64 | low as u128
    }

    /// A hash of the text of a request.
    pub fn hash_of_request(&self, text: &[u8]) -> u64 {
        self.hashers[0].hash_one(text)
    }

    /// Notes the record of a line in the output.
    pub fn note(&mut self, name: &str, record: Answered) {
        self.answered.insert(self.hash(name), record);
    }

    /// Notes a line of the input; returns whether its name occurs for the first time.
    pub fn meet(&mut self, name: &str) -> bool {
        self.met.insert(self.hash(name))
    }

    /// The record of an earlier run that answers the line with this name.
    pub fn answered(&self, name: &str) -> Option<Answered> {
        self.answered.get(&self.hash(name)).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noted(names: impl IntoIterator<Item = String>) -> Known {
        let mut known = Known::with_lines(0);
        names.into_iter().for_each(|name| known.note(&name, Answered { at: 0, request: None }));
        known
    }

    #[test]
    fn records_are_told_apart_by_custom_id_or_line() {
        let mut known =
            noted([name(&request_id(1), Some("a")), name(&line_id(7), None), name(&line_id(8), Some("b"))]);
        let is_done = |id: &str, custom_id| known.answered(&name(id, custom_id)).is_some();
        assert!(is_done(&request_id(5), Some("a")), "wherever the line is now");
        assert!(
            !is_done(&request_id(8), Some("b")),
            "the record of a repeated custom_id answers only its line"
        );
        assert!(is_done(&line_id(7), None) && is_done(&line_id(8), Some("a")) && !is_done(&line_id(1), None));
        assert!(!is_done(&request_id(7), Some("line-7")), "a custom_id may look like the name of a line");
        assert!(known.meet("a") && !known.meet("a") && known.meet("b"), "answered is not met");
    }

    #[test]
    fn nothing_is_forgotten() {
        let id = |i: u64| format!("request {i}");
        let mut known = noted((0..10_000).step_by(2).map(id));
        assert!((1..10_000).step_by(2).all(|i| known.meet(&id(i))), "all are new");
        for i in 0..20_000 {
            assert_eq!(known.answered(&id(i)).is_some(), i < 10_000 && i % 2 == 0, "{i}");
            assert_eq!(known.meet(&id(i)), i >= 10_000 || i % 2 == 0, "{i}");
        }
    }

    #[test]
    fn room_is_made_in_advance_within_limits() {
        assert!(Known::with_lines(u64::MAX).met.capacity() < 2 * MAX_ROOM as usize);
        assert_eq!(size_of::<(u128, Answered)>(), 32, "what the documentation says of memory");
        let mut known = Known::with_lines(10_000);
        let room = known.met.capacity();
        assert!((0..10_000).all(|i| known.meet(&i.to_string())));
        assert_eq!(known.met.capacity(), room, "it did not grow");
    }
}
