//! Qwen3.5-MoE and Qwen3.6-MoE: Qwen3-Next with four input products, as a text model or as the text part of a model
//! that also sees pictures.

use model_runtime::TensorNames;
use model_runtime::config::{Config, ConfigError};
use moe_engine::ModelFamily;

use crate::hybrid::{self, Defaults, NAMES};
use crate::spec::DecoderSpec;

/// A model that also sees pictures. Only its text part runs; tensors of `model.visual` are left out with a warning.
pub const FAMILY: ModelFamily = ModelFamily {
    model_type: "qwen3_5_moe",
    architecture: "Qwen3_5MoeForConditionalGeneration",
    example: "Qwen/Qwen3.5-35B-A3B",
    parse: |config| Ok(Box::new(read(config)?)),
};

/// The text model alone.
pub const TEXT: ModelFamily = ModelFamily {
    model_type: TEXT_TYPE,
    architecture: "Qwen3_5MoeForCausalLM",
    example: "Qwen/Qwen3.5-35B-A3B",
    parse: |config| Ok(Box::new(read_text(config)?)),
};

const TEXT_TYPE: &str = "qwen3_5_moe_text";

const PART: TensorNames = TensorNames {
    embedding: "model.language_model.embed_tokens",
    layers: "model.language_model.layers",
    norm: "model.language_model.norm",
    ..NAMES
};

/// Reads and validates the config.json of a model that also sees pictures, with the defaults of transformers 5.24. The
/// keys of its `text_config` are read as if they were at the root ([`Config::read`]).
///
/// # Errors
/// Values of another type or out of bounds; layers of an unknown type, or no layer with full attention; expert weights
/// that are not normalised, which this family does not support.
pub fn read(config: &Config) -> Result<DecoderSpec, ConfigError> {
    read_named(config, PART)
}

/// Does the same as [`read`] for a text model.
///
/// # Errors
/// The errors of [`read`].
pub fn read_text(config: &Config) -> Result<DecoderSpec, ConfigError> {
    read_named(config, NAMES)
}

fn read_named(config: &Config, names: TensorNames) -> Result<DecoderSpec, ConfigError> {
    if !config.bool_or(&["norm_topk_prob"], true)? {
        return Err(config.unsupported("norm_topk_prob false", "; the routing of this family has it true"));
    }
    let defaults = Defaults { names, vocab_size: 248320, layers: 40, experts: 256, dense_layers: false };
    hybrid::read(&config.with("model_type", TEXT_TYPE), &defaults)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_part_is_read_as_a_model() {
        let text = r#"{"model_type": "qwen3_5_moe", "tie_word_embeddings": false, "vision_config": {"depth": 2},
            "text_config": {"model_type": "qwen3_5_moe_text", "num_hidden_layers": 4, "hidden_size": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10], "mrope_interleaved": true}}}"#;
        let spec = read(&Config::parse(text, "c").unwrap()).unwrap();
        let decoder = &spec.model.decoder;
        assert_eq!((decoder.num_layers(), decoder.hidden_size, decoder.vocab_size), (4, 64, 248320));
        assert_eq!((decoder.rope[0].theta, decoder.rope[0].dim), (1e7, 64));
        let moe = decoder.moe.as_ref().unwrap();
        assert_eq!((moe.router.num_experts, moe.router.top_k, moe.router.renormalize), (256, 8, true));
        let list = spec.model.layout(&Default::default(), &|_| false).unwrap();
        let has = |name: &str| list.tensors.iter().any(|tensor| tensor.name == name);
        assert!(has("model.language_model.layers.0.linear_attn.in_proj_qkv.weight"));
        assert!(has("model.language_model.layers.3.self_attn.q_proj.weight") && has("lm_head.weight"));
    }
}
