//! A hash that is the same in every run and on every machine. It shows whether a request is the one that was answered.

use std::fmt;
use std::num::NonZeroU64;

use serde::Serialize;
use serde_json::{Map, Value};

/// FNV-1a, 64 bits, of JSON without white space. It finds accidental changes; it is not secure against a search for two
/// texts with the same hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fingerprint(NonZeroU64);

impl Fingerprint {
    /// The fingerprint of a value. The order of keys counts, because a template may write them in their order.
    pub fn of(value: &impl Serialize) -> Self {
        Self::of_text(&json(value))
    }

    /// The fingerprint of a text.
    pub fn of_text(text: &[u8]) -> Self {
        let add = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01B3);
        let hash = text.iter().fold(0xCBF2_9CE4_8422_2325, add);
        Self(NonZeroU64::new(hash).unwrap_or(NonZeroU64::MIN))
    }

    /// The fingerprint at the end of a record's `request_id`; records of older versions have none.
    pub fn of_request_id(id: &str) -> Option<Self> {
        let (_, digits) = id.rsplit_once('-')?;
        let number = u64::from_str_radix(digits, 16).ok().and_then(NonZeroU64::new)?;
        (digits.len() == DIGITS).then_some(Self(number))
    }
}

/// The text of a line's request, its `url` and its `body`. Equal requests have equal texts.
pub fn request_text(line: &Map<String, Value>) -> Vec<u8> {
    json(&(line.get("url"), line.get("body")))
}

/// JSON without white space.
fn json(value: &impl Serialize) -> Vec<u8> {
    // A JSON value always has a text.
    serde_json::to_vec(value).unwrap_or_default()
}

const DIGITS: usize = 16;

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:0DIGITS$x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_published_hash() {
        let of = |text: &str| Fingerprint::of_text(text.as_bytes()).to_string();
        // These are the authors' test vectors. If the hash changed, every old output would look edited.
        assert_eq!(
            [of(""), of("a"), of("foobar")],
            ["cbf29ce484222325", "af63dc4c8601ec8c", "85944171f73967e8"]
        );
    }

    #[test]
    fn white_space_does_not_count_and_content_does() {
        let of = |text: &str| {
            let line: Value = serde_json::from_str(text).unwrap();
            Fingerprint::of_text(&request_text(line.as_object().unwrap()))
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
