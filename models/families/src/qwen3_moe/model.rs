//! The Qwen3-MoE model: the decoder with grouped-query attention, the same in all layers.

use candle_nn::VarBuilder;
use model_runtime::{Attention, Decoder, DecoderOptions, GroupedQueryModel};
use moe_layer::BackendSelection;
use moe_layer::candle::Result;

use super::config::Qwen3MoeConfig;

/// A loaded Qwen3-MoE model.
pub type Qwen3Moe = Decoder<Attention>;

/// Loads the model, or one rank's part of it; `vb` is at the root of the checkpoint, has the model dtype
/// and shows the rank's slices. The oracle's choice of expert backend comes along, unless there was
/// none to make.
pub fn load(
    config: &Qwen3MoeConfig,
    options: &DecoderOptions,
    vb: VarBuilder,
) -> Result<(Qwen3Moe, Option<BackendSelection>)> {
    config.model().load(options, vb)
}

impl Qwen3MoeConfig {
    /// The decoder with its attention.
    pub(crate) fn model(&self) -> GroupedQueryModel {
        GroupedQueryModel { decoder: self.decoder.clone(), attention: self.attention.clone() }
    }
}
