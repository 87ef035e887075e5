//! Requests that are asked more than once and whose answers are all the same: one line is computed, and its answer is
//! written for the others too.
//!
//! A request is found by a keyed hash of its text, and the fingerprint in the record must match as well. So two
//! requests are only confused if two hashes of 64 bits are the same, one of them with a random key.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt::{Display, Formatter};

use serde_json::json;

use super::entries::Key;
use super::fingerprint::Fingerprint;
use super::records::Header;

/// A line that waits for the answer of another line.
pub struct Follower {
    /// Its number, from 1.
    pub number: u64,
    /// The identity of its record.
    pub key: Key,
}

/// A line that is being answered, and the lines that ask the same.
struct Leader {
    request: Option<Fingerprint>,
    followers: Vec<Follower>,
}

/// What is known of the answer to a request.
#[derive(Debug, PartialEq)]
pub enum Answer {
    /// Nothing.
    Unknown,
    /// Another line is being answered that asks the same.
    Coming,
    /// The output has it at this offset.
    At(u64),
}

/// The requests that may be asked again, by their hashes.
#[derive(Default)]
pub struct Repeats {
    /// Offsets of records.
    answered: HashMap<u64, u64>,
    running: HashMap<u64, Leader>,
    /// Number of lines that wait for the answer of another one.
    pub waiting: usize,
}

impl Repeats {
    /// The request of this hash is answered by the record at an offset.
    pub fn answered(&mut self, hash: u64, at: u64) {
        self.answered.entry(hash).or_insert(at);
    }

    /// The record that was noted for this request is of no use.
    pub fn forget(&mut self, hash: u64) {
        self.answered.remove(&hash);
    }

    /// The answer for a line. If nothing is known of it, the line becomes the one that is computed.
    pub fn find(&mut self, hash: u64, number: u64, key: &Key) -> Answer {
        if let Some(&at) = self.answered.get(&hash) {
            return Answer::At(at);
        }
        match self.running.entry(hash) {
            Entry::Vacant(place) => {
                place.insert(Leader { request: key.request, followers: Vec::new() });
                Answer::Unknown
            }
            Entry::Occupied(mut leader) if leader.get().request == key.request => {
                leader.get_mut().followers.push(Follower { number, key: key.clone() });
                self.waiting += 1;
                Answer::Coming
            }
            Entry::Occupied(_) => Answer::Unknown,
        }
    }

    /// The lines that waited for the answer of the line with this key, which has ended.
    pub fn finished(&mut self, hash: u64, key: &Key) -> Vec<Follower> {
        match self.running.entry(hash) {
            Entry::Occupied(leader) if leader.get().request == key.request => {
                let followers = leader.remove().followers;
                self.waiting -= followers.len();
                followers
            }
            _ => Vec::new(),
        }
    }
}

/// A record with the answer of another record, without its newline.
#[derive(Debug)]
pub struct Repeated<'a> {
    key: &'a Key,
    /// The beginning of the body's `id`: `cmpl` or `chatcmpl`.
    kind: &'a str,
    /// The record after the body's `id`.
    rest: &'a str,
}

impl<'a> Repeated<'a> {
    /// The answer of `record`, a line of the output, for the line with this key; `None` if the record is no answer to
    /// this request. Tool calls have ids that depend on the line, so their answers are not repeated.
    pub fn of(record: &'a str, key: &'a Key) -> Option<Self> {
        let header: Header = serde_json::from_str(record).ok()?;
        let request = Fingerprint::of_request_id(&header.response.request_id)?;
        let has_calls = record.contains("\"tool_calls\":[{");
        if header.error.is_some() || Some(request) != key.request || has_calls {
            return None;
        }
        // Quotes inside of strings are escaped, so that this is no text.
        let (_, body) = record.split_once("\"body\":{\"id\":\"")?;
        let (id, rest) = body.trim_end().split_once('"')?;
        let kind = id.strip_suffix(&header.id)?.strip_suffix('-')?;
        Some(Self { key, kind, rest })
    }
}

impl Display for Repeated<'_> {
    fn fmt(&self, f: &mut Formatter) -> std::fmt::Result {
        let Self { key, kind, rest } = self;
        let id = &key.id;
        let custom_id = json!(key.custom_id);
        let request_id = json!(key.request_id());
        write!(f, r#"{{"id":"{id}","custom_id":{custom_id},"response":{{"status_code":200,"#)?;
        write!(f, r#""request_id":{request_id},"body":{{"id":"{kind}-{id}"{rest}"#)
    }
}

#[cfg(test)]
mod tests {
    use super::super::answer::Record;
    use super::*;
    use serde_json::Value;

    fn key(line: u64, request: &str) -> Key {
        let request = Some(Fingerprint::of(&request));
        Key { id: format!("request-{line}"), custom_id: Some(format!("\"{line}\"")), request }
    }

    fn record(key: &Key, text: &str) -> String {
        let body =
            json!({"id": format!("cmpl-{}", key.id), "choices": [{"text": text, "logprobs": -0.1}], "x": 1});
        Record { key, result: &Ok(body) }.to_string() + "\n"
    }

    #[test]
    fn a_record_serves_another_line() {
        let first = key(3, "same");
        let text = "\"body\":{\"id\":\"no\n";
        let written = record(&first, text);
        let second = key(40, "same");
        let repeated = Repeated::of(&written, &second).unwrap().to_string();
        assert_eq!(repeated + "\n", record(&second, text));
        assert!(Repeated::of(&written, &key(40, "other")).is_none());
        let error = Err::<Value, _>(super::super::fields::ApiError::bad("no"));
        let error = Record { key: &first, result: &error }.to_string();
        assert!(Repeated::of(&error, &second).is_none(), "errors are tried again");
        let calls = written.replace("\"x\":1", "\"tool_calls\":[{}]");
        assert!(Repeated::of(&calls, &second).is_none());
        assert!(Repeated::of("{}", &second).is_none() && Repeated::of("{\"id\":", &second).is_none());
    }

    #[test]
    fn one_line_is_computed_for_all() {
        let mut repeats = Repeats::default();
        let find = |repeats: &mut Repeats, hash, number, request: &str| {
            repeats.find(hash, number, &key(number, request))
        };
        assert_eq!(find(&mut repeats, 7, 1, "a"), Answer::Unknown);
        assert_eq!(find(&mut repeats, 7, 2, "a"), Answer::Coming);
        assert_eq!(find(&mut repeats, 7, 3, "b"), Answer::Unknown, "the same hash is not enough");
        assert_eq!((find(&mut repeats, 8, 4, "c"), repeats.waiting), (Answer::Unknown, 1));
        assert!(repeats.finished(7, &key(3, "b")).is_empty());
        let followers = repeats.finished(7, &key(1, "a"));
        assert_eq!((followers.len(), followers[0].number, repeats.waiting), (1, 2, 0));
        repeats.answered(7, 100);
        assert_eq!(find(&mut repeats, 7, 5, "a"), Answer::At(100));
        repeats.forget(7);
        assert_eq!(find(&mut repeats, 7, 6, "a"), Answer::Unknown);
        assert_eq!(find(&mut repeats, 7, 7, "a"), Answer::Coming);
        assert!(repeats.finished(8, &key(4, "c")).is_empty());
    }
}
