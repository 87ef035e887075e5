//! The generated output of a line, and its record in the format of vLLM's `run_batch`.

use std::fmt::{Display, Formatter};
use std::io::{self, Write};

use model_runtime::RoutedExperts;
use moe_engine::engine::{FinishReason, Output};
use moe_engine::terminal::{LONGEST_MESSAGE, shortened};
use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::{Value, json};

use super::entries::Key;
use super::fields::ApiError;
use super::logprobs::LogprobList;

/// One continuation while it grows.
#[derive(Default)]
pub struct Choice {
    /// Its text.
    pub text: String,
    /// New tokens.
    pub num_tokens: usize,
    /// Their ids.
    pub token_ids: Vec<u32>,
    /// Log-probabilities of the new tokens, if they were requested.
    pub logprobs: LogprobList,
    /// Log-probabilities of the prompt's tokens after the first one, in the first choice of a prompt.
    pub prompt_logprobs: Option<LogprobList>,
    /// The experts of its tokens and of its prompt's tokens, if they were requested.
    pub routed_experts: Option<RoutedExperts>,
    /// Why it ended.
    pub finish: Option<FinishReason>,
}

impl Choice {
    /// Adds new output; returns whether it was the last.
    pub fn push(&mut self, output: Output) -> bool {
        self.text += &output.text;
        self.num_tokens += usize::from(output.token_id.is_some());
        self.token_ids.extend(output.token_id);
        output.logprobs.iter().for_each(|logprobs| self.logprobs.push(logprobs));
        let prompt = output.prompt_logprobs.map(|prompt| prompt.into_iter().collect());
        self.prompt_logprobs = self.prompt_logprobs.take().or(prompt);
        self.routed_experts = self.routed_experts.take().or(output.routed_experts);
        self.finish = output.finish;
        self.finish.is_some()
    }
}

/// A line of the output file, without its newline. It is created while it is written.
pub struct Record<'a, B> {
    /// The identity of the record.
    pub key: &'a Key,
    /// The body of the answer.
    pub result: &'a Result<B, ApiError>,
}

impl<B: Serialize> Display for Record<'_, B> {
    fn fmt(&self, f: &mut Formatter) -> std::fmt::Result {
        serde_json::to_writer(Adapter(f), self).map_err(|_| std::fmt::Error)
    }
}

impl<B: Serialize> Serialize for Record<'_, B> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { key, result } = self;
        let response = Response { request_id: key.request_id(), result };
        let mut map = serializer.serialize_map(Some(4))?;
        map.serialize_entry("id", &key.id)?;
        map.serialize_entry("custom_id", &key.custom_id)?;
        map.serialize_entry("response", &response)?;
        map.serialize_entry("error", &result.as_ref().err().map(error))?;
        map.end()
    }
}

/// The part of a record that is the answer of the HTTP API.
struct Response<'a, B> {
    request_id: String,
    result: &'a Result<B, ApiError>,
}

impl<B: Serialize> Serialize for Response<'_, B> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let status = self.result.as_ref().map_or_else(|e| e.status, |_| 200);
        let mut map = serializer.serialize_map(Some(3))?;
        map.serialize_entry("status_code", &status)?;
        map.serialize_entry("request_id", &self.request_id)?;
        map.serialize_entry("body", &self.result.as_ref().ok())?;
        map.end()
    }
}

fn error(e: &ApiError) -> Value {
    let kind = match e.status {
        400 => "BadRequestError",
        404 => "NotFoundError",
        _ => "InternalServerError",
    };
    let message = shortened(&e.message, LONGEST_MESSAGE);
    json!({"error": {"message": message, "type": kind, "param": e.param, "code": e.status}})
}

/// Receives the bytes of JSON. The JSON writer writes whole pieces of text, none of which ends inside a character.
struct Adapter<'a, 'b>(&'a mut Formatter<'b>);

impl Write for Adapter<'_, '_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let text = std::str::from_utf8(bytes).map_err(io::Error::other)?;
        self.0.write_str(text).map_err(io::Error::other)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::fingerprint::Fingerprint;
    use super::*;

    #[test]
    fn records_are_those_of_run_batch() {
        let key = Key {
            id: "request-3".into(),
            custom_id: Some("a\n\"".into()),
            request: Some(Fingerprint::of(&1)),
        };
        let got = Record { key: &key, result: &Ok(json!({"x": "line\nbreak"})) }.to_string();
        let want = r#"{"id":"request-3","custom_id":"a\n\"","response":{"status_code":200,"request_id":"batch-request-3-af63ac4c86019afc","body":{"x":"line\nbreak"}},"error":null}"#;
        assert_eq!(got, want);
        let key = Key { id: "line-4".into(), custom_id: None, request: None };
        let result = Err::<Value, _>(ApiError::field("n", "too many"));
        let got = Record { key: &key, result: &result }.to_string();
        let want = r#"{"id":"line-4","custom_id":null,"response":{"status_code":400,"request_id":"batch-line-4","body":null},"error":{"error":{"message":"n: too many","type":"BadRequestError","param":"n","code":400}}}"#;
        assert_eq!(got, want);
    }
}
