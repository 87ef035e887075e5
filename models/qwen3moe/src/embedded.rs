//! Qwen3-MoE as a family of the engine, and the checkpoint inside the binary: a small model
//! trained on Shakespeare by tests/reference/train_tiny.py, so that the program does something
//! real before anything is downloaded.

use candle_nn::VarBuilder;
use model_runtime::{Config, ConfigError, Geometry, GeometryError, TensorSlice, TensorSpec};
use moe_engine::{Embedded, LoadOptions, LoadedModel, ModelFamily};

use crate::config::Qwen3MoeConfig;
use crate::model::Qwen3Moe;

/// The family that `model-qwen3moe` runs.
pub struct Qwen3MoeFamily;

impl ModelFamily for Qwen3MoeFamily {
    type Config = Qwen3MoeConfig;

    fn config(config: &Config) -> Result<Qwen3MoeConfig, ConfigError> {
        Qwen3MoeConfig::new(config)
    }

    fn tensors(config: &Qwen3MoeConfig, has: &dyn Fn(&str) -> bool) -> Vec<TensorSpec> {
        config.tensors(|layer| has(&format!("model.layers.{layer}.mlp.experts.gate_up_proj")))
    }

    fn ignored(config: &Qwen3MoeConfig) -> &'static [&'static str] {
        match config.tie_word_embeddings {
            // Some exporters write the tied weight twice.
            true => &["*.rotary_emb.inv_freq", "lm_head.weight"],
            false => &["*.rotary_emb.inv_freq"],
        }
    }

    fn load(
        config: &Qwen3MoeConfig,
        backend: Option<&str>,
        vb: VarBuilder,
    ) -> candle_core::Result<LoadedModel> {
        let options = LoadOptions { backend: backend.map(str::to_string), ..LoadOptions::default() };
        Self::load_on(config, &options, vb)
    }

    fn load_on(
        config: &Qwen3MoeConfig,
        options: &LoadOptions,
        vb: VarBuilder,
    ) -> candle_core::Result<LoadedModel> {
        let model = Qwen3Moe::load_on(config, options.backend.as_deref(), &options.context, vb)?;
        let explained = serde_json::to_value(model.backend()).map_err(candle_core::Error::wrap)?;
        Ok(LoadedModel { model: Box::new(model), backend: explained })
    }

    fn slices(
        config: &Qwen3MoeConfig,
        geometry: &Geometry,
        has: &dyn Fn(&str) -> bool,
    ) -> Result<Vec<TensorSlice>, GeometryError> {
        config.slices(geometry, |layer| has(&format!("model.layers.{layer}.mlp.experts.gate_up_proj")))
    }

    fn embedded() -> Option<Embedded> {
        Some(Embedded {
            weights: include_bytes!("../checkpoint/model.safetensors"),
            config: include_str!("../checkpoint/config.json"),
            generation_config: include_str!("../checkpoint/generation_config.json"),
            tokenizer: include_bytes!("../checkpoint/tokenizer.json"),
            prompt: "First Citizen:\n",
        })
    }
}
