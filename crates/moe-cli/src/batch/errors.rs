//! The error records of an output, and which of them a later record has made out of date.
//!
//! A line that is answered again gets a new record behind the old one, which is taken out when a run has ended. So a
//! record is only lost once there is a better one, also if its line is no longer in the input.

use std::collections::HashMap;

use super::known::is_line_id;

/// The newest record of each line that ever had an error record.
#[derive(Default)]
pub struct Errors {
    newest: HashMap<Name, Newest>,
    /// Error records that are out of date.
    pub superseded: u64,
}

/// What tells the records of a line from other records: its number, or its `custom_id`.
#[derive(PartialEq, Eq, Hash)]
enum Name {
    Line(String),
    Custom(String),
}

struct Newest {
    record: u64,
    is_error: bool,
}

impl Name {
    fn of(id: &str, custom_id: Option<&str>) -> Self {
        match custom_id {
            Some(custom_id) if !is_line_id(id) => Self::Custom(custom_id.to_string()),
            _ => Self::Line(id.to_string()),
        }
    }
}

impl Errors {
    /// Notes the record of this number; whether it takes the place of an error.
    pub fn note(&mut self, record: u64, id: &str, custom_id: Option<&str>, is_error: bool) -> bool {
        let name = Name::of(id, custom_id);
        let new = Newest { record, is_error };
        let replaced = match self.newest.get_mut(&name) {
            Some(newest) => std::mem::replace(newest, new).is_error,
            None if is_error => self.newest.insert(name, new).is_some(),
            None => false,
        };
        self.superseded += u64::from(replaced);
        replaced
    }

    /// Whether the error record of this number is out of date.
    pub fn is_superseded(&self, record: u64, id: &str, custom_id: Option<&str>) -> bool {
        self.newest.get(&Name::of(id, custom_id)).is_some_and(|newest| newest.record > record)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_record_of_a_line_counts() {
        let mut errors = Errors::default();
        assert!(!errors.note(0, "request-1", Some("a"), true));
        assert!(!errors.note(1, "request-2", Some("b"), false), "an answer is no error");
        assert!(!errors.note(2, "line-3", None, true) && !errors.note(3, "request-3", Some("line-3"), true));
        assert!(errors.note(4, "request-9", Some("a"), false), "wherever the line is now");
        assert!(errors.note(5, "line-3", Some("b"), true), "a repeated custom_id is known by its line");
        assert_eq!(errors.superseded, 2);
        let out = |record, id, custom_id| errors.is_superseded(record, id, custom_id);
        assert!(out(0, "request-1", Some("a")) && out(2, "line-3", None));
        assert!(!out(5, "line-3", Some("b")) && !out(3, "request-3", Some("line-3")));
    }
}
