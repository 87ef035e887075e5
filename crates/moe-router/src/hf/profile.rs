//! The routing that transformers computes for a model type if its configuration omits keys.
//!
//! Modelling code fixes part of the routing (Mixtral always renormalises, DeepSeek-V3 is always
//! sigmoid with a bias), so defaults alone are not enough: a profile also holds the method.
//! The values are the values of transformers 5.17, and of 5.24 for later models. `tests/transformers.json` compares the
//! results, and moe-layer's `tests/families` compares the results of whole blocks.

use crate::config::Scoring;

/// Selection of a profile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Method {
    /// Plain top-k.
    TopK,
    /// Top-k on score + bias, without groups.
    BiasedTopK,
    /// noaux_tc: biased, with these defaults of (n_group, topk_group).
    Noaux(usize, usize),
    /// Top-k on raw logits.
    RawLogits,
}

/// Defaults and fixed parts of one family of model types.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Profile {
    /// The model types with this profile.
    pub model_types: &'static [&'static str],
    /// The default of `num_experts`, if there is one.
    pub num_experts: Option<usize>,
    /// The default of `num_experts_per_tok`, if there is one.
    pub top_k: Option<usize>,
    /// Scoring function.
    pub scoring: Scoring,
    /// Selection.
    pub method: Method,
    /// The default of `norm_topk_prob`, or the behaviour of the code if it does not read the key.
    pub renormalize: bool,
    /// `routed_scaling_factor`.
    pub routed_scaling_factor: f32,
    /// `zero_expert_num`.
    pub num_zero_experts: usize,
    /// Whether the gate has a bias.
    pub gate_bias: bool,
    /// Whether transformers 5.24 keeps the gate in f32 (`_keep_in_fp32_modules_strict`) and multiplies in f32.
    pub f32_gate: bool,
    /// Whether experts receive `weight * hidden`.
    pub weight_on_input: bool,
}

/// Softmax top-k, not renormalised: the family of Qwen2-MoE.
const BASE: Profile = Profile {
    model_types: &[],
    num_experts: None,
    top_k: None,
    scoring: Scoring::Softmax,
    method: Method::TopK,
    renormalize: false,
    routed_scaling_factor: 1.0,
    num_zero_experts: 0,
    gate_bias: false,
    f32_gate: false,
    weight_on_input: false,
};

/// DeepSeek-V3 and the models that use the same router.
const NOAUX: Profile = Profile {
    scoring: Scoring::Sigmoid,
    method: Method::Noaux(1, 1),
    renormalize: true,
    num_experts: Some(128),
    top_k: Some(8),
    f32_gate: true,
    ..BASE
};

const fn base(model_types: &'static [&'static str], num_experts: usize, top_k: usize) -> Profile {
    Profile { model_types, num_experts: Some(num_experts), top_k: Some(top_k), ..BASE }
}

const PROFILES: &[Profile] = &[
    base(&["qwen2_moe"], 60, 4),
    base(&["qwen3_moe"], 128, 8),
    Profile { renormalize: true, ..base(&["qwen3_next"], 512, 10) },
    Profile { renormalize: true, ..base(&["qwen3_5_moe_text"], 256, 8) },
    base(&["olmoe"], 64, 8),
    base(&["flex_olmo"], 7, 5),
    Profile { renormalize: true, ..base(&["mixtral", "minimax"], 8, 2) },
    Profile { renormalize: true, ..base(&["hunyuan_v1_moe"], 1, 1) },
    Profile { method: Method::RawLogits, ..base(&["granitemoe"], 8, 2) },
    Profile { method: Method::RawLogits, gate_bias: true, ..base(&["gpt_oss"], 128, 4) },
    Profile {
        scoring: Scoring::Sigmoid,
        method: Method::RawLogits,
        weight_on_input: true,
        ..base(&["llama4_text"], 16, 1)
    },
    Profile { model_types: &["deepseek_v2"], num_experts: Some(64), f32_gate: true, ..BASE },
    Profile {
        model_types: &["deepseek_v3", "deepseek_v32"],
        num_experts: Some(256),
        method: Method::Noaux(8, 4),
        routed_scaling_factor: 2.5,
        ..NOAUX
    },
    Profile {
        scoring: Scoring::SqrtSoftplus,
        method: Method::BiasedTopK,
        renormalize: true,
        routed_scaling_factor: 1.5,
        ..base(&["deepseek_v4"], 256, 6)
    },
    Profile { model_types: &["glm4_moe", "glm4v_moe_text", "solar_open"], ..NOAUX },
    Profile { model_types: &["glm_moe_dsa"], num_experts: Some(256), routed_scaling_factor: 2.5, ..NOAUX },
    Profile { model_types: &["exaone_moe"], num_experts: Some(64), routed_scaling_factor: 2.5, ..NOAUX },
    Profile {
        model_types: &["glm4_moe_lite"],
        num_experts: Some(64),
        top_k: Some(4),
        routed_scaling_factor: 1.8,
        ..NOAUX
    },
    Profile { model_types: &["dots1"], num_experts: None, top_k: None, renormalize: false, ..NOAUX },
    Profile {
        scoring: Scoring::Sigmoid,
        method: Method::BiasedTopK,
        renormalize: true,
        ..base(&["minimax_m2"], 256, 8)
    },
    Profile {
        method: Method::BiasedTopK,
        renormalize: true,
        f32_gate: true,
        ..base(&["ernie4_5_moe"], 64, 6)
    },
    Profile {
        method: Method::BiasedTopK,
        routed_scaling_factor: 6.0,
        num_zero_experts: 256,
        ..base(&["longcat_flash"], 512, 12)
    },
];

/// The model types whose routing [`RouterConfig::from_hf`](crate::RouterConfig::from_hf) knows.
pub fn model_types() -> impl Iterator<Item = &'static str> {
    PROFILES.iter().flat_map(|profile| profile.model_types.iter().copied())
}

impl Profile {
    /// The profile of a configuration without a model type: softmax top-k, every key at the
    /// default of InfiniLM's reader.
    pub const GENERIC: Profile = BASE;

    /// The profile of a model type.
    pub fn find(model_type: &str) -> Option<&'static Profile> {
        PROFILES.iter().find(|p| p.model_types.contains(&model_type))
    }
}
