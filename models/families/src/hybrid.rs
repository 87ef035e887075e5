//! What Qwen3-Next and Qwen3.5-MoE have in common: layers of linear attention by the gated delta rule, and full
//! attention with an output gate in every fourth layer.

use model_runtime::config::limits;
use model_runtime::{
    AttentionConfig, Config, ConfigError, DecoderConfig, DecoderModel, DeltaHeads, LinearAttentionConfig,
    MixerConfig, MoeConfig, MtpConfig, MtpNames, QkNorm, RopeConfig, TensorNames,
};

use crate::fixed_keys::{check_no_window, check_softmax_routing};
use crate::grouped_query::{Sizes, attention};
use crate::qwen3_moe::sparse_layers;
use crate::spec::DecoderSpec;

const NO_MLA: &str = "`mla`: Qwen3-Next and Qwen3.5-MoE have no multi-head latent attention; leave it out";

const SIZES: Sizes = Sizes { hidden_size: 2048, num_heads: 16, num_kv_heads: Some(2), rms_norm_eps: 1e-6 };

/// The names of both families where there is a text model alone.
pub(crate) const NAMES: TensorNames = TensorNames {
    shared_experts: Some("shared_expert"),
    shared_expert_gate: Some("shared_expert_gate"),
    ..TensorNames::USUAL
};

/// The head for multi-token prediction, which has the same names in both families.
const MTP: MtpNames = MtpNames {
    fc: "mtp.fc",
    embedding_norm: "mtp.pre_fc_norm_embedding",
    hidden_norm: "mtp.pre_fc_norm_hidden",
};

/// What differs between the two families.
pub(crate) struct Defaults {
    pub names: TensorNames,
    pub vocab_size: usize,
    pub layers: usize,
    pub experts: usize,
    /// Whether dense layers may be among the sparse ones.
    pub dense_layers: bool,
}

/// Reads and validates a config.json.
///
/// # Errors
/// Values of another type or out of bounds; layers of a type that is not known, or none with full attention.
pub(crate) fn read(config: &Config, defaults: &Defaults) -> Result<DecoderSpec, ConfigError> {
    config.quantisation()?;
    check_softmax_routing(config)?;
    check_no_window(config)?;
    let width = |key: &str, default| config.size_or(&[key], default, limits::WIDTH);
    let positions = config.size_or(&["max_position_embeddings"], 32768, limits::POSITIONS)?;
    let full = full_attention(config, positions)?;
    let linear = linear_attention(config, full.hidden_size)?;
    let layers = config.size_or(&["num_hidden_layers"], defaults.layers, limits::LAYERS)?;
    let mixers: Vec<MixerConfig> = is_full(config, layers)?
        .into_iter()
        .map(|is_full| match is_full {
            true => MixerConfig::Attention(full.clone()),
            false => MixerConfig::Linear(linear),
        })
        .collect();
    let is_sparse = match defaults.dense_layers {
        true => sparse_layers(&config.with("num_hidden_layers", layers))?,
        false => vec![true; layers],
    };
    config.size_or(&["num_experts"], defaults.experts, limits::EXPERTS)?;
    let decoder = DecoderConfig {
        names: defaults.names,
        vocab_size: config.size_or(&["vocab_size"], defaults.vocab_size, limits::VOCAB)?,
        hidden_size: full.hidden_size,
        intermediate_size: width("intermediate_size", 5632)?,
        activation: config.activation()?,
        rms_norm_eps: full.rms_norm_eps,
        zero_centred_norms: true,
        tie_word_embeddings: config.bool_or(&["tie_word_embeddings"], false)?,
        rope: vec![rope(config, full.head_dim, positions)?; layers],
        moe: Some(MoeConfig {
            shared_intermediate_size: width("shared_expert_intermediate_size", 512)?,
            ..MoeConfig::new(config.router()?, width("moe_intermediate_size", 512)?)
        }),
        is_sparse,
    };
    let mtp = mtp(config, &decoder, full)?;
    Ok(DecoderSpec { mtp, ..DecoderSpec::of_layers(config, decoder, mixers, NO_MLA)? })
}

/// The head for multi-token prediction: a layer with full attention, and with the MLP of layer 0, as vLLM numbers it.
fn mtp(
    config: &Config,
    decoder: &DecoderConfig,
    full: AttentionConfig,
) -> Result<Result<MtpConfig, String>, ConfigError> {
    let refused = |what: &str| Ok(Err(format!("multi-token prediction: config.json asks for {what}")));
    let layers = ["mtp_num_hidden_layers", "num_nextn_predict_layers"];
    match config.size_or(&layers, 1, 0..=*limits::LAYERS.end())? {
        0 => return refused("no layers of it (`mtp_num_hidden_layers` 0)"),
        1 => {}
        layers => return refused(&format!("{layers} layers (`mtp_num_hidden_layers`); supported is one")),
    }
    if config.bool_or(&["mtp_use_dedicated_embeddings"], false)? {
        return refused("an embedding of its own (`mtp_use_dedicated_embeddings`); supported is the model's");
    }
    let one = DecoderConfig {
        names: TensorNames { layers: "mtp.layers", norm: "mtp.norm", ..decoder.names },
        rope: decoder.rope[..1].to_vec(),
        is_sparse: decoder.is_sparse[..1].to_vec(),
        ..decoder.clone()
    };
    Ok(Ok(MtpConfig { decoder: DecoderModel::alike(one, full), names: MTP }))
}

/// The rotation of the first quarter of each head. Where the config cuts the rotated pairs into sections for time,
/// height and width, as models do that also see pictures, a text's three positions are one, so the sections change
/// nothing.
fn rope(config: &Config, head_dim: usize, positions: usize) -> Result<RopeConfig, ConfigError> {
    const ROTATED: f64 = 0.25;
    RopeConfig::partial_from_config(config, head_dim, positions, ROTATED)
}

fn full_attention(config: &Config, positions: usize) -> Result<AttentionConfig, ConfigError> {
    const HEAD_DIM: usize = 256;
    let config = if config.has("head_dim") { config.clone() } else { config.with("head_dim", HEAD_DIM) };
    let bias = config.bool_or(&["attention_bias"], false)?;
    let plain = attention(&config, &SIZES)?;
    let rotary_dim = rope(&config, plain.head_dim, positions)?.dim;
    Ok(AttentionConfig {
        rotary_dim,
        qkv_bias: bias,
        o_bias: bias,
        qk_norm: QkNorm::PerHead,
        output_gate: true,
        zero_centred_norms: true,
        ..plain
    })
}

fn linear_attention(config: &Config, hidden_size: usize) -> Result<LinearAttentionConfig, ConfigError> {
    let size = |key: &str, default, bounds| config.size_or(&[key], default, bounds);
    let heads = DeltaHeads {
        key_heads: size("linear_num_key_heads", 16, limits::HEADS)?,
        value_heads: size("linear_num_value_heads", 32, limits::HEADS)?,
        key_dim: size("linear_key_head_dim", 128, limits::HEAD_DIM)?,
        value_dim: size("linear_value_head_dim", 128, limits::HEAD_DIM)?,
    };
    let DeltaHeads { key_heads, value_heads, .. } = heads;
    if key_heads == 0 || !value_heads.is_multiple_of(key_heads) {
        let expected = format!("a multiple of linear_num_key_heads = {key_heads}");
        return Err(config.invalid("linear_num_value_heads", &expected, value_heads));
    }
    let activation = config.opt_string(&["hidden_act"])?.unwrap_or("silu");
    if activation != "silu" {
        let advice = "; the convolution of linear attention has silu after it";
        return Err(config.unsupported(format!("hidden_act {activation:?}"), advice));
    }
    let conv_width = size("linear_conv_kernel_dim", 4, 1..=8)?;
    let rms_norm_eps = config.rms_norm_eps_or(SIZES.rms_norm_eps)?;
    // GGUF files of Qwen3.5 have them so.
    let value_heads_in_turns = config.is_in_gguf("linear_value_heads_in_turns")?;
    Ok(LinearAttentionConfig { hidden_size, heads, conv_width, rms_norm_eps, value_heads_in_turns })
}

/// Which layers have full attention: those that `layer_types` says, else every `full_attention_interval`-th.
fn is_full(config: &Config, layers: usize) -> Result<Vec<bool>, ConfigError> {
    let is_full: Vec<bool> = if config.has("layer_types") {
        let types = config.strings(&["layer_types"])?;
        if types.len() != layers {
            let expected = format!("a type for each of {layers} layers");
            return Err(config.invalid("layer_types", &expected, types.len()));
        }
        let is_full = |kind: &str| match kind {
            "full_attention" => Ok(true),
            "linear_attention" => Ok(false),
            other => Err(config.unsupported(
                format!("a layer of type {other:?}"),
                "; supported are full_attention and linear_attention",
            )),
        };
        types.into_iter().map(is_full).collect::<Result<_, _>>()?
    } else {
        let interval = config.size_or(&["full_attention_interval"], 4, limits::LAYERS)?;
        (0..layers).map(|layer| (layer + 1).is_multiple_of(interval)).collect()
    };
    match is_full.contains(&true) {
        true => Ok(is_full),
        false => Err(config.unsupported(
            format!("{layers} layers of linear attention"),
            "; at least one layer needs full attention",
        )),
    }
}
