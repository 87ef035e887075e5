//! The metadata of a GGUF file that describe the network: what a config.json says, in llama.cpp's words.

use anyhow::{Context, Result, bail};
use model_runtime::checkpoint::GgufNames;
use model_runtime::{DecoderConfig, MixerConfig, RopeScaling};
use moe_engine::AttentionSpec;
use moe_layer::{RouterSelection as Selection, Scoring};
use serde_json::Value;

use super::file::Meta;
use super::mix::GgufMix;
use crate::source::Source;

/// The version of ggml's block formats.
const QUANTISATION_VERSION: u32 = 2;
/// `expert_gating_func`.
const SOFTMAX: u32 = 1;
const SIGMOID: u32 = 2;

/// The heads of an attention.
struct Heads {
    count: usize,
    groups: usize,
    keys: usize,
    values: usize,
    rotated: usize,
}

impl Heads {
    fn of(source: &Source) -> Result<Self> {
        match source.model.attention() {
            AttentionSpec::Latent(mla) => Ok(Self {
                count: mla.num_heads,
                groups: mla.num_heads,
                keys: mla.qk_nope_head_dim + mla.qk_rope_head_dim,
                values: mla.v_head_dim,
                rotated: mla.qk_rope_head_dim,
            }),
            AttentionSpec::Layers(layers) => {
                let first = layers.first().and_then(MixerConfig::attention);
                let first = first.context("the first layer has no attention with keys and values")?;
                Ok(Self {
                    count: first.num_heads,
                    groups: first.num_kv_heads,
                    keys: first.head_dim,
                    values: first.head_dim,
                    rotated: first.rotary_dim,
                })
            }
        }
    }
}

/// Returns the metadata of the network.
///
/// # Errors
/// The model has what metadata of its architecture cannot say.
pub fn network(source: &Source, names: &GgufNames, mix: GgufMix) -> Result<Vec<(String, Meta)>> {
    let architecture = names.architecture();
    let folder = source.dir.canonicalize().unwrap_or_else(|_| source.dir.clone());
    let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut metadata = vec![
        ("general.architecture".to_string(), Meta::Text(architecture.to_string())),
        ("general.type".to_string(), Meta::Text("model".to_string())),
        ("general.name".to_string(), Meta::Text(name)),
        ("general.file_type".to_string(), Meta::U32(mix.file_type())),
        ("general.quantization_version".to_string(), Meta::U32(QUANTISATION_VERSION)),
    ];
    let heads = Heads::of(source)?;
    let decoder = source.model.decoder();
    let mut put = |key: &str, value: Meta| metadata.push((format!("{architecture}.{key}"), value));
    for (key, of_config) in names.keys() {
        if let Some(value) = value(of_config, source, &heads)? {
            put(key, value);
        }
    }
    put("attention.value_length", size(heads.values)?);
    put("rope.dimension_count", size(heads.rotated)?);
    put("vocab_size", size(decoder.vocab_size)?);
    let says_scoring = names.keys().any(|(key, _)| key == "expert_weights_scale");
    if let Some(moe) = decoder.moe.as_ref().filter(|_| says_scoring) {
        let gating = if moe.router.scoring == Scoring::Sigmoid { SIGMOID } else { SOFTMAX };
        put("expert_gating_func", Meta::U32(gating));
    }
    for (key, value) in scaling(source, decoder)? {
        put(key, value);
    }
    Ok(metadata)
}

fn size(x: usize) -> Result<Meta> {
    Ok(Meta::U32(u32::try_from(x).with_context(|| format!("{x} is too large for a number of 32 bits"))?))
}

/// Returns the value that a key of config.json has for the model, or `None` if the model has no such property.
fn value(key: &str, source: &Source, heads: &Heads) -> Result<Option<Meta>> {
    let decoder = source.model.decoder();
    let moe = decoder.moe.as_ref().context("the model has no experts")?;
    let router = &moe.router;
    let latent = match source.model.attention() {
        AttentionSpec::Latent(mla) => Some(mla),
        AttentionSpec::Layers(_) => None,
    };
    let groups = match router.selection {
        Selection::Grouped { num_expert_group, topk_group } => (num_expert_group, topk_group),
        _ => (1, 1),
    };
    let number = match key {
        "rms_norm_eps" => return Ok(Some(Meta::F32(decoder.rms_norm_eps as f32))),
        "rope_theta" => return Ok(decoder.rope.first().map(|rope| Meta::F32(rope.theta as f32))),
        "routed_scaling_factor" => return Ok(Some(Meta::F32(router.routed_scaling_factor))),
        "norm_topk_prob" => return Ok(Some(Meta::Bool(router.renormalize))),
        "num_hidden_layers" => decoder.num_layers(),
        "max_position_embeddings" => decoder.max_position_embeddings(),
        "hidden_size" => decoder.hidden_size,
        // Families without dense layers may have no such width.
        "intermediate_size" if decoder.intermediate_size == 0 => moe.intermediate_size,
        "intermediate_size" => decoder.intermediate_size,
        "moe_intermediate_size" => moe.intermediate_size,
        "num_attention_heads" => heads.count,
        "num_key_value_heads" => heads.groups,
        "head_dim" => heads.keys,
        "num_experts" => router.num_experts,
        "num_experts_per_tok" => router.top_k,
        "shared_expert_intermediate_size" => moe.shared_intermediate_size,
        "n_shared_experts" => match moe.shared_experts() {
            Some(count) => count,
            None => bail!("the width of shared experts is no multiple of the width of an expert"),
        },
        "first_k_dense_replace" => decoder.is_sparse.iter().take_while(|sparse| !**sparse).count(),
        "n_group" => groups.0,
        "topk_group" => groups.1,
        "kv_lora_rank" => match latent {
            Some(mla) => mla.kv_lora_rank,
            None => return Ok(None),
        },
        "q_lora_rank" => match latent.and_then(|mla| mla.q_lora_rank) {
            Some(rank) => rank,
            None => return Ok(None),
        },
        other => bail!("config.json's `{other}` has no counterpart here"),
    };
    size(number).map(Some)
}

/// Returns how the context is extended.
fn scaling(source: &Source, decoder: &DecoderConfig) -> Result<Vec<(&'static str, Meta)>> {
    let Some(rope) = decoder.rope.first() else { return Ok(Vec::new()) };
    let mut metadata = Vec::new();
    let kind = |kind: &str| ("rope.scaling.type", Meta::Text(kind.to_string()));
    let factor = |factor: f64| ("rope.scaling.factor", Meta::F32(factor as f32));
    match &rope.scaling {
        RopeScaling::Default => {}
        RopeScaling::Linear { factor: by } => metadata.extend([kind("linear"), factor(*by)]),
        RopeScaling::Dynamic { .. } => {
            bail!("GGUF files have no dynamic scaling of rotary frequencies (`rope_scaling`)")
        }
        RopeScaling::Yarn(yarn) => metadata.extend([
            kind("yarn"),
            factor(yarn.factor),
            ("rope.scaling.original_context_length", size(yarn.original_max_position_embeddings)?),
            ("rope.scaling.yarn_beta_fast", Meta::F32(yarn.beta_fast as f32)),
            ("rope.scaling.yarn_beta_slow", Meta::F32(yarn.beta_slow as f32)),
        ]),
    }
    let sections = ["rope_scaling", "rope_parameters"].map(|key| &source.config[key]["mscale_all_dim"]);
    let mscale = sections.into_iter().find_map(Value::as_f64).filter(|mscale| *mscale != 0.0);
    if let Some(mscale) = mscale {
        metadata.push(("rope.scaling.yarn_log_multiplier", Meta::F32((0.1 * mscale) as f32)));
    }
    Ok(metadata)
}
