//! What a decoder is made of beside its attention, and what its tensors are called.

use moe_kernels::names::TensorNames;
use moe_layer::{Activation, RouterConfig};

use crate::config::{Config, ConfigError, RopeConfig, checked_product, limits};

/// Sizes and options of a decoder: what a config says beside its attention.
#[derive(Clone, Debug)]
pub struct DecoderConfig {
    /// What the tensors are called.
    pub names: TensorNames,
    /// Tokens in the vocabulary.
    pub vocab_size: usize,
    /// Width of the residual stream, H.
    pub hidden_size: usize,
    /// Width of dense layers' MLPs.
    pub intermediate_size: usize,
    /// Activation of dense MLPs and experts.
    pub activation: Activation,
    /// Epsilon of the norms between layers.
    pub rms_norm_eps: f64,
    /// Whether the vocabulary projection is the embedding.
    pub tie_word_embeddings: bool,
    /// Rotary embedding of each layer, first layer first.
    pub rope: Vec<RopeConfig>,
    /// Experts of sparse layers; `None` for a dense model.
    pub moe: Option<MoeConfig>,
    /// Per layer: whether it has experts. Without `moe`, none has.
    pub is_sparse: Vec<bool>,
}

/// The experts of a decoder's sparse layers.
#[derive(Clone, Debug)]
pub struct MoeConfig {
    /// Routing, with the number of experts E.
    pub router: RouterConfig,
    /// Width of one expert's MLP, I.
    pub intermediate_size: usize,
    /// Width of the MLP that the shared experts are together; 0 without any.
    pub shared_intermediate_size: usize,
}

impl MoeConfig {
    /// Shared experts, each as wide as a routed one; `None` where their width is no multiple of it.
    pub fn shared_experts(&self) -> Option<usize> {
        let fits = self.intermediate_size > 0
            && self.shared_intermediate_size.is_multiple_of(self.intermediate_size);
        fits.then(|| self.shared_intermediate_size / self.intermediate_size)
    }
}

impl DecoderConfig {
    /// Number of layers.
    pub fn num_layers(&self) -> usize {
        self.is_sparse.len()
    }

    /// The longest sequence that the positions of all layers are made for.
    pub fn max_context_len(&self) -> usize {
        self.rope.iter().map(RopeConfig::max_context_len).min().unwrap_or_default()
    }

    /// The longest sequence that all layers were trained for, as the config declares it.
    pub fn max_position_embeddings(&self) -> usize {
        self.rope.iter().map(|rope| rope.max_position_embeddings).min().unwrap_or_default()
    }

    /// The sparse layers, ascending.
    pub fn moe_layers(&self) -> Vec<usize> {
        (0..self.num_layers()).filter(|&layer| self.is_sparse[layer]).collect()
    }

    /// Number of experts of a sparse layer, E; 0 in a dense model.
    pub fn num_experts(&self) -> usize {
        self.moe.as_ref().map_or(0, |moe| moe.router.num_experts)
    }

    /// Names that a checkpoint of such a decoder may have without being read; `*` is a wildcard.
    pub fn ignored(&self) -> &'static [&'static str] {
        match self.tie_word_embeddings {
            true => self.names.unread_if_tied,
            false => self.names.unread,
        }
    }

    /// Width of the MLP that the shared experts are together.
    pub fn shared_intermediate_size(&self) -> usize {
        self.moe.as_ref().map_or(0, |moe| moe.shared_intermediate_size)
    }

    /// Refuses sizes that are each valid but absurd together, by the key of `config`. A layer has at
    /// most `layer_tensors` tensors without its experts, and `attention` multiplies to its weights.
    ///
    /// # Errors
    /// The first product beyond its limit.
    pub fn check_sizes(
        &self,
        config: &Config,
        layer_tensors: usize,
        attention: &[usize],
    ) -> Result<(), ConfigError> {
        let layers = self.num_layers();
        let h = self.hidden_size;
        let moe_layers = self.moe_layers().len();
        let experts = self.num_experts();
        let width = self.moe.as_ref().map_or(0, |moe| moe.intermediate_size);
        let attention = [&[layers][..], attention].concat();
        for (what, factors, limit) in [
            ("the number of tensors", &[layers, layer_tensors][..], limits::TENSORS),
            ("the number of expert tensors", &[moe_layers, experts, 3], limits::TENSORS),
            ("the number of expert weights", &[moe_layers, experts, width, h, 3], limits::WEIGHTS),
            (
                "the number of shared weights",
                &[moe_layers, self.shared_intermediate_size(), h, 3],
                limits::WEIGHTS,
            ),
            ("the number of attention weights", &attention, limits::WEIGHTS),
            ("the number of dense weights", &[layers, self.intermediate_size, h, 3], limits::WEIGHTS),
            ("the number of embedding weights", &[self.vocab_size, h], limits::WEIGHTS),
        ] {
            checked_product(config, what, factors, limit)?;
        }
        Ok(())
    }
}
