//! Parameters that this engine does not support.

use serde_json::{Value, json};

use super::fields::{ApiError, Fields, short};

/// Unsupported parameters that would change the answer. They are refused, not ignored.
const UNSUPPORTED: [&str; 17] = [
    "audio",
    "best_of",
    "chat_template",
    "function_call",
    "functions",
    "guided_whitespace_pattern",
    "kv_transfer_params",
    "logits_processors",
    "logprob_token_ids",
    "prompt_embeds",
    "repetition_detection",
    "stream",
    "suffix",
    "thinking_token_budget",
    "truncate_prompt_tokens",
    "use_beam_search",
    "vllm_xargs",
];

/// Refuses a body that uses one of them.
pub fn check(body: &Fields) -> Result<(), ApiError> {
    let off = |name: &str, value: &Value| {
        *value == false || *value == json!([]) || *value == json!({}) || (name == "best_of" && *value == 1)
    };
    let asked = |name: &&&str| body.value(name).is_some_and(|value| !off(name, value));
    if let Some(name) = UNSUPPORTED.iter().find(asked) {
        return Err(ApiError::field(name, "it is not supported; leave it out"));
    }
    match body.value("modalities") {
        Some(modalities) if *modalities != json!(["text"]) => {
            Err(ApiError::field("modalities", format!("expected [\"text\"], got {}", short(modalities))))
        }
        _ => Ok(()),
    }
}
