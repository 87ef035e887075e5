//! Converts lines of the input into work: what is already done, what is wrong, and what must run.
//!
//! This runs on a separate thread, ahead of the engine, so that reading and tokenizing do not delay the model.

use std::panic::{AssertUnwindSafe, catch_unwind};

use anyhow::{Context, Result};
use moe_engine::panic_text;
use serde_json::{Map, Value, json};

use super::exact;
use super::fields::{ApiError, Fields, short};
use super::fingerprint::{Fingerprint, request_text};
use super::input::{Line, MAX_LINE};
use super::job::Job;
use super::known::{Answered, Known, line_id, name, request_id};
use super::parser::Parser;
use super::source::LineIter;
use crate::error::usage;

/// Identifies a record.
#[derive(Clone, Debug, PartialEq)]
pub struct Key {
    /// Its `id`.
    pub id: String,
    /// The line's `custom_id`, where it has one.
    pub custom_id: Option<String>,
    /// The fingerprint of the line's request, if the line has a `custom_id`.
    pub request: Option<Fingerprint>,
}

impl Key {
    /// The name of its line.
    pub fn name(&self) -> String {
        name(&self.id, self.custom_id.as_deref())
    }

    /// The `request_id` of its record, from which a later run reads the fingerprint of the request.
    pub fn request_id(&self) -> String {
        match self.request {
            Some(request) => format!("batch-{}-{request}", self.id),
            None => format!("batch-{}", self.id),
        }
    }
}

/// A line of the input that is not blank.
pub struct Entry {
    /// Its number, from 1.
    pub line: u64,
    /// The identity of its record.
    pub key: Key,
    /// A hash of the request, if every answer to it is the same.
    pub repeats: Option<u64>,
    /// The work for it.
    pub work: Work,
}

/// The work for a line.
pub enum Work {
    /// Nothing: an earlier run answered it, with the record at this offset if the line has a request.
    Done(Option<u64>),
    /// An error record.
    Refused(ApiError),
    /// Generation.
    Job(Box<Job>),
}

/// The kind of the lines of the input.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Format {
    /// A request.
    Request,
    /// A prompt for `/v1/completions`.
    Prompt,
    /// A question for `/v1/chat/completions`.
    Question,
}

/// The entries of an input.
pub struct Entries {
    /// What its lines are.
    pub format: Format,
    /// Its lines.
    pub lines: LineIter,
    /// The lines that are already answered.
    pub known: Known,
    /// What turns bodies into requests.
    pub parser: Parser,
}

impl Iterator for Entries {
    type Item = Result<Entry>;

    fn next(&mut self) -> Option<Self::Item> {
        let line = self.lines.next()?.context("cannot read the input any further");
        Some(line.and_then(|line| self.entry(line)))
    }
}

impl Entries {
    fn entry(&mut self, line: Line) -> Result<Entry> {
        let number = line.number;
        match named(line, self.format) {
            Ok((custom_id, object)) if self.known.meet(&custom_id) => self.asked(number, custom_id, &object),
            Ok((custom_id, _)) => {
                let message =
                    format!("custom_id {custom_id:?} is that of an earlier line; each must be unique");
                let error = ApiError { param: Some("custom_id".into()), ..ApiError::bad(message) };
                Ok(self.refused(number, Some(custom_id), error))
            }
            Err(error) => Ok(self.refused(number, None, error)),
        }
    }

    /// The entry of a line with a `custom_id` of its own.
    fn asked(&self, line: u64, custom_id: String, object: &Map<String, Value>) -> Result<Entry> {
        let text = request_text(object);
        let request = Fingerprint::of_text(&text);
        let key = Key { id: request_id(line), custom_id: Some(custom_id.clone()), request: Some(request) };
        let work = match self.known.answered(&key.name()) {
            Some(Answered { request: Some(earlier), .. }) if earlier != request => {
                // An answer to a different request must not count as this line's answer.
                return Err(usage(format!(
                    "line {line} of the input: an earlier run answered custom_id {custom_id:?} with another url or \
                     body (its fingerprint was {earlier} and is {request}); give the line a custom_id of its own, or \
                     answer again all lines with --overwrite or those with errors with --retry-errors"
                )));
            }
            Some(answered) => Work::Done(Some(answered.at)),
            None => match parse(&self.parser, object, &custom_id) {
                Ok(job) => Work::Job(Box::new(job)),
                Err(error) => Work::Refused(error),
            },
        };
        let repeats = self.parser.repeats(object).then(|| self.known.hash_of_request(&text));
        Ok(Entry { line, key, repeats, work })
    }

    /// The entry of a line without a `custom_id` of its own.
    fn refused(&self, line: u64, custom_id: Option<String>, error: ApiError) -> Entry {
        let key = Key { id: line_id(line), custom_id, request: None };
        let work = match self.known.answered(&key.name()) {
            Some(_) => Work::Done(None),
            None => Work::Refused(error),
        };
        Entry { line, key, repeats: None, work }
    }
}

/// The job of a line. A panic in a library, caused by the text of the line, fails only this line.
fn parse(parser: &Parser, line: &Map<String, Value>, custom_id: &str) -> Result<Job, ApiError> {
    catch_unwind(AssertUnwindSafe(|| parser.parse(line, custom_id))).unwrap_or_else(|panic| {
        let message = format!(
            "reading the request panicked ({}): this is a fault of the program, please report it with this line",
            panic_text(&*panic)
        );
        Err(ApiError { status: 500, ..ApiError::bad(message) })
    })
}

/// The job of a line by itself.
pub fn job(bytes: &[u8], parser: &Parser) -> Result<Job, ApiError> {
    let (custom_id, object) = named(Line { number: 1, bytes: Some(bytes.to_vec()) }, Format::Request)?;
    parser.parse(&object, &custom_id)
}

/// The object of a line and its `custom_id`. A line of text becomes the equivalent object.
fn named(line: Line, format: Format) -> Result<(String, Map<String, Value>), ApiError> {
    let too_long = || ApiError::bad(format!("it is longer than {} MiB", MAX_LINE >> 20));
    let bytes = line.bytes.ok_or_else(too_long)?;
    let text = std::str::from_utf8(&bytes).map_err(|e| {
        let at = e.valid_up_to();
        ApiError::bad(format!("it is not UTF-8: byte {:#04x} at offset {at}", bytes[at]))
    })?;
    let custom_id = format!("line-{}", line.number);
    let (url, body) = match format {
        Format::Request => return object(text),
        Format::Prompt => ("/v1/completions", json!({ "prompt": text })),
        Format::Question => {
            ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": text}]}))
        }
    };
    let fields =
        [("custom_id", json!(custom_id)), ("method", json!("POST")), ("url", json!(url)), ("body", body)];
    Ok((custom_id, fields.into_iter().map(|(name, value)| (name.to_string(), value)).collect()))
}

/// The object of a line that is JSON.
fn object(text: &str) -> Result<(String, Map<String, Value>), ApiError> {
    let object = match serde_json::from_str(text.trim_ascii()) {
        Ok(Value::Object(mut object)) => {
            exact::keep_large_integers(text, &mut object);
            object
        }
        Ok(other) => return Err(ApiError::bad(format!("expected a JSON object, got {}", short(&other)))),
        Err(e) => return Err(ApiError::bad(format!("it is not JSON: {}", without_line(&e)))),
    };
    match Fields(&object).text("custom_id")? {
        Some(custom_id) => Ok((custom_id.to_string(), object)),
        None => Err(ApiError::field("custom_id", "it is missing; give each line a string of its own")),
    }
}

/// The message of a JSON error, whose line is always 1 here.
fn without_line(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let place = format!(" at line {} column", error.line());
    text.replace(&place, " at column")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(bytes: &[u8]) -> String {
        named(Line { number: 1, bytes: Some(bytes.to_vec()) }, Format::Request).unwrap_err().message
    }

    #[test]
    fn a_line_of_text_asks_for_what_its_object_asks_for() {
        let of = |format| named(Line { number: 7, bytes: Some(b" \"To be\" ".to_vec()) }, format).unwrap();
        let (custom_id, object) = of(Format::Prompt);
        let want = json!({
            "custom_id": "line-7", "method": "POST", "url": "/v1/completions", "body": {"prompt": " \"To be\" "},
        });
        assert_eq!((custom_id.as_str(), &Value::Object(object)), ("line-7", &want), "white space is text");
        let body = &of(Format::Question).1["body"];
        assert_eq!(body["messages"], json!([{"role": "user", "content": " \"To be\" "}]));
        assert!(named(Line { number: 1, bytes: Some(vec![0xff]) }, Format::Prompt).is_err());
    }

    #[test]
    fn bad_lines_are_described() {
        assert_eq!(error(b"{\"a\": }"), "it is not JSON: expected value at column 7");
        assert_eq!(error(b"ab\xffc"), "it is not UTF-8: byte 0xff at offset 2");
        assert_eq!(error(b"[1,2]"), "expected a JSON object, got [1,2]");
        assert_eq!(error(b"{\"custom_id\": 5}"), "custom_id: expected a string, got 5");
        assert!(error(b"{\"custom_id\": null}").contains("missing"));
        assert!(error(&[b'['; 100_000]).contains("recursion limit"), "deep nesting is no stack overflow");
        let long = Line { number: 1, bytes: None };
        assert_eq!(named(long, Format::Prompt).unwrap_err().message, "it is longer than 64 MiB");
    }
}
