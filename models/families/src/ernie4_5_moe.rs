//! ERNIE 4.5: softmax scores with a correction bias, shared experts, experts in some of the layers, and rotary
//! embedding that rotates neighbouring dimensions of a head together.

use model_runtime::config::{Config, ConfigError, RopeConfig, limits};
use model_runtime::{
    AttentionConfig, CorrectionBiasNames, DecoderConfig, MoeConfig, RotatedPairs, TensorNames,
};
use moe_engine::ModelFamily;

use crate::fixed_keys::{check_biased_routing, check_no_window};
use crate::grouped_query::{Sizes, attention};
use crate::spec::DecoderSpec;

/// ERNIE 4.5 with experts, for text only.
pub const FAMILY: ModelFamily = ModelFamily {
    model_type: "ernie4_5_moe",
    architecture: "Ernie4_5_MoeForCausalLM",
    example: "baidu/ERNIE-4.5-21B-A3B-PT",
    parse: |config| Ok(Box::new(read(config)?)),
};

const NO_MLA: &str = "`mla`: ERNIE 4.5 has no multi-head latent attention; leave it out";

const NAMES: TensorNames = TensorNames {
    shared_experts: Some("shared_experts"),
    correction_bias: CorrectionBiasNames {
        published: "moe_statics.e_score_correction_bias",
        packed: "gate.moe_statics.e_score_correction_bias",
        is_row: true,
    },
    ..TensorNames::USUAL
};

const SIZES: Sizes = Sizes { hidden_size: 2560, num_heads: 20, num_kv_heads: Some(4), rms_norm_eps: 1e-5 };

/// The base of the rotary frequencies if a config has none.
const DEFAULT_THETA: f64 = 5e5;

/// `moe_norm_min`. It is far below every sum of scores that a softmax gives to the chosen experts, so it has no effect.
const NORM_MIN: f64 = 1e-12;

/// Reads and validates a config, with the defaults of transformers 5.17.
///
/// # Errors
/// Values of another type or out of bounds; biases; a lower bound of the sum of weights that could have an effect.
pub fn read(config: &Config) -> Result<DecoderSpec, ConfigError> {
    config.quantisation()?;
    if config.bool_or(&["use_bias"], false)? {
        return Err(config.unsupported("use_bias true", "; attention and MLPs without biases are supported"));
    }
    check_biased_routing(config, "softmax")?;
    check_no_window(config)?;
    let norm_min = config.float_or(&["moe_norm_min"], NORM_MIN)?;
    if norm_min > NORM_MIN {
        let advice =
            format!("; the weights of the chosen experts are divided by their sum, as with {NORM_MIN:e}");
        return Err(config.unsupported(format!("moe_norm_min {norm_min}"), &advice));
    }
    let width = |key: &str, default| config.size_or(&[key], default, limits::WIDTH);
    let attention = AttentionConfig { rotated_pairs: RotatedPairs::Neighbours, ..attention(config, &SIZES)? };
    let positions = config.size_or(&["max_position_embeddings"], 131072, limits::POSITIONS)?;
    let rope = match config.has("rope_theta") {
        false => {
            RopeConfig::from_config(&config.with("rope_theta", DEFAULT_THETA), attention.head_dim, positions)?
        }
        true => RopeConfig::from_config(config, attention.head_dim, positions)?,
    };
    config.size_or(&["moe_num_experts", "num_experts"], 64, limits::EXPERTS)?;
    let intermediate_size = width("moe_intermediate_size", 1536)?;
    let shared = config.size_or(&["moe_num_shared_experts"], 2, 0..=*limits::EXPERTS.end())?;
    let is_sparse = sparse_layers(config)?;
    let decoder = DecoderConfig {
        names: NAMES,
        vocab_size: config.size_or(&["vocab_size"], 103424, limits::VOCAB)?,
        hidden_size: attention.hidden_size,
        intermediate_size: width("intermediate_size", 12288)?,
        activation: config.activation()?,
        rms_norm_eps: attention.rms_norm_eps,
        tie_word_embeddings: config.bool_or(&["tie_word_embeddings"], true)?,
        rope: vec![rope; is_sparse.len()],
        moe: Some(MoeConfig {
            shared_intermediate_size: shared * intermediate_size,
            ..MoeConfig::new(config.router()?, intermediate_size)
        }),
        is_sparse,
        ..DecoderConfig::default()
    };
    DecoderSpec::new(config, decoder, attention, NO_MLA)
}

/// Returns which layers have experts: from `moe_layer_start_index` to `moe_layer_end_index` (-1 is the last layer), the
/// last of every `moe_layer_interval` layers.
fn sparse_layers(config: &Config) -> Result<Vec<bool>, ConfigError> {
    let layers = config.size_or(&["num_hidden_layers"], 28, limits::LAYERS)?;
    let index = 0..=*limits::LAYERS.end();
    let first = config.size_or(&["moe_layer_start_index"], 1, index.clone())?;
    let interval = config.size_or(&["moe_layer_interval"], 1, limits::LAYERS)?;
    let is_last = config.object().get("moe_layer_end_index").is_some_and(|end| end.as_i64() == Some(-1));
    let last = match is_last {
        true => layers - 1,
        false => config.size_or(&["moe_layer_end_index"], layers - 1, index)?,
    };
    Ok((0..layers)
        .map(|layer| (layer + 1).is_multiple_of(interval) && (first..=last).contains(&layer))
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(fields: &str) -> Result<DecoderSpec, String> {
        let text = format!(r#"{{"model_type": "ernie4_5_moe"{fields}}}"#);
        read(&Config::parse(&text, "c").unwrap()).map_err(|e| e.to_string())
    }

    #[test]
    fn an_empty_config_is_ernie_4_5_21b() {
        let spec = parse("").unwrap();
        let decoder = &spec.model.decoder;
        let attention = spec.model.attention(27).unwrap();
        assert_eq!((attention.num_heads, attention.num_kv_heads, attention.head_dim), (20, 4, 128));
        assert_eq!((attention.rotated_pairs, attention.rotary_dim), (RotatedPairs::Neighbours, 128));
        let moe = decoder.moe.as_ref().unwrap();
        assert_eq!((moe.router.num_experts, moe.router.top_k, moe.shared_intermediate_size), (64, 6, 3072));
        assert_eq!((moe.router.scoring.name(), moe.router.renormalize), ("softmax", true));
        assert!(moe.router.correction_bias && decoder.tie_word_embeddings);
        assert!(!decoder.is_sparse[0] && decoder.is_sparse[1..] == [true; 27]);
        assert_eq!((decoder.rope[0].theta, decoder.vocab_size), (5e5, 103424));
    }

    #[test]
    fn experts_are_in_an_interval_of_the_layers() {
        let sparse = |fields: &str| {
            let fields = format!(r#", "num_hidden_layers": 6{fields}"#);
            let is_sparse = parse(&fields).unwrap().model.decoder.is_sparse;
            (0..6).filter(|layer| is_sparse[*layer]).collect::<Vec<_>>()
        };
        assert_eq!(sparse(r#", "moe_layer_end_index": -1"#), [1, 2, 3, 4, 5]);
        assert_eq!(sparse(r#", "moe_layer_interval": 2"#), [1, 3, 5]);
        assert_eq!(sparse(r#", "moe_layer_start_index": 2, "moe_layer_end_index": 4"#), [2, 3, 4]);
        assert_eq!(sparse(r#", "moe_layer_start_index": 5, "moe_layer_end_index": 3"#), [0; 0]);
    }

    #[test]
    fn what_is_not_supported_is_refused_by_name() {
        for (fields, said) in [
            (r#", "use_bias": true"#, "use_bias true is not supported"),
            (r#", "moe_norm_min": 0.5"#, "moe_norm_min 0.5 is not supported"),
            (r#", "moe_layer_end_index": -2"#, "`moe_layer_end_index`"),
            (r#", "partial_rotary_factor": 0.5"#, "partial_rotary_factor 0.5 is not supported"),
        ] {
            let error = parse(fields).unwrap_err();
            assert!(error.contains(said), "{error}");
        }
    }
}
