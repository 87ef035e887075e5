//! Qwen3-MoE as a family of the engine.

use candle_core::DType;
use candle_nn::VarBuilder;
use model_runtime::{DecoderConfig, Geometry, GeometryError, KvLayout, MlaForm, TensorLayout};
use moe_engine::{AttentionSpec, DeviceChoice, LoadOptions, LoadedModel, ModelFamily, ModelSpec};
use moe_layer::MoePath;

use super::config::Qwen3MoeConfig;
use super::model;

const NO_MLA: &str = "--mla: Qwen3-MoE has no multi-head latent attention; leave the flag out";

/// Qwen3-MoE.
pub const FAMILY: ModelFamily = ModelFamily {
    model_type: "qwen3_moe",
    architecture: "Qwen3MoeForCausalLM",
    example: "Qwen/Qwen3-30B-A3B",
    parse: |config| Ok(Box::new(Qwen3MoeConfig::new(config)?)),
};

impl ModelSpec for Qwen3MoeConfig {
    fn decoder(&self) -> &DecoderConfig {
        &self.decoder
    }

    fn attention(&self) -> AttentionSpec<'_> {
        AttentionSpec::GroupedQuery(&self.attention)
    }

    fn refuse(&self, options: &LoadOptions, _: DeviceChoice) -> Option<&'static str> {
        options.mla.map(|_| NO_MLA)
    }

    fn layout(&self, geometry: &Geometry, has: &dyn Fn(&str) -> bool) -> Result<TensorLayout, GeometryError> {
        self.model().layout(geometry, has)
    }

    fn kv_layout(
        &self,
        geometry: &Geometry,
        _: Option<MlaForm>,
        dtype: DType,
    ) -> Result<KvLayout, GeometryError> {
        self.model().kv_layout(geometry, dtype)
    }

    fn load(&self, options: &LoadOptions, vb: VarBuilder) -> candle_core::Result<LoadedModel> {
        if options.mla.is_some() {
            candle_core::bail!("{NO_MLA}")
        }
        let options = options.decoder(MoePath::Fused);
        let (model, selection) = model::load(self, &options, vb)?;
        LoadedModel::new(Box::new(model), options.path, selection)
    }
}
