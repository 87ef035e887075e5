//! What was generated for a line, and the record that says it, in the format of vLLM's `run_batch`.

use model_runtime::RoutedExperts;
use model_runtime::sampling::TokenLogprobs;
use moe_engine::engine::{FinishReason, Output};
use moe_engine::terminal::{LONGEST_MESSAGE, shortened};
use serde_json::{Value, json};

use super::entries::Key;
use super::fields::ApiError;

/// One continuation as it grows.
#[derive(Default)]
pub struct Choice {
    /// Its text.
    pub text: String,
    /// New tokens.
    pub num_tokens: usize,
    /// Their ids.
    pub token_ids: Vec<u32>,
    /// Log-probabilities of the new tokens, if they are asked for.
    pub logprobs: Vec<TokenLogprobs>,
    /// Log-probabilities of the prompt's tokens but the first, in the first choice of a prompt.
    pub prompt_logprobs: Option<Vec<TokenLogprobs>>,
    /// The experts of its tokens and its prompt's, if they are asked for.
    pub routed_experts: Option<RoutedExperts>,
    /// Why it ended.
    pub finish: Option<FinishReason>,
}

impl Choice {
    /// Adds what is new; whether it was the last.
    pub fn push(&mut self, output: Output) -> bool {
        self.text += &output.text;
        self.num_tokens += usize::from(output.token_id.is_some());
        self.token_ids.extend(output.token_id);
        self.logprobs.extend(output.logprobs);
        self.prompt_logprobs = self.prompt_logprobs.take().or(output.prompt_logprobs);
        self.routed_experts = self.routed_experts.take().or(output.routed_experts);
        self.finish = output.finish;
        self.finish.is_some()
    }
}

/// A line of the output file, without its newline.
pub fn record(key: &Key, result: Result<Value, ApiError>) -> String {
    let (status, body, error) = match result {
        Ok(body) => (200, body, Value::Null),
        Err(e) => {
            let kind = match e.status {
                400 => "BadRequestError",
                404 => "NotFoundError",
                _ => "InternalServerError",
            };
            let error = json!({"message": shortened(&e.message, LONGEST_MESSAGE), "type": kind, "param": e.param, "code": e.status});
            (e.status, Value::Null, json!({ "error": error }))
        }
    };
    let response = json!({"status_code": status, "request_id": key.request_id(), "body": body});
    json!({"id": key.id, "custom_id": key.custom_id, "response": response, "error": error}).to_string()
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
        let got = record(&key, Ok(json!({"x": "line\nbreak"})));
        let want = r#"{"id":"request-3","custom_id":"a\n\"","response":{"status_code":200,"request_id":"batch-request-3-af63ac4c86019afc","body":{"x":"line\nbreak"}},"error":null}"#;
        assert_eq!(got, want);
        let key = Key { id: "line-4".into(), custom_id: None, request: None };
        let got = record(&key, Err(ApiError::field("n", "too many")));
        let want = r#"{"id":"line-4","custom_id":null,"response":{"status_code":400,"request_id":"batch-line-4","body":null},"error":{"error":{"message":"n: too many","type":"BadRequestError","param":"n","code":400}}}"#;
        assert_eq!(got, want);
    }
}
