//! What tests of several modules need.

use candle_core::DType;
use model_runtime::ModelInfo;
use model_runtime::kv_cache::KvLayout;

/// A model of one layer and one KV head of size 2, in f32, for tests whose models compute nothing of their own.
pub(crate) fn small_model(max_context_len: usize) -> ModelInfo {
    ModelInfo {
        vocab_size: 100,
        hidden_size: 1,
        num_layers: 1,
        max_context_len,
        keys_depend_on_prompt_len: false,
        kv: KvLayout { num_layers: 1, num_kv_heads: 1, head_dim: 2, value_dim: None, dtype: DType::F32 },
        moe: None,
    }
}
