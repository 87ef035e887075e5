//! gpt-oss: attention sinks, a window in every other layer, and experts with biases and a clamped SwiGLU, whose packs
//! are stored by columns.

use model_runtime::config::{Config, ConfigError, RopeConfig, limits};
use model_runtime::{
    AttentionConfig, DecoderConfig, MixerConfig, MlpNames, MoeConfig, PackOrder, TensorNames,
};
use moe_engine::ModelFamily;
use moe_layer::Activation;

use crate::fixed_keys::check_softmax_routing;
use crate::grouped_query::{Sizes, attention, sliding_layers};
use crate::spec::DecoderSpec;

/// gpt-oss-20b and 120b.
pub const FAMILY: ModelFamily = ModelFamily {
    model_type: "gpt_oss",
    architecture: "GptOssForCausalLM",
    example: "openai/gpt-oss-20b",
    parse: |config| Ok(Box::new(read(config)?)),
};

const NO_MLA: &str = "`mla`: gpt-oss has no multi-head latent attention; leave it out";

const NAMES: TensorNames = TensorNames {
    gate: "router",
    matrices: MlpNames { pack_order: PackOrder::Columns { in_turns: true }, ..MlpNames::USUAL },
    ..TensorNames::USUAL
};

/// The defaults are the values of gpt-oss-120b.
const SIZES: Sizes = Sizes { hidden_size: 2880, num_heads: 64, num_kv_heads: Some(8), rms_norm_eps: 1e-5 };

/// The default of `head_dim`.
const HEAD_DIM: usize = 64;

/// The base of the rotary frequencies if a config has none.
const DEFAULT_THETA: f64 = 150_000.0;

/// The rotary embedding if a config does not describe it.
const DEFAULT_ROPE: &str = r#"{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false,
    "original_max_position_embeddings": 4096}"#;

/// Reads and validates a config.json, with the defaults of transformers 5.24.
///
/// # Errors
/// Values of another type or out of bounds; options that transformers' code does not support.
pub fn read(config: &Config) -> Result<DecoderSpec, ConfigError> {
    config.quantisation()?;
    refuse_options(config)?;
    let config = &with_defaults(config)?;
    let bias = config.bool_or(&["attention_bias"], true)?;
    let attention =
        AttentionConfig { qkv_bias: bias, o_bias: bias, sinks: true, ..attention(config, &SIZES)? };
    let positions = config.size_or(&["max_position_embeddings"], 131_072, limits::POSITIONS)?;
    let rope = RopeConfig::from_config(config, attention.head_dim, positions)?;
    config.size_or(&["num_local_experts", "num_experts"], 128, limits::EXPERTS)?;
    let intermediate_size = config.size_or(&["intermediate_size"], 2880, limits::WIDTH)?;
    let layers = config.size_or(&["num_hidden_layers"], 36, limits::LAYERS)?;
    let layer_attention = layer_attention(config, &attention, layers)?;
    let moe = MoeConfig { expert_bias: true, ..MoeConfig::new(config.router()?, intermediate_size) };
    let decoder = DecoderConfig {
        names: NAMES,
        vocab_size: config.size_or(&["vocab_size"], 201_088, limits::VOCAB)?,
        hidden_size: attention.hidden_size,
        intermediate_size,
        activation: clamped_swiglu(config)?,
        rms_norm_eps: attention.rms_norm_eps,
        tie_word_embeddings: config.bool_or(&["tie_word_embeddings"], false)?,
        rope: vec![rope; layers],
        moe: Some(moe),
        is_sparse: vec![true; layers],
        ..DecoderConfig::default()
    };
    let mixers = layer_attention.into_iter().map(MixerConfig::Attention).collect();
    DecoderSpec::of_layers(config, decoder, mixers, NO_MLA)
}

/// The config with the defaults that differ from the defaults of other families.
fn with_defaults(config: &Config) -> Result<Config, ConfigError> {
    let mut config = config.clone();
    if !config.has("head_dim") {
        config = config.with("head_dim", HEAD_DIM);
    }
    // An empty object also counts as a description. It means rotation without scaling.
    if RopeConfig::section(&config)?.is_none() && !config.has("rope_parameters") {
        let rope = Config::parse(DEFAULT_ROPE, "the rotary embedding of gpt-oss")?;
        config = config.with("rope_parameters", rope.object().clone());
    }
    if !config.has("rope_theta") {
        config = config.with("rope_theta", DEFAULT_THETA);
    }
    Ok(config)
}

/// Returns the attention of each layer. The layers with a window are listed; without a list they are every other one,
/// from the first one on.
fn layer_attention(
    config: &Config,
    attention: &AttentionConfig,
    layers: usize,
) -> Result<Vec<AttentionConfig>, ConfigError> {
    let in_turns = || (0..layers).map(|layer| layer % 2 == 0).collect();
    let sliding = sliding_layers(config, layers)?.unwrap_or_else(in_turns);
    let window = match config.object().contains_key("sliding_window") {
        true => config.opt_size(&["sliding_window"], limits::POSITIONS)?,
        false => Some(128),
    };
    if window.is_none() && sliding.contains(&true) {
        let advice = "; give the window, or make all of layer_types full_attention";
        return Err(config.unsupported("sliding_window null with layers of sliding_attention", advice));
    }
    let layer = |is_sliding: bool| AttentionConfig {
        sliding_window: window.filter(|_| is_sliding),
        ..attention.clone()
    };
    Ok(sliding.into_iter().map(layer).collect())
}

/// Returns the activation of the experts. `hidden_act` has no effect, because transformers' code does not read it.
fn clamped_swiglu(config: &Config) -> Result<Activation, ConfigError> {
    let alpha = config.float_or(&["swiglu_alpha"], 1.702)?;
    let limit = config.positive_float_or(&["swiglu_limit"], 7.0)?;
    Ok(Activation::SwiGluOai { alpha: alpha as f32, limit: limit as f32 })
}

/// Refuses options that transformers' code of the family does not read, if they require something else.
fn refuse_options(config: &Config) -> Result<(), ConfigError> {
    check_softmax_routing(config)?;
    if !config.bool_or(&["norm_topk_prob"], true)? {
        let advice = "; the softmax of gpt-oss's router is over the chosen experts alone";
        return Err(config.unsupported("norm_topk_prob false", advice));
    }
    match config.opt_string(&["hidden_act"])?.unwrap_or("silu") {
        "silu" | "swish" => Ok(()),
        other => Err(config.unsupported(
            format!("hidden_act {other:?}"),
            "; the experts of gpt-oss have a clamped SwiGLU, which its configs call silu",
        )),
    }
}

#[cfg(test)]
mod tests {
    use model_runtime::config::RopeScaling;

    use super::*;

    fn parse(fields: &str) -> Result<DecoderSpec, String> {
        let text = format!(r#"{{"model_type": "gpt_oss"{fields}}}"#);
        read(&Config::parse(&text, "c").unwrap()).map_err(|e| e.to_string())
    }

    #[test]
    fn an_empty_config_is_gpt_oss_120b() {
        let spec = parse("").unwrap();
        let decoder = &spec.model.decoder;
        let attention: Vec<_> = spec.model.attention_layers().collect();
        assert_eq!((attention[0].num_heads, attention[0].num_kv_heads, attention[0].head_dim), (64, 8, 64));
        assert_eq!((attention[0].sliding_window, attention[1].sliding_window), (Some(128), None));
        assert!(attention.iter().all(|layer| layer.sinks && layer.qkv_bias && layer.o_bias));
        assert_eq!((attention.len(), decoder.hidden_size, decoder.vocab_size), (36, 2880, 201_088));
        assert_eq!(decoder.activation, Activation::SwiGluOai { alpha: 1.702, limit: 7.0 });
        let moe = decoder.moe.as_ref().unwrap();
        assert_eq!((moe.router.num_experts, moe.router.top_k, moe.intermediate_size), (128, 4, 2880));
        assert!(moe.expert_bias && moe.router.gate_bias);
        let rope = &decoder.rope[0];
        assert_eq!((rope.theta, rope.max_context_len()), (150_000.0, 131_072));
        let RopeScaling::Yarn(yarn) = &rope.scaling else { panic!("{:?}", rope.scaling) };
        assert_eq!((yarn.factor, yarn.beta_fast, yarn.beta_slow, yarn.truncate), (32.0, 32.0, 1.0, false));
        assert_eq!(yarn.original_max_position_embeddings, 4096);
    }

    #[test]
    fn what_a_config_says_wins() {
        let text = r#", "layer_types": ["full_attention", "sliding_attention"], "num_hidden_layers": 2, "sliding_window": 9,
            "attention_bias": false, "swiglu_alpha": 1.5, "swiglu_limit": 3, "rope_theta": 5e4,
            "rope_scaling": {"rope_type": "linear", "factor": 2}"#;
        let spec = parse(text).unwrap();
        let windows: Vec<_> = spec.model.attention_layers().map(|layer| layer.sliding_window).collect();
        assert_eq!(windows, [None, Some(9)]);
        assert!(!spec.model.attention(0).unwrap().qkv_bias && !spec.model.attention(0).unwrap().o_bias);
        let decoder = &spec.model.decoder;
        assert_eq!(decoder.activation, Activation::SwiGluOai { alpha: 1.5, limit: 3.0 });
        assert_eq!(
            (decoder.rope[0].theta, &decoder.rope[0].scaling),
            (5e4, &RopeScaling::Linear { factor: 2.0 })
        );
        let theta = parse(r#", "rope_theta": 7e4"#).unwrap().model.decoder.rope[0].clone();
        assert!(matches!(theta.scaling, RopeScaling::Yarn(_)) && theta.theta == 7e4);
    }

    #[test]
    fn what_is_not_supported_is_refused_by_name() {
        for (fields, said) in [
            (r#", "norm_topk_prob": false"#, "norm_topk_prob false is not supported"),
            (r#", "hidden_act": "gelu""#, "hidden_act \"gelu\" is not supported"),
            (r#", "swiglu_limit": 0"#, "`swiglu_limit`"),
            (r#", "sliding_window": null"#, "sliding_window null with layers of sliding_attention"),
            (r#", "layer_types": ["full_attention"]"#, "a type for each of 36 layers"),
            (r#", "layer_types": ["chunked_attention"], "num_hidden_layers": 1"#, "a layer of type"),
            (r#", "scoring_func": "sigmoid""#, "scoring_func \"sigmoid\" is not supported"),
        ] {
            let error = parse(fields).unwrap_err();
            assert!(error.contains(said), "{error}");
        }
    }
}
