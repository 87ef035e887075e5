//! GLM-4.7-Flash: the latent attention of DeepSeek-V3 with GLM's routing.

use model_runtime::config::{Config, ConfigError, limits};
use model_runtime::{DecoderConfig, MoeConfig, TensorNames};
use moe_engine::ModelFamily;

use crate::fixed_keys::check_noaux_routing;
use crate::latent::LatentSpec;
use crate::latent_config::{Sizes, attention, check_interleaved, rope};

/// GLM-4.7-Flash.
pub const FAMILY: ModelFamily = ModelFamily {
    model_type: "glm4_moe_lite",
    architecture: "Glm4MoeLiteForCausalLM",
    example: "zai-org/GLM-4.7-Flash",
    parse: |config| Ok(Box::new(read(config)?)),
};

const SIZES: Sizes = Sizes {
    hidden_size: 2048,
    num_heads: 20,
    q_lora_rank: 768,
    qk_nope_head_dim: 192,
    v_head_dim: 256,
    max_position_embeddings: 202752,
};

/// Reads and validates a config, with the defaults of transformers 5.17.
///
/// # Errors
/// Values of another type or out of bounds; another routing than GLM's; layers of an unknown type.
pub fn read(config: &Config) -> Result<LatentSpec, ConfigError> {
    config.quantisation()?;
    check_noaux_routing(config)?;
    check_interleaved(config)?;
    // transformers also uses this name for these dimensions.
    let config = &match config.has("head_dim") {
        true => {
            config.with("qk_rope_head_dim", config.size(&["qk_rope_head_dim", "head_dim"], limits::HEAD_DIM)?)
        }
        false => config.clone(),
    };
    let width = |key: &str, default| config.size_or(&[key], default, limits::WIDTH);
    let rope = rope(config, &SIZES)?;
    let attention = attention(config, &rope, &SIZES)?;
    config.size_or(&["n_routed_experts", "num_experts", "num_local_experts"], 64, limits::EXPERTS)?;
    let intermediate_size = width("moe_intermediate_size", 1536)?;
    let shared = config.size_or(&["n_shared_experts"], 1, 0..=*limits::EXPERTS.end())?;
    let is_sparse = sparse_layers(config)?;
    let decoder = DecoderConfig {
        names: TensorNames { shared_experts: Some("shared_experts"), ..TensorNames::USUAL },
        vocab_size: config.size_or(&["vocab_size"], 154880, limits::VOCAB)?,
        hidden_size: attention.hidden_size,
        intermediate_size: width("intermediate_size", 10240)?,
        activation: config.activation()?,
        rms_norm_eps: config.rms_norm_eps_or(1e-5)?,
        tie_word_embeddings: config.bool_or(&["tie_word_embeddings"], false)?,
        rope: vec![rope; is_sparse.len()],
        moe: Some(MoeConfig {
            shared_intermediate_size: shared * intermediate_size,
            ..MoeConfig::new(config.router()?, intermediate_size)
        }),
        is_sparse,
        ..DecoderConfig::default()
    };
    LatentSpec::new(config, decoder, attention)
}

/// Returns which layers have experts: the layers that `mlp_layer_types` calls sparse, or else all but the first.
/// transformers does not read `first_k_dense_replace` here, so another number of dense layers needs the list.
fn sparse_layers(config: &Config) -> Result<Vec<bool>, ConfigError> {
    let layers = config.size_or(&["num_hidden_layers"], 47, limits::LAYERS)?;
    if !config.has("mlp_layer_types") {
        let dense = config.size_or(&["first_k_dense_replace"], 1, 0..=*limits::LAYERS.end())?;
        return match dense {
            1 => Ok((0..layers).map(|layer| layer >= 1).collect()),
            _ => Err(config.unsupported(
                format!("first_k_dense_replace {dense}"),
                "; the first layer is dense, or those that mlp_layer_types names",
            )),
        };
    }
    let types = config.strings(&["mlp_layer_types"])?;
    if types.len() != layers {
        let expected = format!("a type for each of {layers} layers");
        return Err(config.invalid("mlp_layer_types", &expected, types.len()));
    }
    let is_sparse = |kind: &str| match kind {
        "sparse" => Ok(true),
        "dense" => Ok(false),
        other => Err(config
            .unsupported(format!("an MLP of type {other:?}"), "; mlp_layer_types may hold sparse and dense")),
    };
    types.into_iter().map(is_sparse).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(fields: &str) -> Result<LatentSpec, String> {
        let text = format!(r#"{{"model_type": "glm4_moe_lite"{fields}}}"#);
        read(&Config::parse(&text, "c").unwrap()).map_err(|e| e.to_string())
    }

    #[test]
    fn an_empty_config_is_glm_4_7_flash() {
        let spec = parse("").unwrap();
        let decoder = &spec.decoder;
        let attention = &spec.attention;
        assert_eq!(
            (attention.num_heads, attention.q_lora_rank, attention.kv_lora_rank),
            (20, Some(768), 512)
        );
        assert_eq!(
            (attention.qk_nope_head_dim, attention.qk_rope_head_dim, attention.v_head_dim),
            (192, 64, 256)
        );
        assert_eq!((attention.norm_eps, decoder.rms_norm_eps), (1e-6, 1e-5));
        let moe = decoder.moe.as_ref().unwrap();
        assert_eq!((moe.router.num_experts, moe.router.top_k, moe.shared_intermediate_size), (64, 4, 1536));
        assert_eq!((moe.router.routed_scaling_factor, moe.router.scoring.name()), (1.8, "sigmoid"));
        assert!(moe.router.correction_bias && moe.router.renormalize);
        assert!(!decoder.is_sparse[0] && decoder.is_sparse[1..] == [true; 46]);
    }

    #[test]
    fn layers_and_rotated_dimensions_go_by_either_name() {
        let types = r#", "num_hidden_layers": 3, "mlp_layer_types": ["sparse", "dense", "sparse"]"#;
        assert_eq!(parse(types).unwrap().decoder.is_sparse, [true, false, true]);
        assert_eq!(parse(r#", "head_dim": 32"#).unwrap().attention.qk_rope_head_dim, 32);
    }

    #[test]
    fn what_is_not_supported_is_refused_by_name() {
        for (fields, said) in [
            (r#", "scoring_func": "softmax""#, "scoring_func \"softmax\" is not supported"),
            (r#", "first_k_dense_replace": 2"#, "first_k_dense_replace 2 is not supported"),
            (r#", "num_hidden_layers": 1, "mlp_layer_types": ["moe"]"#, "an MLP of type \"moe\""),
            (
                r#", "mlp_layer_types": ["dense"]"#,
                "`mlp_layer_types`: expected a type for each of 47 layers, got 1",
            ),
            (r#", "partial_rotary_factor": 0.5"#, "partial_rotary_factor 0.5 is not supported"),
            (r#", "rope_interleave": false"#, "rope_interleave false is not supported"),
            (r#", "head_dim": 32, "qk_rope_head_dim": 64"#, "head_dim"),
        ] {
            let error = parse(fields).unwrap_err();
            assert!(error.contains(said), "{error}");
        }
    }
}
