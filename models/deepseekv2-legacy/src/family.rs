//! DeepSeek-V2 as a family of the engine. The binary has no checkpoint of its own.

use candle_nn::VarBuilder;
use model_runtime::{Config, ConfigError, Geometry, GeometryError, TensorLayout};
use moe_engine::{DeviceChoice, Embedded, LoadOptions, LoadedModel, ModelFamily};
use moe_layer::MoePath;
use tracing::warn;

use crate::config::DeepseekV2Config;
use crate::model;

const CPU_ONLY: &str = "DeepSeek-V2 runs on the CPU only so far; leave --device out";

/// The family that `model-deepseekv2-legacy` runs.
pub struct DeepseekV2Family;

impl ModelFamily for DeepseekV2Family {
    type Config = DeepseekV2Config;

    const MODEL_TYPE: &'static str = "deepseek_v2";

    fn refuse(_: &LoadOptions, device: DeviceChoice) -> Option<&'static str> {
        (device != DeviceChoice::Cpu).then_some(CPU_ONLY)
    }

    fn config(config: &Config) -> Result<DeepseekV2Config, ConfigError> {
        DeepseekV2Config::new(config)
    }

    fn layout(
        config: &DeepseekV2Config,
        geometry: &Geometry,
        has: &dyn Fn(&str) -> bool,
    ) -> Result<TensorLayout, GeometryError> {
        model::layout(config, geometry, has)
    }

    fn ignored(config: &DeepseekV2Config) -> &'static [&'static str] {
        match config.decoder.tie_word_embeddings {
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
            candle_core::bail!("{CPU_ONLY}")
        }
        // Once, and not by every rank.
        if options.context.geometry.rank == 0 {
            for option in config.ignored_by_transformers() {
                warn!("config.json: {option} is honoured here, but transformers 5.17 ignores it");
            }
        }
        let (mla, options) = (options.mla.unwrap_or_default(), options.decoder(MoePath::Legacy));
        let (model, selection) = model::load(config, mla, &options, vb)?;
        LoadedModel::new(Box::new(model), options.path, selection)
    }

    fn embedded() -> Option<Embedded> {
        None
    }
}
