//! Which lines are answered and which `custom_id`s have been met, in a few bytes each.
//!
//! A line is known by its `custom_id`, so that an input may be extended or sorted anew between
//! runs. Error records of lines that cannot be told apart by it (not JSON, no or a repeated
//! `custom_id`) are known by the line's number, in their `id`.

use std::collections::HashSet;
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
pub struct Known {
    hashers: [RandomState; 2],
    ids: Table,
    /// Numbers of answered lines that no `custom_id` names.
    lines: HashSet<u64>,
}

/// An earlier run answered this `custom_id`.
const ANSWERED: u64 = 1;
/// A line of the input has this `custom_id`.
const MET: u64 = 2;

impl Known {
    /// Nothing is known; memory is taken for so many lines of input.
    pub fn with_lines(lines: u64) -> Self {
        Self { hashers: Default::default(), ids: Table::with_room(lines), lines: HashSet::new() }
    }

    /// 126 bits of SipHash with keys of this run: among n of them two are alike with a chance of
    /// n^2 / 2^127, which is below 10^-20 for a billion, whatever the ids are.
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
                self.ids.add(self.hash(custom_id), ANSWERED);
            }
            (None, None) => {}
        }
    }

    /// Notes a line of the input; whether its `custom_id` is met for the first time.
    pub fn meet(&mut self, custom_id: &str) -> bool {
        self.ids.add(self.hash(custom_id), MET) & MET == 0
    }

    /// Whether an earlier run answered a line, known by its `custom_id` or else by its number.
    pub fn is_done(&self, line: u64, custom_id: Option<&str>) -> bool {
        match custom_id {
            Some(custom_id) => self.ids.get(self.hash(custom_id)) & ANSWERED != 0,
            None => self.lines.contains(&line),
        }
    }
}

/// Hashes with their marks, in a table with linear probing: 16 bytes a slot, at least a quarter of
/// them free, and all of its memory taken when it is made.
struct Table {
    /// The lowest bits of the second number are the marks; without any, the slot is free.
    slots: Vec<[u64; 2]>,
    used: usize,
}

const MARKS: u64 = ANSWERED | MET;
/// Slots that are made in advance at most: 64 MiB, three million lines.
const MAX_ROOM: u64 = 1 << 22;

impl Table {
    fn with_room(entries: u64) -> Self {
        let slots = entries.saturating_add(entries / 3).clamp(64, MAX_ROOM).next_power_of_two();
        Self::with_slots(slots as usize)
    }

    fn with_slots(slots: usize) -> Self {
        // Written one by one: zeros from the allocator take memory only when they are used.
        let empty = || std::hint::black_box([0; 2]);
        Self { slots: std::iter::repeat_with(empty).take(slots).collect(), used: 0 }
    }

    /// Where a hash is, or the free slot where it belongs.
    fn find(&self, hash: [u64; 2]) -> usize {
        let mask = self.slots.len() - 1;
        let mut at = hash[0] as usize & mask;
        loop {
            let [first, second] = self.slots[at];
            if second & MARKS == 0 || (first == hash[0] && second | MARKS == hash[1] | MARKS) {
                return at;
            }
            at = (at + 1) & mask;
        }
    }

    /// The marks of a hash.
    fn get(&self, hash: [u64; 2]) -> u64 {
        self.slots[self.find(hash)][1] & MARKS
    }

    /// Adds marks to a hash; those that it had.
    fn add(&mut self, hash: [u64; 2], marks: u64) -> u64 {
        if self.used >= self.slots.len() / 4 * 3 {
            let grown = Self::with_slots(self.slots.len() * 2);
            for [first, second] in std::mem::replace(self, grown).slots {
                if second & MARKS != 0 {
                    self.add([first, second], second & MARKS);
                }
            }
        }
        let at = self.find(hash);
        let had = self.slots[at][1] & MARKS;
        self.used += usize::from(had == 0);
        self.slots[at] = [hash[0], hash[1] & !MARKS | had | marks];
        had
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_told_apart_by_custom_id_or_line() {
        let mut known = Known::with_lines(0);
        known.answered(&request_id(1), Some("a"));
        known.answered(&line_id(7), None);
        known.answered(&line_id(8), Some("b"));
        assert!(known.is_done(5, Some("a")), "wherever the line is now");
        assert!(!known.is_done(8, Some("b")), "the record of a repeated custom_id answers only its line");
        assert!(known.is_done(7, None) && known.is_done(8, None) && !known.is_done(1, None));
        assert!(known.meet("a") && !known.meet("a") && known.meet("b"), "answered is not met");
    }

    #[test]
    fn the_table_grows_and_forgets_nothing() {
        let mut known = Known::with_lines(0);
        let id = |i: u64| format!("request {i}");
        for i in 0..10_000 {
            match i % 2 {
                0 => known.answered(&request_id(i), Some(&id(i))),
                _ => assert!(known.meet(&id(i)), "{i} is new"),
            }
        }
        for i in 0..20_000 {
            assert_eq!(known.is_done(i, Some(&id(i))), i < 10_000 && i % 2 == 0, "{i}");
            assert_eq!(known.meet(&id(i)), i >= 10_000 || i % 2 == 0, "{i}");
        }
        assert_eq!(known.ids.used, 20_000);
    }

    #[test]
    fn hashes_that_begin_alike_share_no_marks() {
        let mut table = Table::with_room(0);
        let last = table.slots.len() as u64 - 1;
        let hashes = [[last, 0], [last, 4], [last, 8], [0, 0], [0, 4]];
        for hash in hashes {
            assert_eq!((table.get(hash), table.add(hash, MET)), (0, 0));
        }
        assert_eq!(table.add(hashes[1], ANSWERED), MET);
        assert_eq!(hashes.map(|hash| table.get(hash)), [MET, MET | ANSWERED, MET, MET, MET]);
    }

    #[test]
    fn room_is_made_in_advance_within_limits() {
        assert_eq!(Table::with_room(10_000).slots.len(), 16_384);
        assert_eq!(Table::with_room(u64::MAX).slots.len() as u64, MAX_ROOM);
        let mut known = Known::with_lines(10_000);
        let slots = known.ids.slots.len();
        assert!((0..10_000).all(|i| known.meet(&i.to_string())));
        assert_eq!(known.ids.slots.len(), slots, "it did not grow");
    }
}
