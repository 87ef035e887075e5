//! Decoders whose layers all have grouped-query attention: what is left to a family of models is to read its config.

use candle_core::{DType, Result, bail};
use candle_nn::VarBuilder;
use moe_comm::{Geometry, GeometryError};
use moe_layer::BackendSelection;

use super::config::DecoderConfig;
use super::layer::Decoder;
use super::load::DecoderOptions;
use crate::attention::{Attention, AttentionConfig};
use crate::checkpoint::TensorLayout;
use crate::kv_cache::{LayerState, LayerStates};

/// A decoder with the attention of each of its layers, which counts the heads of all ranks.
#[derive(Clone, Debug)]
pub struct GroupedQueryModel {
    /// The decoder around the attention.
    pub decoder: DecoderConfig,
    /// The attention of each layer, first layer first.
    pub attention: Vec<AttentionConfig>,
}

impl GroupedQueryModel {
    /// A decoder whose layers all have this attention.
    pub fn alike(decoder: DecoderConfig, attention: AttentionConfig) -> Self {
        let attention = vec![attention; decoder.num_layers()];
        Self { decoder, attention }
    }

    /// The tensors of a checkpoint, and the parts that the rank of `geometry` holds; `has` as in [`DecoderConfig::layout`].
    ///
    /// # Errors
    /// Sizes that the geometry cannot cut.
    pub fn layout(
        &self,
        geometry: &Geometry,
        has: &dyn Fn(&str) -> bool,
    ) -> std::result::Result<TensorLayout, GeometryError> {
        let names = &self.decoder.names.grouped_query;
        self.decoder.layout(geometry, has, |layer, prefix, list| match self.attention.get(layer) {
            Some(attention) => attention.layout(names, prefix, list),
            None => Ok(()),
        })
    }

    /// What the layers keep of a sequence on the rank of `geometry`, in this dtype.
    ///
    /// # Errors
    /// Heads that the geometry cannot cut.
    pub fn states(
        &self,
        geometry: &Geometry,
        dtype: DType,
    ) -> std::result::Result<LayerStates, GeometryError> {
        self.attention
            .iter()
            .map(|attention| Ok(LayerState::Paged(attention.part(geometry)?.kv_layout(dtype))))
            .collect()
    }

    /// Loads the model, or one rank's part of it; `vb` is at the root of the checkpoint, has the model dtype and shows the
    /// rank's slices. The oracle's choice of expert backend comes along, unless there was none to make.
    ///
    /// # Errors
    /// A list of attention layers of another length than the decoder's; any error of [`Decoder::load`].
    pub fn load(
        &self,
        options: &DecoderOptions,
        vb: VarBuilder,
    ) -> Result<(Decoder, Option<BackendSelection>)> {
        let layers = self.decoder.num_layers();
        let names = self.decoder.names.grouped_query;
        let context = options.context;
        if self.attention.len() != layers {
            bail!(
                "grouped-query attention: expected a config for each of {layers} layers, got {}",
                self.attention.len()
            )
        }
        let rotary = self
            .attention
            .iter()
            .zip(&self.decoder.rope)
            .map(|(layer, rope)| ([layer.rotary_dim, layer.head_dim], [rope.dim, rope.head_dim]));
        if let Some((layer, (wanted, got))) = rotary.enumerate().find(|(_, (wanted, got))| wanted != got) {
            bail!(
                "rotary embedding of layer {layer}: expected [rotated dimensions, dimensions of a head] {wanted:?}, got {got:?}"
            )
        }
        Decoder::load(&self.decoder, options, vb, |layer, vb| {
            Ok(Box::new(Attention::load_part(&self.attention[layer], names, vb, context)?))
        })
    }
}
