//! The file of a workload: its requests as token ids. It is read completely, and checked before any weight is read.
//!
//! ```json
//! {"requests": [{"prompt_token_ids": [5, 17, 3], "max_tokens": 8, "seed": 1}]}
//! ```
//!
//! A request may also have `prompt_logprobs`: how many top tokens are listed at each position of its prompt.

use std::fmt;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use anyhow::Result;
use model_runtime::{MoeInfo, RoutedExperts, SamplingParams};
use moe_engine::engine::Request;
use serde::de::{Deserialize, Deserializer, Error, SeqAccess, Visitor};

use crate::error::usage;

/// The largest file, in bytes: some hundred million tokens. A larger file is refused before it is read.
const MAX_BYTES: u64 = 1 << 30;

/// Requests that are run together.
#[derive(Debug)]
pub struct Workload {
    /// The name of the file, for messages.
    name: String,
    requests: Vec<Entry>,
    /// The experts that are forced on each request; empty if none are forced.
    routing: Vec<Arc<RoutedExperts>>,
}

/// A request in the form of the file.
#[derive(Debug, PartialEq, serde::Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object with prompt_token_ids, max_tokens and seed")]
struct Entry {
    #[serde(deserialize_with = "prompt")]
    prompt_token_ids: Vec<u32>,
    #[serde(deserialize_with = "max_tokens")]
    max_tokens: usize,
    #[serde(deserialize_with = "seed")]
    seed: u64,
    #[serde(default, deserialize_with = "prompt_logprobs")]
    prompt_logprobs: Option<usize>,
}

impl Workload {
    /// Reads a file and uses its first `limit` requests.
    ///
    /// # Errors
    /// A file that cannot be read, is too large or does not have this form; the error names the request.
    pub fn read(path: &Path, limit: Option<usize>) -> Result<Self> {
        let name = format!("--workload {}", path.display());
        let wrong = |what: &dyn fmt::Display| usage(format!("{name}: {what}"));
        let metadata = fs::metadata(path).map_err(|e| wrong(&format!("cannot read it: {e}")))?;
        if !metadata.is_file() {
            return Err(wrong(&"expected a JSON file, got a folder or a device"));
        }
        if metadata.len() > MAX_BYTES {
            let got = metadata.len();
            return Err(wrong(&format!("expected at most {MAX_BYTES} bytes, got {got}: cut the workload")));
        }
        let bytes = fs::read(path).map_err(|e| wrong(&format!("cannot read it: {e}")))?;
        let mut requests = parse(&bytes).map_err(|e| wrong(&e))?;
        requests.truncate(limit.unwrap_or(usize::MAX));
        if requests.is_empty() {
            return Err(wrong(&"expected at least one request, got none"));
        }
        Ok(Self { name, requests, routing: Vec::new() })
    }

    /// Checks that a model with this vocabulary and context can run every request completely.
    ///
    /// # Errors
    /// The first request that it cannot run, with the expected and the actual value.
    pub fn check(&self, vocab_size: usize, context: usize) -> Result<()> {
        for (i, entry) in self.requests.iter().enumerate() {
            let unknown = |id: &u32| *id as usize >= vocab_size;
            if let Some(position) = entry.prompt_token_ids.iter().position(unknown) {
                let expected = format!("an id below {vocab_size}, the size of the model's vocabulary");
                let got = entry.prompt_token_ids[position];
                let message = format!("prompt_token_ids[{position}]: expected {expected}, got {got}");
                return Err(usage(format!("{}: {message}", self.name_of(i))));
            }
            if entry.len() > context {
                let expected = format!("prompt and max_tokens of at most {context}, the model's context");
                let prompt = entry.prompt_token_ids.len();
                let max = entry.max_tokens;
                let message = format!("expected {expected}, got {prompt} + {max}");
                return Err(usage(format!("{}: {message}", self.name_of(i))));
            }
        }
        Ok(())
    }

    /// These requests with the experts of a recording: request i takes the rows from 61 i on, and starts again at the
    /// beginning after the end.
    ///
    /// # Errors
    /// An empty recording, or a recording of another model.
    pub fn replaying(mut self, recording: &RoutedExperts, moe: Option<&MoeInfo>) -> Result<Self> {
        const FLAG: &str = "--replay-routed-experts";
        let Some(moe) = moe else { return Err(usage(format!("{FLAG}: the model has no routed experts"))) };
        let rows = recording.tokens();
        let layers = moe.layers.len();
        let top_k = moe.top_k;
        let checked = recording.check(rows, layers, top_k, moe.num_experts);
        checked.map_err(|e| usage(format!("{FLAG}: {e}")))?;
        if rows == 0 {
            return Err(usage(format!("{FLAG}: expected at least one row, got none")));
        }
        let row = layers * top_k;
        let ids = recording.ids();
        let of_request = |(i, entry): (usize, &Entry)| -> Result<_> {
            let rows = (0..entry.len()).map(|position| (61 * i + position) % rows);
            let own = rows.flat_map(|at| ids[at * row..][..row].iter().copied()).collect();
            Ok(Arc::new(RoutedExperts::from_ids(entry.len(), layers, top_k, own)?))
        };
        self.routing = self.requests.iter().enumerate().map(of_request).collect::<Result<_>>()?;
        Ok(self)
    }

    /// The name of a request in messages.
    pub fn name_of(&self, request: usize) -> String {
        format!("{}: requests[{request}]", self.name)
    }

    /// Number of requests; at least one.
    pub fn num_requests(&self) -> usize {
        self.requests.len()
    }

    /// Tokens of the longest sequence, prompt and output.
    pub fn longest(&self) -> usize {
        self.requests.iter().map(Entry::len).max().unwrap_or(0)
    }

    /// Tokens of all prompts.
    pub fn input_tokens(&self) -> usize {
        self.requests.iter().map(|entry| entry.prompt_token_ids.len()).sum()
    }

    /// New tokens of all requests.
    pub fn output_tokens(&self) -> usize {
        self.requests.iter().map(|entry| entry.max_tokens).fold(0, usize::saturating_add)
    }

    /// The requests for the engine, in the order of the file: temperature 1, end-of-sequence ignored.
    pub fn requests(&self) -> impl Iterator<Item = Request> + '_ {
        self.requests.iter().enumerate().map(|(i, entry)| Request {
            sampling: SamplingParams { temperature: 1., seed: entry.seed, ..SamplingParams::default() },
            max_tokens: Some(entry.max_tokens),
            ignore_eos: true,
            prompt_logprobs: entry.prompt_logprobs,
            replay_routing: self.routing.get(i).cloned(),
            ..Request::new(entry.prompt_token_ids.clone())
        })
    }
}

impl Entry {
    fn len(&self) -> usize {
        self.prompt_token_ids.len().saturating_add(self.max_tokens)
    }
}

fn parse(bytes: &[u8]) -> Result<Vec<Entry>, serde_json::Error> {
    #[derive(serde::Deserialize)]
    #[serde(deny_unknown_fields, expecting = "an object with a list of requests")]
    struct File {
        #[serde(deserialize_with = "entries")]
        requests: Vec<Entry>,
    }
    serde_json::from_slice::<File>(bytes).map(|file| file.requests)
}

/// The list of requests; an error names the request that caused it.
fn entries<'de, D: Deserializer<'de>>(list: D) -> Result<Vec<Entry>, D::Error> {
    struct Entries;
    impl<'de> Visitor<'de> for Entries {
        type Value = Vec<Entry>;

        fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
            f.write_str("a list of requests")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<Entry>, A::Error> {
            let mut entries = Vec::new();
            loop {
                let next = list.next_element();
                match next.map_err(|e| A::Error::custom(format!("requests[{}]: {e}", entries.len())))? {
                    Some(entry) => entries.push(entry),
                    None => return Ok(entries),
                }
            }
        }
    }
    list.deserialize_seq(Entries)
}

fn prompt<'de, D: Deserializer<'de>>(value: D) -> Result<Vec<u32>, D::Error> {
    let wanted = "prompt_token_ids: expected a list of token ids, at least one";
    field(value, wanted, |ids: &Vec<u32>| !ids.is_empty())
}

fn max_tokens<'de, D: Deserializer<'de>>(value: D) -> Result<usize, D::Error> {
    field(value, "max_tokens: expected an integer from 1", |max| *max > 0)
}

fn seed<'de, D: Deserializer<'de>>(value: D) -> Result<u64, D::Error> {
    field(value, "seed: expected an integer from 0 to 2^64 - 1", |_| true)
}

fn prompt_logprobs<'de, D: Deserializer<'de>>(value: D) -> Result<Option<usize>, D::Error> {
    field(value, "prompt_logprobs: expected an integer from 0", |_| true).map(Some)
}

/// A field that passes a test; `wanted` says which field it is and what it takes.
fn field<'de, D: Deserializer<'de>, T: Deserialize<'de> + fmt::Debug>(
    value: D,
    wanted: &str,
    passes: impl Fn(&T) -> bool,
) -> Result<T, D::Error> {
    let value = T::deserialize(value).map_err(|e| D::Error::custom(format!("{wanted}: {e}")))?;
    if !passes(&value) {
        return Err(D::Error::custom(format!("{wanted}, got {value:?}")));
    }
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn workload(text: &str, limit: Option<usize>) -> Result<Workload> {
        let mut file = tempfile::NamedTempFile::new()?;
        file.write_all(text.as_bytes())?;
        Workload::read(file.path(), limit)
    }

    const TWO: &str = r#"{"requests": [{"prompt_token_ids": [5, 17, 3], "max_tokens": 8, "seed": 18446744073709551615},
        {"seed": 2, "max_tokens": 1, "prompt_token_ids": [127], "prompt_logprobs": 0}]}"#;

    #[test]
    fn requests_are_those_of_the_file() {
        let two = workload(TWO, None).unwrap();
        assert_eq!(
            (two.num_requests(), two.input_tokens(), two.output_tokens(), two.longest()),
            (2, 4, 9, 11)
        );
        let requests: Vec<_> = two.requests().collect();
        assert_eq!(requests[0].prompt, [5, 17, 3]);
        assert_eq!((requests[0].sampling.seed, requests[0].sampling.temperature), (u64::MAX, 1.));
        assert_eq!((requests[1].max_tokens, requests[1].ignore_eos), (Some(1), true));
        assert_eq!((requests[0].prompt_logprobs, requests[1].prompt_logprobs), (None, Some(0)));
        let one = workload(TWO, Some(1)).unwrap();
        assert_eq!((one.num_requests(), one.output_tokens()), (1, 8));
        assert_eq!(workload(TWO, Some(9)).unwrap().num_requests(), 2);
    }

    #[test]
    fn what_the_model_cannot_run_is_named() {
        let two = workload(TWO, None).unwrap();
        assert!(two.check(128, 11).is_ok());
        let e = two.check(127, 11).unwrap_err().to_string();
        assert!(e.contains("requests[1]: prompt_token_ids[0]: expected an id below 127"), "{e}");
        assert!(e.ends_with("got 127"), "{e}");
        let e = two.check(128, 10).unwrap_err().to_string();
        assert!(e.contains("requests[0]: expected prompt and max_tokens of at most 10"), "{e}");
        assert!(e.ends_with("got 3 + 8"), "{e}");
        let endless = TWO.replace("\"max_tokens\": 8", "\"max_tokens\": 18446744073709551615");
        let e = workload(&endless, None).unwrap().check(128, 10).unwrap_err().to_string();
        assert!(e.ends_with("got 3 + 18446744073709551615"), "{e}");
    }

    #[test]
    fn a_broken_file_says_where_it_is_broken() {
        let second = |request: &str| {
            format!(r#"{{"requests": [{{"prompt_token_ids": [1], "max_tokens": 1, "seed": 0}}, {request}]}}"#)
        };
        for (text, words) in [
            ("", &["EOF", "line 1"][..]),
            ("[]", &["a list of requests"]),
            (r#"{"requests": []}"#, &["at least one request, got none"]),
            (r#"{"prompts": []}"#, &["unknown field `prompts`"]),
            (r#"{"requests": {}}"#, &["expected a list of requests"]),
            (&TWO[..TWO.len() - 4], &["requests[1]", "EOF"]),
            (&second("3"), &["requests[1]", "integer `3`", "expected an object with prompt_token_ids"]),
            (
                &second(r#"{"prompt_token_ids": [], "max_tokens": 1, "seed": 0}"#),
                &["requests[1]: prompt_token_ids: expected a list of token ids, at least one, got []"],
            ),
            (
                &second(r#"{"prompt_token_ids": [1, -2], "max_tokens": 1, "seed": 0}"#),
                &["requests[1]: prompt_token_ids: expected a list", "`-2`", "line 1 column"],
            ),
            (
                &second(r#"{"prompt_token_ids": [4294967296], "max_tokens": 1, "seed": 0}"#),
                &["requests[1]: prompt_token_ids", "`4294967296`"],
            ),
            (
                &second(r#"{"prompt_token_ids": [1], "max_tokens": 0, "seed": 0}"#),
                &["requests[1]: max_tokens: expected an integer from 1, got 0"],
            ),
            (
                &second(r#"{"prompt_token_ids": [1], "max_tokens": "x", "seed": 0}"#),
                &["requests[1]: max_tokens: expected an integer from 1", "string \"x\""],
            ),
            (
                &second(r#"{"prompt_token_ids": [1], "max_tokens": 1, "seed": -1}"#),
                &["requests[1]: seed: expected an integer from 0", "`-1`"],
            ),
            (
                &second(r#"{"prompt_token_ids": [1], "max_tokens": 1, "seed": 1, "prompt_logprobs": -1}"#),
                &["requests[1]: prompt_logprobs: expected an integer from 0", "`-1`"],
            ),
            (&second(r#"{"prompt_token_ids": [1], "max_tokens": 1}"#), &["requests[1]", "missing", "seed"]),
            (
                &second(r#"{"prompt_token_ids": [1], "max_tokens": 1, "seed": 0, "temperature": 0}"#),
                &["requests[1]", "unknown field `temperature`"],
            ),
        ] {
            let e = workload(text, None).unwrap_err();
            assert!(crate::error::is_usage(&e), "{e}");
            for word in words {
                assert!(e.to_string().contains(word), "{text}: expected {word:?} in {e}");
            }
        }
    }

    #[test]
    fn what_is_no_file_or_too_large_is_refused_unread() {
        let dir = tempfile::tempdir().unwrap();
        let read = |path: &Path| Workload::read(path, None).unwrap_err().to_string();
        assert!(read(dir.path()).contains("got a folder"));
        assert!(read(&dir.path().join("none")).contains("cannot read it"));
        let large = dir.path().join("large");
        fs::File::create(&large).unwrap().set_len(MAX_BYTES + 1).unwrap();
        assert!(read(&large).contains("expected at most 1073741824 bytes, got 1073741825"));
    }
}
