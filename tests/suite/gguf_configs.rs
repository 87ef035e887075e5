//! Configs of small models, of sizes that the blocks of all types divide.

use serde_json::Value;

use crate::quantised::QWEN;

pub const QWEN2: &str = r#"{
    "model_type": "qwen2_moe", "vocab_size": 96, "hidden_size": 256, "intermediate_size": 256,
    "moe_intermediate_size": 256, "shared_expert_intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "tie_word_embeddings": false, "rope_theta": 1000000.0
}"#;
pub const OLMOE: &str = r#"{
    "model_type": "olmoe", "vocab_size": 96, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5
}"#;
pub const MIXTRAL: &str = r#"{
    "model_type": "mixtral", "vocab_size": 96, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0
}"#;
pub const GLM4: &str = r#"{
    "model_type": "glm4_moe", "vocab_size": 96, "hidden_size": 256, "intermediate_size": 512,
    "moe_intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "partial_rotary_factor": 0.5, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5,
    "norm_topk_prob": true, "use_qk_norm": true, "attention_bias": true, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5
}"#;
pub const DEEPSEEK_V2: &str = r#"{
    "model_type": "deepseek_v2", "vocab_size": 96, "hidden_size": 256, "intermediate_size": 512,
    "moe_intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
    "q_lora_rank": null, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "topk_method": "greedy", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": false,
    "scoring_func": "softmax", "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
    "rope_scaling": {"type": "yarn", "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128,
        "mscale": 0.707, "mscale_all_dim": 0.707}
}"#;
pub const DEEPSEEK_V3: &str = r#"{
    "model_type": "deepseek_v3", "vocab_size": 96, "hidden_size": 256, "intermediate_size": 512,
    "moe_intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
    "q_lora_rank": 256, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "topk_method": "noaux_tc", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": true,
    "scoring_func": "sigmoid", "max_position_embeddings": 512, "rms_norm_eps": 1e-6
}"#;
pub const GPT_OSS: &str = r#"{
    "model_type": "gpt_oss", "vocab_size": 96, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_local_experts": 4,
    "num_experts_per_tok": 2, "sliding_window": 6, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0, "rope_scaling": {"rope_type": "yarn", "factor": 32.0,
        "original_max_position_embeddings": 16, "truncate": false}
}"#;
pub const QWEN3_NEXT: &str = r#"{
    "model_type": "qwen3_next", "vocab_size": 96, "hidden_size": 256, "intermediate_size": 256,
    "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "partial_rotary_factor": 0.25,
    "num_experts": 4, "num_experts_per_tok": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 32, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6
}"#;
/// The same sizes as Qwen3.5.
pub fn qwen35() -> String {
    QWEN3_NEXT.replace("qwen3_next", "qwen3_5_moe_text")
}
/// The sizes that super-blocks of 256 columns divide.
pub fn qwen3() -> String {
    let mut raw: Value = serde_json::from_str(QWEN).unwrap();
    for (key, size) in [("hidden_size", 256), ("moe_intermediate_size", 256), ("head_dim", 64)] {
        raw[key] = size.into();
    }
    // llama.cpp's file of this family has experts in every layer, and always divides the weights by their sum.
    raw["mlp_only_layers"] = serde_json::json!([]);
    raw["rms_norm_eps"] = 1e-6.into();
    raw.to_string()
}
