//! Qwen3-MoE as a family of the engine, and the checkpoint inside the binary: a small model
//! trained on Shakespeare by tests/reference/train_tiny.py, so that the program does something
//! real before anything is downloaded.

use candle_core::DType;
use candle_nn::VarBuilder;
use model_runtime::{Config, ConfigError, Geometry, GeometryError, KvLayout, MlaForm, TensorLayout};
use moe_engine::{DeviceChoice, Embedded, EmbeddedChat, LoadOptions, LoadedModel, ModelFamily};
use moe_layer::MoePath;

use super::config::Qwen3MoeConfig;
use super::model;

const NO_MLA: &str = "--mla: Qwen3-MoE has no multi-head latent attention; leave the flag out";

/// The family that `model-qwen3moe` runs.
pub struct Qwen3MoeFamily;

impl ModelFamily for Qwen3MoeFamily {
    type Config = Qwen3MoeConfig;

    const MODEL_TYPE: &'static str = "qwen3_moe";
    const EXAMPLE: &'static str = "Qwen/Qwen3-30B-A3B";

    fn refuse(options: &LoadOptions, _: DeviceChoice) -> Option<&'static str> {
        options.mla.map(|_| NO_MLA)
    }

    fn config(config: &Config) -> Result<Qwen3MoeConfig, ConfigError> {
        Qwen3MoeConfig::new(config)
    }

    fn layout(
        config: &Qwen3MoeConfig,
        geometry: &Geometry,
        has: &dyn Fn(&str) -> bool,
    ) -> Result<TensorLayout, GeometryError> {
        model::layout(config, geometry, has)
    }

    fn kv_layout(
        config: &Qwen3MoeConfig,
        geometry: &Geometry,
        _: Option<MlaForm>,
        dtype: DType,
    ) -> Result<KvLayout, GeometryError> {
        model::kv_layout(config, geometry, dtype)
    }

    fn ignored(config: &Qwen3MoeConfig) -> &'static [&'static str] {
        config.decoder.ignored()
    }

    fn load(
        config: &Qwen3MoeConfig,
        options: &LoadOptions,
        vb: VarBuilder,
    ) -> candle_core::Result<LoadedModel> {
        if options.mla.is_some() {
            candle_core::bail!("{NO_MLA}")
        }
        let options = options.decoder(MoePath::Fused);
        let (model, selection) = model::load(config, &options, vb)?;
        LoadedModel::new(Box::new(model), options.path, selection)
    }

    fn embedded() -> Option<Embedded> {
        Some(Embedded {
            weights: include_bytes!("../../checkpoint/model.safetensors"),
            config: include_str!("../../checkpoint/config.json"),
            generation_config: include_str!("../../checkpoint/generation_config.json"),
            tokenizer: include_bytes!("../../checkpoint/tokenizer.json"),
            prompt: "First Citizen:\n",
            // It was trained on plays, in which a blank line ends what somebody says.
            chat: Some(EmbeddedChat { template: include_str!("../../checkpoint/play.jinja"), stop: "\n\n" }),
        })
    }
}
