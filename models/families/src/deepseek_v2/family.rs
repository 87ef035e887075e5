//! DeepSeek-V2 as a family of the engine. The binary has no checkpoint of its own.

use candle_core::{DType, Device};
use candle_nn::VarBuilder;
use model_runtime::{Config, ConfigError, Geometry, GeometryError, KvLayout, MlaForm, TensorLayout};
use moe_engine::{DeviceChoice, Embedded, LoadOptions, LoadedModel, ModelFamily};
use moe_layer::MoePath;
use tracing::warn;

use super::config::DeepseekV2Config;
use super::model;

const LOOP_OVER_GPUS: &str = "--moe-path legacy runs on one GPU, not on several; leave --tp and --dp out with --device cuda, or choose fused";

/// The path of experts that runs where none is asked for: the loop on the CPU, where it is the reference; on a GPU the loop
/// would wait for the device in every layer.
fn default_path(device: &Device) -> MoePath {
    if device.is_cpu() { MoePath::Legacy } else { MoePath::Fused }
}

/// The family that `model-deepseekv2-legacy` runs.
pub struct DeepseekV2Family;

impl ModelFamily for DeepseekV2Family {
    type Config = DeepseekV2Config;

    const MODEL_TYPE: &'static str = "deepseek_v2";
    const EXAMPLE: &'static str = "deepseek-ai/DeepSeek-V2-Lite";

    fn refuse(options: &LoadOptions, device: DeviceChoice) -> Option<&'static str> {
        let several = options.context.geometry.world_size > 1 && device != DeviceChoice::Cpu;
        (several && options.moe_path == Some(MoePath::Legacy)).then_some(LOOP_OVER_GPUS)
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

    fn kv_layout(
        config: &DeepseekV2Config,
        geometry: &Geometry,
        mla: Option<MlaForm>,
        dtype: DType,
    ) -> Result<KvLayout, GeometryError> {
        model::kv_layout(config, geometry, mla.unwrap_or_default(), dtype)
    }

    fn ignored(config: &DeepseekV2Config) -> &'static [&'static str] {
        config.decoder.ignored()
    }

    fn load(
        config: &DeepseekV2Config,
        options: &LoadOptions,
        vb: VarBuilder,
    ) -> candle_core::Result<LoadedModel> {
        // Once, and not by every rank.
        if options.context.geometry.rank == 0 {
            for option in config.ignored_by_transformers() {
                warn!("config.json: {option} is honoured here, but transformers 5.17 ignores it");
            }
        }
        let (mla, options) = (options.mla.unwrap_or_default(), options.decoder(default_path(vb.device())));
        let (model, selection) = model::load(config, mla, &options, vb)?;
        LoadedModel::new(Box::new(model), options.path, selection)
    }

    fn embedded() -> Option<Embedded> {
        None
    }
}
