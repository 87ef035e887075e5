//! What tests of several modules need.

use candle_core::DType;
use model_runtime::ModelInfo;
use model_runtime::kv_cache::KvLayout;
use serde_json::json;

use crate::tokenizer::Tokenizer;

/// A model of one layer and one KV head of size 2, in f32, for tests whose models compute nothing of their own.
pub(crate) fn small_model(max_context_len: usize) -> ModelInfo {
    ModelInfo {
        vocab_size: 100,
        hidden_size: 1,
        num_layers: 1,
        max_context_len,
        keys_depend_on_prompt_len: false,
        dtype: DType::F32,
        states: KvLayout { num_kv_heads: 1, head_dim: 2, value_dim: None, dtype: DType::F32 }.layers(1),
        moe: None,
    }
}

/// A byte-level tokenizer with these tokens of several bytes, written in GPT-2's alphabet, and these added tokens, of
/// which some are special. It never merges bytes: what it encodes is one token for each byte.
pub(crate) fn byte_level(more: &[&str], added: &[(&str, bool)]) -> Tokenizer {
    let mut json = serde_json::to_value(&*Tokenizer::bytes().unwrap().library).unwrap();
    for token in more {
        let vocab = json["model"]["vocab"].as_object_mut().unwrap();
        let id = vocab.len();
        vocab.insert(token.to_string(), id.into());
    }
    let first = json["model"]["vocab"].as_object().unwrap().len();
    let token = |(i, (content, special)): (usize, &(&str, bool))| {
        json!({"id": first + i, "content": content, "special": special, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false})
    };
    json["added_tokens"] = added.iter().enumerate().map(token).collect();
    Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap()
}
