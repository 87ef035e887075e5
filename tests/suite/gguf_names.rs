//! llama.cpp's names of metadata and tensors, written independently of the library's tables.

/// llama.cpp's name of a family, and the metadata that only this family has: the names here and there.
pub fn architecture(model_type: &str) -> (&'static str, &'static [(&'static str, &'static str)]) {
    match model_type {
        "qwen3_moe" => ("qwen3moe", &[]),
        "qwen2_moe" => {
            ("qwen2moe", &[("shared_expert_intermediate_size", "expert_shared_feed_forward_length")])
        }
        "olmoe" => ("olmoe", &[]),
        "mixtral" => ("llama", &[]),
        "deepseek_v2" | "deepseek_v3" => ("deepseek2", LATENT),
        "gpt_oss" => (
            "gpt-oss",
            &[
                ("sliding_window", "attention.sliding_window"),
                ("intermediate_size", "expert_feed_forward_length"),
            ],
        ),
        "qwen3_next" => ("qwen3next", LINEAR),
        "qwen3_5_moe_text" => ("qwen35moe", LINEAR),
        _ => (
            "glm4moe",
            &[
                ("n_shared_experts", "expert_shared_count"),
                ("first_k_dense_replace", "leading_dense_block_count"),
                ("n_group", "expert_group_count"),
                ("topk_group", "expert_group_used_count"),
                ("routed_scaling_factor", "expert_weights_scale"),
                ("norm_topk_prob", "expert_weights_norm"),
            ],
        ),
    }
}

/// The metadata of Qwen3-Next and Qwen3.5.
const LINEAR: &[(&str, &str)] = &[
    ("shared_expert_intermediate_size", "expert_shared_feed_forward_length"),
    ("linear_conv_kernel_dim", "ssm.conv_kernel"),
    ("linear_key_head_dim", "ssm.state_size"),
    ("linear_num_key_heads", "ssm.group_count"),
    ("linear_num_value_heads", "ssm.time_step_rank"),
];

/// The metadata of DeepSeek-V2 and V3.
const LATENT: &[(&str, &str)] = &[
    ("q_lora_rank", "attention.q_lora_rank"),
    ("kv_lora_rank", "attention.kv_lora_rank"),
    ("qk_rope_head_dim", "rope.dimension_count"),
    ("v_head_dim", "attention.value_length_mla"),
    ("n_shared_experts", "expert_shared_count"),
    ("first_k_dense_replace", "leading_dense_block_count"),
    ("n_group", "expert_group_count"),
    ("topk_group", "expert_group_used_count"),
    ("routed_scaling_factor", "expert_weights_scale"),
    ("norm_topk_prob", "expert_weights_norm"),
];

/// Metadata of all families: their names in config.json and in GGUF files.
pub const COMMON: &[(&str, &str)] = &[
    ("num_hidden_layers", "block_count"),
    ("max_position_embeddings", "context_length"),
    ("hidden_size", "embedding_length"),
    ("intermediate_size", "feed_forward_length"),
    ("num_attention_heads", "attention.head_count"),
    ("num_key_value_heads", "attention.head_count_kv"),
    ("head_dim", "attention.key_length"),
    ("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
    ("rope_theta", "rope.freq_base"),
    ("num_experts", "expert_count"),
    ("num_local_experts", "expert_count"),
    ("n_routed_experts", "expert_count"),
    ("num_experts_per_tok", "expert_used_count"),
    ("moe_intermediate_size", "expert_feed_forward_length"),
];

/// What llama.cpp calls a module of a layer.
const MODULES: &[(&str, &str)] = &[
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("self_attn.q_a_proj", "attn_q_a"),
    ("self_attn.q_a_layernorm", "attn_q_a_norm"),
    ("self_attn.q_b_proj", "attn_q_b"),
    ("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
    ("self_attn.kv_a_layernorm", "attn_kv_a_norm"),
    ("self_attn.kv_b_proj", "attn_kv_b"),
    ("self_attn.k_b_proj", "attn_k_b"),
    ("self_attn.v_b_proj", "attn_v_b"),
    ("mlp.gate", "ffn_gate_inp"),
    ("block_sparse_moe.gate", "ffn_gate_inp"),
    ("mlp.router", "ffn_gate_inp"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
    ("linear_attn.in_proj_qkv", "attn_qkv"),
    ("linear_attn.in_proj_z", "attn_gate"),
    ("linear_attn.in_proj_ba", "ssm_ba"),
    ("linear_attn.in_proj_b", "ssm_beta"),
    ("linear_attn.in_proj_a", "ssm_alpha"),
    ("linear_attn.conv1d", "ssm_conv1d"),
    ("linear_attn.norm", "ssm_norm"),
    ("linear_attn.out_proj", "ssm_out"),
];

/// The families whose files call the norm after attention `post_attention_norm`.
const POST_ATTENTION: [&str; 4] = ["glm4moe", "gpt-oss", "qwen3next", "qwen35moe"];

/// The name in a GGUF file, and the expert's number if it is one expert's.
pub fn place(name: &str, architecture: &str) -> (String, Option<usize>) {
    match name {
        "model.embed_tokens.weight" => return ("token_embd.weight".into(), None),
        "model.norm.weight" => return ("output_norm.weight".into(), None),
        "lm_head.weight" => return ("output.weight".into(), None),
        _ => {}
    }
    let (layer, rest) = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.')).unwrap();
    let (module, ending) = rest.rsplit_once('.').unwrap();
    let matrix = |module: &str| match module.rsplit('.').next().unwrap() {
        "gate_proj" | "w1" => "gate",
        "up_proj" | "w3" => "up",
        _ => "down",
    };
    if let Some((_, expert)) = rest.split_once(".experts.") {
        let expert = expert.split('.').next().unwrap().parse().unwrap();
        return (format!("blk.{layer}.ffn_{}_exps.{ending}", matrix(module)), Some(expert));
    }
    if rest.contains("shared_expert") && module.ends_with("_proj") {
        return (format!("blk.{layer}.ffn_{}_shexp.weight", matrix(module)), None);
    }
    let whole = match ending {
        "e_score_correction_bias" => Some("exp_probs_b.bias"),
        "sinks" => Some("attn_sinks.weight"),
        "A_log" => Some("ssm_a"),
        "dt_bias" => Some("ssm_dt.bias"),
        _ => None,
    };
    if let Some(whole) = whole {
        return (format!("blk.{layer}.{whole}"), None);
    }
    let (_, to) = MODULES.iter().find(|(from, _)| *from == module).unwrap();
    let is_post_attention = *to == "ffn_norm" && POST_ATTENTION.contains(&architecture);
    let to = if is_post_attention { "post_attention_norm" } else { to };
    (format!("blk.{layer}.{to}.{ending}"), None)
}
