//! Decoders whose layers have grouped-query attention or linear attention. A family of models only has to read its
//! config.

use candle_core::{DType, Result, bail};
use candle_nn::VarBuilder;
use moe_comm::{Geometry, GeometryError};
use moe_layer::BackendSelection;

use super::config::DecoderConfig;
use super::layer::{Decoder, Ends};
use super::load::DecoderOptions;
use crate::attention::{Attention, AttentionConfig};
use crate::checkpoint::TensorLayout;
use crate::kv_cache::{LayerState, LayerStates};
use crate::linear_attention::{LinearAttention, LinearAttentionConfig};

/// What mixes the positions of a layer. Numbers of heads are for all ranks together.
// This enum is exhaustive: a family must say how large the weights of each mixer are.
#[derive(Clone, Debug, PartialEq)]
pub enum MixerConfig {
    /// Grouped-query attention, with a KV cache.
    Attention(AttentionConfig),
    /// The gated delta rule, with a recurrent state.
    Linear(LinearAttentionConfig),
}

impl MixerConfig {
    /// The attention, if it is one.
    pub fn attention(&self) -> Option<&AttentionConfig> {
        match self {
            Self::Attention(attention) => Some(attention),
            Self::Linear(_) => None,
        }
    }
}

/// A decoder with the mixer of each of its layers.
#[derive(Clone, Debug)]
pub struct DecoderModel {
    /// The decoder around the mixers.
    pub decoder: DecoderConfig,
    /// The mixer of each layer, first layer first.
    pub mixers: Vec<MixerConfig>,
}

impl DecoderModel {
    /// A decoder whose layers all have this attention.
    pub fn alike(decoder: DecoderConfig, attention: AttentionConfig) -> Self {
        let mixers = vec![MixerConfig::Attention(attention); decoder.num_layers()];
        Self { decoder, mixers }
    }

    /// The attention of a layer that has one.
    pub fn attention(&self, layer: usize) -> Option<&AttentionConfig> {
        self.mixers.get(layer)?.attention()
    }

    /// The attention of all layers that have one.
    pub fn attention_layers(&self) -> impl Iterator<Item = &AttentionConfig> {
        self.mixers.iter().filter_map(MixerConfig::attention)
    }

    /// The tensors of a checkpoint, and the parts that the rank of `geometry` holds; `has` as in
    /// [`DecoderConfig::layout`].
    ///
    /// # Errors
    /// Sizes that the geometry cannot cut.
    pub fn layout(
        &self,
        geometry: &Geometry,
        has: &dyn Fn(&str) -> bool,
    ) -> std::result::Result<TensorLayout, GeometryError> {
        let mixer =
            |layer: usize, prefix: &str, list: &mut TensorLayout| self.mixer_layout(layer, prefix, has, list);
        self.decoder.layout(geometry, has, mixer)
    }

    /// Adds the tensors of the layers and of the last norm.
    pub(super) fn layers_layout(
        &self,
        has: &dyn Fn(&str) -> bool,
        list: &mut TensorLayout,
    ) -> std::result::Result<(), GeometryError> {
        let mixer =
            |layer: usize, prefix: &str, list: &mut TensorLayout| self.mixer_layout(layer, prefix, has, list);
        self.decoder.layers_layout(has, mixer, list)
    }

    fn mixer_layout(
        &self,
        layer: usize,
        prefix: &str,
        has: &dyn Fn(&str) -> bool,
        list: &mut TensorLayout,
    ) -> std::result::Result<(), GeometryError> {
        let names = &self.decoder.names;
        match self.mixers.get(layer) {
            Some(MixerConfig::Attention(attention)) => {
                attention.layout(&names.grouped_query, &format!("{prefix}.{}", names.attention), list)
            }
            Some(MixerConfig::Linear(linear)) => {
                linear.layout(&names.delta, &format!("{prefix}.{}", names.linear_attention), has, list)
            }
            None => Ok(()),
        }
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
        let state = |mixer: &MixerConfig| match mixer {
            MixerConfig::Attention(attention) => {
                Ok(LayerState::Paged(attention.part(geometry)?.kv_layout(dtype)))
            }
            MixerConfig::Linear(linear) => Ok(LayerState::Recurrent(linear.part(geometry)?.state_layout())),
        };
        self.mixers.iter().map(state).collect()
    }

    /// Loads the model, or one rank's part of it. `vb` is at the root of the checkpoint, has the model dtype and
    /// contains the rank's slices. Also returns the oracle's choice of expert backend, if there was a choice.
    ///
    /// # Errors
    /// A list of mixers of another length than the decoder's layers; any error of [`Decoder::load`].
    pub fn load(
        &self,
        options: &DecoderOptions,
        vb: VarBuilder,
    ) -> Result<(Decoder, Option<BackendSelection>)> {
        self.load_between(None, options, vb)
    }

    /// [`load`](Self::load) with the embedding and vocabulary projection of another decoder, or its own.
    pub(super) fn load_between(
        &self,
        ends: Option<Ends>,
        options: &DecoderOptions,
        vb: VarBuilder,
    ) -> Result<(Decoder, Option<BackendSelection>)> {
        let layers = self.decoder.num_layers();
        let names = self.decoder.names;
        let context = options.context;
        if self.mixers.len() != layers {
            bail!("expected a mixer for each of {layers} layers, got {}", self.mixers.len())
        }
        for (layer, (mixer, rope)) in self.mixers.iter().zip(&self.decoder.rope).enumerate() {
            let MixerConfig::Attention(attention) = mixer else { continue };
            let wanted = [attention.rotary_dim, attention.head_dim];
            let got = [rope.dim, rope.head_dim];
            if wanted != got {
                bail!(
                    "rotary embedding of layer {layer}: expected [rotated dimensions, dimensions of a head] {wanted:?}, got \
                     {got:?}"
                )
            }
        }
        Decoder::load_between(ends, &self.decoder, options, vb, |layer, vb| match &self.mixers[layer] {
            MixerConfig::Attention(attention) => {
                let vb = vb.pp(names.attention);
                Ok(Box::new(Attention::load_part(attention, names.grouped_query, vb, context)?))
            }
            MixerConfig::Linear(linear) => {
                let vb = vb.pp(names.linear_attention);
                Ok(Box::new(LinearAttention::load_part(linear, &names.delta, vb, context)?))
            }
        })
    }
}
