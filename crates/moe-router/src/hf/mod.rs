//! A router configuration from a model's `config.json`.
//!
//! Three dialects meet here: transformers (model types whose code fixes the method), DeepSeek's
//! own keys (`topk_method`, `scoring_func`, `n_group`), and InfiniLM's (`moe_router_backend`,
//! `num_expert_group`, `moe_softcapping`). One order of precedence covers them:
//! `moe_router_backend`, then `topk_method`, then the model type, with `scoring_func` naming the
//! scores of the last two. What they leave open or contradict is an error.

mod keys;
mod profile;

use serde_json::Value;

use crate::config::{RouterConfig, Scoring, Selection};
use crate::error::{RouterError, refuse};
use crate::validate::{CountNames, not_zero};
use profile::{Method, Profile};

pub use keys::Keys;
pub use profile::model_types;

type Result<T> = std::result::Result<T, RouterError>;

/// The keys of config.json that say how many routed experts a layer has; a config has one of them, or none.
pub const NUM_EXPERTS: [&str; 4] =
    ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"];
/// The keys of config.json that say how many experts compute a token.
pub const TOP_K: [&str; 3] = ["num_experts_per_tok", "moe_topk", "moe_k"];
const NUM_EXPERT_GROUP: [&str; 2] = ["num_expert_group", "n_group"];
const CORRECTION_BIAS: [&str; 2] = ["e_score_correction_bias", "moe_router_use_correction_bias"];

/// The method according to the keys, before sizes are read.
struct Choice {
    scoring: Scoring,
    /// The name of the grouped selection, for messages.
    grouped: Option<&'static str>,
    bias: bool,
    raw_logits: bool,
}

impl Choice {
    fn plain(scoring: Scoring) -> Self {
        Self { scoring, grouped: None, bias: false, raw_logits: false }
    }

    fn noaux(scoring: Scoring) -> Self {
        Self { grouped: Some("fused_gate (noaux_tc)"), bias: true, ..Self::plain(scoring) }
    }
}

impl RouterConfig {
    /// The routing method of a model's `config.json`.
    ///
    /// | setting | keys | default |
    /// |---|---|---|
    /// | method | `moe_router_backend`, else `topk_method` (values below) | by `model_type`; without one, plain top-k |
    /// | scores | `scoring_func` (`softmax`, `sigmoid`, `sqrtsoftplus`) | by method and `model_type`; softmax |
    /// | experts | `num_experts`, `num_local_experts`, `n_routed_experts`, `moe_num_experts` | by `model_type` |
    /// | experts per token, shared slots too | `num_experts_per_tok`, `moe_topk`, `moe_k` | by `model_type` |
    /// | groups | `num_expert_group`, `n_group`; `topk_group` | by `model_type` |
    /// | bias | `e_score_correction_bias`, `moe_router_use_correction_bias` | true for noaux_tc |
    /// | renormalise | `norm_topk_prob` | by `model_type`; false |
    /// | scale | `routed_scaling_factor` | by `model_type`; 1 |
    /// | capping | `moe_softcapping` (0 = off) | 0 |
    /// | fused shared experts | `num_fused_shared_experts` | 0 |
    /// | zero experts | `zero_expert_num`, `zero_expert_type` | by `model_type`; 0 |
    /// | weight on input | `apply_router_weight_on_input` | by `model_type`; false |
    /// | bias of the gate; gate in f32 | | by `model_type`; false |
    ///
    /// `moe_router_backend` is `softmax`, `sigmoid` or `fused_gate`, which is `noaux_tc`. `topk_method` is `greedy`,
    /// `group_limited_greedy` or `noaux_tc`.
    ///
    /// Model types with a profile: deepseek_v2, deepseek_v3, deepseek_v32, deepseek_v4, dots1, ernie4_5_moe,
    /// exaone_moe, flex_olmo, glm4_moe, glm4_moe_lite, glm4v_moe_text, glm_moe_dsa, gpt_oss, granitemoe,
    /// hunyuan_v1_moe, llama4_text, longcat_flash, minimax, minimax_m2, mixtral, olmoe, qwen2_moe, qwen3_moe,
    /// qwen3_next, qwen3_5_moe_text, solar_open. `text_config` of a multimodal model is looked into. Any other model
    /// type must name its method.
    ///
    /// Where references disagree: the factor always applies, after renormalising, as in vLLM
    /// (InfiniLM drops it on its softmax and sigmoid paths; DeepSeek-V2's published code scales
    /// only if it does not renormalise; transformers' never renormalises for deepseek_v2), and
    /// `norm_topk_prob` is honoured on every path. `apply_routed_scaling_factor_on_output` says
    /// where the factor is applied, not whether: it changes nothing here.
    ///
    /// # Errors
    ///
    /// A [`RouterError`] for the first fault: unknown names, missing, contradicting or mistyped keys, and
    /// everything that [`validate`](Self::validate) refuses.
    pub fn from_hf(config: &Value) -> Result<Self> {
        let keys = Keys::of(config)?;
        let (profile, known) = profile_of(keys)?;
        let choice = choose_method(keys, &profile, known)?;
        let num_fused_shared_experts = keys.count(&["num_fused_shared_experts"])?.unwrap_or(0);
        let (top_k_key, slots) = keys.required_named(&TOP_K, profile.top_k)?;
        let (num_experts_key, num_experts) = keys.required_named(&NUM_EXPERTS, profile.num_experts)?;
        not_zero(top_k_key, slots)?;
        if num_fused_shared_experts > 0 && slots <= num_fused_shared_experts {
            refuse!(
                Contradiction,
                "{top_k_key} = {slots} counts the fused shared experts and must exceed \
                 num_fused_shared_experts = {num_fused_shared_experts}"
            )
        }
        keys.flag(&["apply_routed_scaling_factor_on_output"])?;
        let correction_bias = correction_bias(keys, &choice)?;
        let out = Self {
            scoring: choice.scoring,
            selection: selection(keys, &profile, &choice)?,
            correction_bias,
            gate_bias: profile.gate_bias,
            f32_gate: profile.f32_gate,
            renormalize: keys.flag(&["norm_topk_prob"])?.map_or(profile.renormalize, |(_, b)| b),
            routed_scaling_factor: keys
                .number("routed_scaling_factor")?
                .unwrap_or(profile.routed_scaling_factor),
            softcapping: keys.number("moe_softcapping")?.filter(|&cap| cap != 0.0),
            num_zero_experts: zero_experts(keys, &profile)?,
            num_fused_shared_experts,
            apply_router_weight_on_input: keys
                .flag(&["apply_router_weight_on_input"])?
                .map_or(profile.weight_on_input, |(_, b)| b),
            ..Self::new(num_experts, slots - num_fused_shared_experts)
        };
        let top_k = match num_fused_shared_experts {
            0 => top_k_key.to_string(),
            _ => format!("{top_k_key} - num_fused_shared_experts"),
        };
        out.validate_as(&CountNames { num_experts: num_experts_key, top_k })?;
        Ok(out)
    }

    /// [`from_hf`](Self::from_hf) for one decoder layer (dense layers count): the first layers of
    /// DeepSeek-V4 route by token id (`mlp_layer_types` = `hash_moe`, or `num_hash_layers`, by
    /// default 3). For every other model all layers are alike.
    ///
    /// # Errors
    ///
    /// The errors of [`from_hf`](Self::from_hf).
    pub fn from_hf_layer(config: &Value, layer: usize) -> Result<Self> {
        let out = Self::from_hf(config)?;
        let keys = Keys::of(config)?;
        if keys.text("model_type")? != Some("deepseek_v4") {
            return Ok(out);
        }
        let hash = match keys.text_at("mlp_layer_types", layer)? {
            Some("hash_moe") => true,
            Some("moe") => false,
            Some(name) => {
                return Err(RouterError::unknown("mlp_layer_types", name, "hash_moe, moe"));
            }
            None => layer < keys.count(&["num_hash_layers"])?.unwrap_or(3),
        };
        if !hash {
            return Ok(out);
        }
        let vocab_size = keys.required(&["vocab_size"], None)?;
        let out = Self { selection: Selection::Hash { vocab_size }, correction_bias: false, ..out };
        out.validate()?;
        Ok(out)
    }
}

/// Returns the profile, and whether the model type has one of its own.
fn profile_of(keys: Keys<'_>) -> Result<(Profile, bool)> {
    let found = keys.text("model_type")?.and_then(Profile::find);
    Ok((found.copied().unwrap_or(Profile::GENERIC), found.is_some()))
}

/// Chooses the method by precedence: backend, topk_method, model type.
fn choose_method(keys: Keys<'_>, profile: &Profile, known: bool) -> Result<Choice> {
    let scoring: Option<Scoring> = keys.text("scoring_func")?.map(str::parse).transpose()?;
    let biased = matches!(profile.method, Method::Noaux(..) | Method::BiasedTopK);
    let or_sigmoid = || scoring.unwrap_or(if biased { profile.scoring } else { Scoring::Sigmoid });
    if let Some(name) = keys.text("moe_router_backend")? {
        return match name {
            "softmax" | "topksoftmax" | "legacy_softmax" => Ok(Choice::plain(Scoring::Softmax)),
            "sigmoid" => Ok(Choice::plain(Scoring::Sigmoid)),
            "fused_gate" | "noaux_tc" => Ok(Choice::noaux(or_sigmoid())),
            _ => Err(RouterError::unknown(
                "moe_router_backend",
                name,
                "softmax, topksoftmax, legacy_softmax, sigmoid, fused_gate, noaux_tc",
            )),
        };
    }
    if let Some(name) = keys.text("topk_method")? {
        let scoring = scoring.unwrap_or(profile.scoring);
        return match name {
            "greedy" => Ok(Choice::plain(scoring)),
            "group_limited_greedy" => {
                Ok(Choice { grouped: Some("group_limited_greedy"), ..Choice::plain(scoring) })
            }
            "noaux_tc" => Ok(Choice::noaux(or_sigmoid())),
            _ => Err(RouterError::unknown("topk_method", name, "greedy, group_limited_greedy, noaux_tc")),
        };
    }
    if let (Some(model_type), None, false) = (keys.text("model_type")?, scoring, known) {
        refuse!(
            Unsupported,
            "model_type `{model_type}` is unknown to the router and the configuration does not say how it routes; set \
             moe_router_backend, topk_method or scoring_func"
        )
    }
    let scoring = scoring.unwrap_or(profile.scoring);
    if let Method::Noaux(..) = profile.method {
        return Ok(Choice::noaux(scoring));
    }
    // transformers' DeepseekV2Config writes its default explicitly. With topk_method "greedy" the groups are ignored.
    let greedy = profile.model_types.contains(&"deepseek_v2");
    let groups = keys.count(&NUM_EXPERT_GROUP)?.filter(|&n| n > 1 && !greedy);
    if let Some(num_expert_group) = groups {
        refuse!(
            Contradiction,
            "num_expert_group = {num_expert_group} is set, but nothing says whether routing uses groups; set \
             topk_method (greedy, group_limited_greedy or noaux_tc)"
        )
    }
    let bias = profile.method == Method::BiasedTopK;
    let raw_logits = profile.method == Method::RawLogits;
    Ok(Choice { bias, raw_logits, ..Choice::plain(scoring) })
}

fn selection(keys: Keys<'_>, profile: &Profile, choice: &Choice) -> Result<Selection> {
    let Some(method) = choice.grouped else {
        return Ok(if choice.raw_logits { Selection::RawLogits } else { Selection::TopK });
    };
    let mut num_expert_group = keys.count(&NUM_EXPERT_GROUP)?;
    let mut topk_group = keys.count(&["topk_group"])?;
    match profile.method {
        Method::Noaux(groups, kept) => {
            num_expert_group = num_expert_group.or(Some(groups));
            topk_group = topk_group.or(Some(kept));
        }
        // Some models write noaux_tc for a bias without groups (DeepSeek-V4).
        Method::BiasedTopK if num_expert_group.is_none() && topk_group.is_none() => {
            return Ok(Selection::TopK);
        }
        _ => {}
    }
    match (num_expert_group, topk_group) {
        (Some(groups @ 1..), Some(kept @ 1..)) => {
            Ok(Selection::Grouped { num_expert_group: groups, topk_group: kept })
        }
        _ => refuse!(
            Contradiction,
            "{method} routing requires num_expert_group (n_group) and topk_group, both non-zero, got \
             {num_expert_group:?} and {topk_group:?}"
        ),
    }
}

fn correction_bias(keys: Keys<'_>, choice: &Choice) -> Result<bool> {
    let fused_gate = choice.bias && choice.grouped.is_some();
    match keys.flag(&CORRECTION_BIAS)? {
        Some((key, false)) if fused_gate => {
            refuse!(
                Contradiction,
                "fused_gate (noaux_tc) routing requires a correction bias, but {key} is false"
            )
        }
        Some((_, bias)) => Ok(bias),
        None => Ok(choice.bias),
    }
}

fn zero_experts(keys: Keys<'_>, profile: &Profile) -> Result<usize> {
    match keys.text("zero_expert_type")? {
        None | Some("identity") => {}
        Some(name) => {
            refuse!(Unsupported, "unsupported zero_expert_type `{name}`; only `identity` is defined")
        }
    }
    Ok(keys.count(&["zero_expert_num"])?.unwrap_or(profile.num_zero_experts))
}
