//! The architectures of GGUF files that are run: what llama.cpp calls a family, and what is not in the file because its
//! code fixes it. A family is a row of [`TABLE`].

use moe_kernels::names::TensorNames;
use serde_json::Value;

/// A family as GGUF files have it.
pub(super) struct Architecture {
    /// `general.architecture`.
    pub name: &'static str,
    /// `model_type` of config.json.
    pub model_type: &'static str,
    /// Its class in transformers.
    pub class: &'static str,
    /// The family's names of tensors.
    pub names: TensorNames,
    /// Metadata below the architecture's name, and the keys of config.json with the same meaning, in addition to the
    /// keys of all families.
    pub keys: &'static [(&'static str, &'static str)],
    /// What llama.cpp's code of the family does in any case.
    pub fixed: &'static [(&'static str, Fixed)],
    /// The `expert_gating_func` of its files, where llama.cpp reads this key for the family.
    pub gating: Option<u64>,
    /// Whether its attention is latent (MLA).
    pub is_latent: bool,
    /// Whether its heads may be rotated in part, as `rope.dimension_count` says.
    pub rotates_parts: bool,
    /// Its layers may differ in what they see of a sequence.
    pub layers: Layers,
    /// llama.cpp's name of the norm between attention and MLP in files of the family.
    pub mlp_norm: &'static str,
}

/// A family's layers may differ in what they see of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layers {
    /// The layers do not differ.
    Alike,
    /// Some layers see only a window of positions.
    Sliding,
    /// Some layers have linear attention by the gated delta rule. The files of such families hold 1 + weight of each
    /// norm around the layers and of q and k.
    Linear,
}

impl Layers {
    /// Returns the metadata that are read for these layers alone, below the architecture's name. The first one says
    /// which layers they are.
    pub fn keys(self) -> &'static [&'static str] {
        match self {
            Self::Alike => &[],
            Self::Sliding => &["attention.sliding_window_pattern", "rope.freq_base_swa"],
            Self::Linear => &["attention.recurrent_layers", "ssm.inner_size"],
        }
    }

    /// Returns what config.json calls such a layer.
    pub fn kind(self) -> &'static str {
        match self {
            Self::Alike => "full_attention",
            Self::Sliding => "sliding_attention",
            Self::Linear => "linear_attention",
        }
    }
}

/// A value of config.json.
#[derive(Clone, Copy)]
pub(super) enum Fixed {
    Bool(bool),
    Text(&'static str),
}

/// Metadata that every family has, below the architecture's name, and the keys of config.json that say the same.
pub(super) const COMMON: &[(&str, &str)] = &[
    ("block_count", "num_hidden_layers"),
    ("context_length", "max_position_embeddings"),
    ("embedding_length", "hidden_size"),
    ("feed_forward_length", "intermediate_size"),
    ("attention.head_count", "num_attention_heads"),
    ("attention.head_count_kv", "num_key_value_heads"),
    ("attention.key_length", "head_dim"),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
    ("rope.freq_base", "rope_theta"),
    ("expert_count", "num_experts"),
    ("expert_used_count", "num_experts_per_tok"),
    ("expert_feed_forward_length", "moe_intermediate_size"),
];

/// A file without these metadata is not run, because the defaults of config.json have the values of one model.
pub(super) const REQUIRED: &[&str] = &[
    "block_count",
    "context_length",
    "embedding_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
    "expert_used_count",
];

/// Metadata that is read in another way, or says nothing about the network.
pub(super) const READ_OTHERWISE: &[&str] = &[
    "attention.value_length",
    "attention.key_length_mla",
    "attention.value_length_mla",
    "expert_gating_func",
    "rope.scaling.yarn_log_multiplier",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.attn_factor",
    "rope.dimension_count",
    // Dimensions may be for time, height or width. The three positions of a text's token are one.
    "rope.dimension_sections",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scale_linear",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "vocab_size",
    "nextn_predict_layers",
];

/// The name of the norm between attention and MLP in newer families.
pub(super) const POST_NORM: &str = "post_attention_norm";

const USUAL: Architecture = Architecture {
    name: "",
    model_type: "",
    class: "",
    names: TensorNames::USUAL,
    keys: &[],
    fixed: &[],
    gating: None,
    is_latent: false,
    rotates_parts: false,
    layers: Layers::Alike,
    mlp_norm: "ffn_norm",
};

/// `expert_gating_func`: a softmax of all scores, and the sigmoid of each.
pub(super) const SOFTMAX: u64 = 1;
pub(super) const SIGMOID: u64 = 2;

/// DeepSeek-V2.
const DEEPSEEK: Architecture = Architecture {
    name: "deepseek2",
    model_type: "deepseek_v2",
    class: "DeepseekV2ForCausalLM",
    names: TensorNames { shared_experts: Some("shared_experts"), ..TensorNames::USUAL },
    keys: &[
        ("attention.q_lora_rank", "q_lora_rank"),
        ("attention.kv_lora_rank", "kv_lora_rank"),
        ("expert_shared_count", "n_shared_experts"),
        ("leading_dense_block_count", "first_k_dense_replace"),
        ("expert_group_count", "n_group"),
        ("expert_group_used_count", "topk_group"),
        ("expert_weights_scale", "routed_scaling_factor"),
        ("expert_weights_norm", "norm_topk_prob"),
    ],
    fixed: &[("scoring_func", Fixed::Text("softmax"))],
    gating: Some(SOFTMAX),
    is_latent: true,
    ..USUAL
};

/// Qwen3-Next. The rows of b and a are grouped by key heads, as in its other checkpoints.
const QWEN3_NEXT: Architecture = Architecture {
    name: "qwen3next",
    model_type: "qwen3_next",
    class: "Qwen3NextForCausalLM",
    names: TensorNames {
        shared_experts: Some("shared_expert"),
        shared_expert_gate: Some("shared_expert_gate"),
        ..TensorNames::USUAL
    },
    keys: &[
        ("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
        ("full_attention_interval", "full_attention_interval"),
        ("ssm.conv_kernel", "linear_conv_kernel_dim"),
        ("ssm.state_size", "linear_key_head_dim"),
        ("ssm.group_count", "linear_num_key_heads"),
        ("ssm.time_step_rank", "linear_num_value_heads"),
    ],
    fixed: &[("norm_topk_prob", Fixed::Bool(true))],
    rotates_parts: true,
    layers: Layers::Linear,
    mlp_norm: POST_NORM,
    ..USUAL
};

/// Every architecture, a row each.
const TABLE: &[Architecture] = &[
    Architecture {
        name: "qwen3moe",
        model_type: "qwen3_moe",
        class: "Qwen3MoeForCausalLM",
        fixed: &[("norm_topk_prob", Fixed::Bool(true)), ("use_sliding_window", Fixed::Bool(false))],
        ..USUAL
    },
    Architecture {
        name: "qwen2moe",
        model_type: "qwen2_moe",
        class: "Qwen2MoeForCausalLM",
        names: TensorNames {
            shared_experts: Some("shared_expert"),
            shared_expert_gate: Some("shared_expert_gate"),
            ..TensorNames::USUAL
        },
        keys: &[("expert_shared_feed_forward_length", "shared_expert_intermediate_size")],
        fixed: &[("norm_topk_prob", Fixed::Bool(false)), ("use_sliding_window", Fixed::Bool(false))],
        ..USUAL
    },
    Architecture {
        name: "olmoe",
        model_type: "olmoe",
        class: "OlmoeForCausalLM",
        fixed: &[("norm_topk_prob", Fixed::Bool(false))],
        ..USUAL
    },
    // Mixtral: rows of q and k are in the order in which neighbours are rotated together.
    Architecture {
        name: "llama",
        model_type: "mixtral",
        class: "MixtralForCausalLM",
        names: TensorNames::MIXTRAL,
        fixed: &[("norm_topk_prob", Fixed::Bool(true)), ("rope_interleave", Fixed::Bool(true))],
        ..USUAL
    },
    Architecture {
        name: "glm4moe",
        model_type: "glm4_moe",
        class: "Glm4MoeForCausalLM",
        names: TensorNames { shared_experts: Some("shared_experts"), ..TensorNames::USUAL },
        keys: &[
            ("expert_shared_count", "n_shared_experts"),
            ("leading_dense_block_count", "first_k_dense_replace"),
            ("expert_group_count", "n_group"),
            ("expert_group_used_count", "topk_group"),
            ("expert_weights_scale", "routed_scaling_factor"),
            ("expert_weights_norm", "norm_topk_prob"),
        ],
        fixed: &[("scoring_func", Fixed::Text("sigmoid"))],
        gating: Some(SIGMOID),
        rotates_parts: true,
        mlp_norm: POST_NORM,
        ..USUAL
    },
    DEEPSEEK,
    Architecture {
        model_type: "deepseek_v3",
        class: "DeepseekV3ForCausalLM",
        fixed: &[("scoring_func", Fixed::Text("sigmoid")), ("topk_method", Fixed::Text("noaux_tc"))],
        gating: Some(SIGMOID),
        ..DEEPSEEK
    },
    Architecture {
        name: "gpt-oss",
        model_type: "gpt_oss",
        class: "GptOssForCausalLM",
        names: TensorNames { gate: "router", ..TensorNames::USUAL },
        keys: &[
            ("expert_feed_forward_length", "intermediate_size"),
            ("attention.sliding_window", "sliding_window"),
        ],
        layers: Layers::Sliding,
        mlp_norm: POST_NORM,
        ..USUAL
    },
    QWEN3_NEXT,
    // This is the text model; another file reads pictures. Value heads are in turns.
    Architecture {
        name: "qwen35moe",
        model_type: "qwen3_5_moe_text",
        class: "Qwen3_5MoeForCausalLM",
        fixed: &[("norm_topk_prob", Fixed::Bool(true)), ("linear_value_heads_in_turns", Fixed::Bool(true))],
        ..QWEN3_NEXT
    },
];

impl Fixed {
    /// The value in JSON.
    pub fn json(self) -> Value {
        match self {
            Self::Bool(flag) => flag.into(),
            Self::Text(text) => text.into(),
        }
    }
}

impl Architecture {
    /// The rows of this name, of which the first is for files without `expert_gating_func`.
    pub fn named(name: &str) -> impl Iterator<Item = &'static Self> {
        TABLE.iter().filter(move |row| row.name == name)
    }

    /// Whether files have this key of config.json among their metadata.
    pub fn reads(&self, name: &str) -> bool {
        self.keys.iter().any(|(_, key)| *key == name)
    }

    /// The row of a `model_type` of config.json.
    pub fn of_model_type(model_type: &str) -> Option<&'static Self> {
        TABLE.iter().find(|row| row.model_type == model_type)
    }

    /// Every row.
    pub fn all() -> impl Iterator<Item = &'static Self> {
        TABLE.iter()
    }
}

/// The names of all architectures that are run, for messages.
pub fn architectures() -> String {
    let mut names: Vec<_> = TABLE.iter().map(|row| row.name).collect();
    names.dedup();
    names.join(", ")
}
