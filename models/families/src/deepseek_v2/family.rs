//! DeepSeek-V2 as a family of the engine.

use candle_core::{DType, Device};
use candle_nn::VarBuilder;
use model_runtime::{DecoderConfig, Geometry, GeometryError, KvLayout, MlaForm, TensorLayout};
use moe_engine::{AttentionSpec, DeviceChoice, LoadOptions, LoadedModel, ModelFamily, ModelSpec};
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

/// DeepSeek-V2 and V2-Lite.
pub const FAMILY: ModelFamily = ModelFamily {
    model_type: "deepseek_v2",
    architecture: "DeepseekV2ForCausalLM",
    example: "deepseek-ai/DeepSeek-V2-Lite",
    parse: |config| Ok(Box::new(DeepseekV2Config::new(config)?)),
};

impl ModelSpec for DeepseekV2Config {
    fn decoder(&self) -> &DecoderConfig {
        &self.decoder
    }

    fn attention(&self) -> AttentionSpec<'_> {
        AttentionSpec::Latent(&self.attention)
    }

    fn refuse(&self, options: &LoadOptions, device: DeviceChoice) -> Option<&'static str> {
        let several = options.context.geometry.world_size > 1 && device != DeviceChoice::Cpu;
        (several && options.moe_path == Some(MoePath::Legacy)).then_some(LOOP_OVER_GPUS)
    }

    fn layout(&self, geometry: &Geometry, has: &dyn Fn(&str) -> bool) -> Result<TensorLayout, GeometryError> {
        model::layout(self, geometry, has)
    }

    fn kv_layout(
        &self,
        geometry: &Geometry,
        mla: Option<MlaForm>,
        dtype: DType,
    ) -> Result<KvLayout, GeometryError> {
        model::kv_layout(self, geometry, mla.unwrap_or_default(), dtype)
    }

    fn load(&self, options: &LoadOptions, vb: VarBuilder) -> candle_core::Result<LoadedModel> {
        // Once, and not by every rank.
        if options.context.geometry.rank == 0 {
            for option in self.ignored_by_transformers() {
                warn!("config.json: {option} is honoured here, but transformers 5.17 ignores it");
            }
        }
        let mla = options.mla.unwrap_or_default();
        let options = options.decoder(default_path(vb.device()));
        let (model, selection) = model::load(self, mla, &options, vb)?;
        LoadedModel::new(Box::new(model), options.path, selection)
    }
}
