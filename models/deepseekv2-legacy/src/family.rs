//! DeepSeek-V2 as a family of the engine. The binary has no checkpoint of its own.

use candle_nn::VarBuilder;
use model_runtime::{Config, ConfigError, TensorSpec};
use moe_engine::{Embedded, LoadOptions, LoadedModel, ModelFamily};
use moe_layer::MoePath;
use tracing::warn;

use crate::config::DeepseekV2Config;
use crate::model::DeepseekV2;
use crate::tensors::tensors;

/// The family that `model-deepseekv2-legacy` runs.
pub struct DeepseekV2Family;

impl ModelFamily for DeepseekV2Family {
    type Config = DeepseekV2Config;

    fn config(config: &Config) -> Result<DeepseekV2Config, ConfigError> {
        DeepseekV2Config::new(config)
    }

    fn tensors(config: &DeepseekV2Config, has: &dyn Fn(&str) -> bool) -> Vec<TensorSpec> {
        tensors(config, has)
    }

    fn ignored(config: &DeepseekV2Config) -> &'static [&'static str] {
        match config.tie_word_embeddings {
            // Some exporters write the tied weight twice.
            true => &["*.rotary_emb.inv_freq", "lm_head.weight"],
            false => &["*.rotary_emb.inv_freq"],
        }
    }

    fn load(
        config: &DeepseekV2Config,
        options: &LoadOptions,
        vb: VarBuilder,
    ) -> candle_core::Result<LoadedModel> {
        if !vb.device().is_cpu() {
            candle_core::bail!("DeepSeek-V2 runs on the CPU only so far; leave --device out")
        }
        options.expect_one_rank()?;
        for option in config.ignored_by_transformers() {
            warn!("config.json: {option} is honoured here, but transformers 5.17 ignores it");
        }
        let path = options.moe_path.unwrap_or(MoePath::Legacy);
        let mla = options.mla.unwrap_or_default();
        let (model, selection) = DeepseekV2::load(config, path, mla, options.backend.as_deref(), vb)?;
        LoadedModel::new(Box::new(model), path, selection)
    }

    fn embedded() -> Option<Embedded> {
        None
    }
}
