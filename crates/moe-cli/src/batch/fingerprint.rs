//! A hash that is the same in every run and on every machine: it says whether a request is the one that was answered.

use std::fmt;
use std::io::{self, Write};

use serde::Serialize;
use serde_json::{Map, Value};

/// FNV-1a, 64 bits, of JSON without white space. It finds changes that somebody made; it does not stand up to somebody
/// who looks for two texts with one hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fingerprint(u64);

impl Fingerprint {
    /// The fingerprint of a value. The order of keys counts: a template may write them as they come.
    pub fn of(value: &impl Serialize) -> Self {
        let mut hash = Self(0xCBF2_9CE4_8422_2325);
        // Neither the hash nor a JSON value can fail.
        let _ = serde_json::to_writer(&mut hash, value);
        hash
    }

    /// The fingerprint of what a line asks for: its `url` and its `body`.
    pub fn of_request(line: &Map<String, Value>) -> Self {
        Self::of(&(line.get("url"), line.get("body")))
    }

    /// The fingerprint at the end of a record's `request_id`; records of older versions have none.
    pub fn of_request_id(id: &str) -> Option<Self> {
        let (_, digits) = id.rsplit_once('-')?;
        let number = u64::from_str_radix(digits, 16).ok()?;
        (digits.len() == DIGITS).then_some(Self(number))
    }
}

const DIGITS: usize = 16;

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:0DIGITS$x}", self.0)
    }
}

impl Write for Fingerprint {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let add = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01B3);
        self.0 = bytes.iter().fold(self.0, add);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_published_hash() {
        let of = |text: &str| {
            let mut hash = Fingerprint(0xCBF2_9CE4_8422_2325);
            hash.write_all(text.as_bytes()).unwrap();
            hash.to_string()
        };
        // From the authors' test vectors: a hash that changed would make every old output look edited.
        assert_eq!(
            [of(""), of("a"), of("foobar")],
            ["cbf29ce484222325", "af63dc4c8601ec8c", "85944171f73967e8"]
        );
    }

    #[test]
    fn white_space_does_not_count_and_content_does() {
        let of = |text: &str| {
            Fingerprint::of_request(serde_json::from_str::<Value>(text).unwrap().as_object().unwrap())
        };
        let one = of(r#"{"custom_id": "a", "url": "u", "body": {"prompt": "x"}}"#);
        assert_eq!(one, of(r#"{"body":{"prompt":"x"},"url":"u","custom_id":"b"}"#));
        assert_ne!(one, of(r#"{"url": "u", "body": {"prompt": "y"}}"#));
        assert_ne!(one, of(r#"{"url": "v", "body": {"prompt": "x"}}"#));
        let id = format!("batch-request-3-{one}");
        assert_eq!(Fingerprint::of_request_id(&id), Some(one));
        assert_eq!(Fingerprint::of_request_id("batch-request-3"), None);
    }
}
