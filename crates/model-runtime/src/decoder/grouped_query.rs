//! Decoders whose layers all have grouped-query attention: what is left to a family of models is to read its config.

use candle_core::{DType, Result};
use candle_nn::VarBuilder;
use moe_comm::{Geometry, GeometryError};
use moe_layer::BackendSelection;

use super::{Decoder, DecoderConfig, DecoderOptions};
use crate::attention::{Attention, AttentionConfig};
use crate::checkpoint::TensorLayout;
use crate::kv_cache::KvLayout;

/// A decoder with the attention of each of its layers, which counts the heads of all ranks. The layers have the same KV heads of
/// the same size; windows, biases and norms may differ.
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

    /// What the rank of `geometry` caches of a token, in this dtype.
    ///
    /// # Errors
    /// Heads that the geometry cannot cut.
    pub fn kv_layout(
        &self,
        geometry: &Geometry,
        dtype: DType,
    ) -> std::result::Result<KvLayout, GeometryError> {
        let num_layers = self.decoder.num_layers();
        match self.attention.first() {
            Some(attention) => attention.kv_layout(num_layers, geometry, dtype),
            None => Ok(KvLayout { num_layers, num_kv_heads: 0, head_dim: 0, value_dim: Some(0), dtype }),
        }
    }

    /// Loads the model, or one rank's part of it; `vb` is at the root of the checkpoint, has the model dtype and shows the
    /// rank's slices. The oracle's choice of expert backend comes along, unless there was none to make.
    ///
    /// # Errors
    /// A list of attention layers of another length than the decoder's, or with KV heads that differ; any error of
    /// [`Decoder::load`].
    pub fn load(
        &self,
        options: &DecoderOptions,
        vb: VarBuilder,
    ) -> Result<(Decoder<Attention>, Option<BackendSelection>)> {
        self.check()?;
        let (names, context) = (self.decoder.names.grouped_query, options.context);
        let kv = self.kv_layout(&context.geometry, vb.dtype())?;
        Decoder::load(&self.decoder, options, kv, vb, |layer, vb| {
            Attention::load_part(&self.attention[layer], names, vb, context)
        })
    }

    fn check(&self) -> Result<()> {
        let layers = self.decoder.num_layers();
        if self.attention.len() != layers {
            candle_core::bail!(
                "grouped-query attention: expected a config for each of {layers} layers, got {}",
                self.attention.len()
            )
        }
        let kv = |attention: &AttentionConfig| (attention.num_kv_heads, attention.head_dim);
        let differs = self.attention.windows(2).position(|pair| kv(&pair[0]) != kv(&pair[1]));
        if let Some(layer) = differs {
            let ((heads, dim), (other_heads, other_dim)) =
                (kv(&self.attention[layer]), kv(&self.attention[layer + 1]));
            candle_core::bail!(
                "grouped-query attention: expected the KV heads of layer {layer}, {heads} of {dim} values, in layer {} too, \
                 got {other_heads} of {other_dim}: one KV cache holds all layers",
                layer + 1
            )
        }
        Ok(())
    }
}
