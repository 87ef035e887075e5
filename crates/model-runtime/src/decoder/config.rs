//! The sizes and options of a decoder other than the sizes of its attention, and the names of its tensors.

use moe_kernels::names::TensorNames;
use moe_layer::{Activation, RouterConfig};

use crate::config::{Config, ConfigError, RopeConfig, checked_product, limits};

/// Sizes and options of a decoder: everything in a config that is not about attention. The default has no layers and no
/// sizes, and the usual options of dense decoders: SwiGLU, norms with an epsilon of 1e-6, a vocabulary projection of
/// its own. A family fills in the rest, so that a further option needs no change there:
///
/// ```
/// use model_runtime::{DecoderConfig, MoeConfig, RouterConfig};
/// let layers = 4;
/// let config = DecoderConfig {
///     vocab_size: 1000,
///     hidden_size: 64,
///     intermediate_size: 128,
///     moe: Some(MoeConfig { shared_intermediate_size: 32, ..MoeConfig::new(RouterConfig::new(8, 2), 32) }),
///     is_sparse: vec![true; layers],
///     ..DecoderConfig::default()
/// };
/// assert_eq!((config.num_layers(), config.num_experts()), (4, 8));
/// ```
#[derive(Clone, Debug)]
pub struct DecoderConfig {
    /// The names of the tensors.
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
    /// Whether the norms between layers multiply by 1 + weight, in f32.
    pub zero_centred_norms: bool,
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
    /// Width of the MLP that all shared experts form together; 0 without shared experts.
    pub shared_intermediate_size: usize,
    /// Whether the products of the routed experts have biases.
    pub expert_bias: bool,
}

impl MoeConfig {
    /// Experts of this width, without shared experts and without biases. A family changes fields of this value.
    pub fn new(router: RouterConfig, intermediate_size: usize) -> Self {
        Self { router, intermediate_size, shared_intermediate_size: 0, expert_bias: false }
    }

    /// The number of shared experts, if each is as wide as a routed one; `None` if their width is no multiple of it.
    pub fn shared_experts(&self) -> Option<usize> {
        let fits = self.intermediate_size > 0
            && self.shared_intermediate_size.is_multiple_of(self.intermediate_size);
        fits.then(|| self.shared_intermediate_size / self.intermediate_size)
    }
}

impl Default for DecoderConfig {
    fn default() -> Self {
        Self {
            names: TensorNames::USUAL,
            vocab_size: 0,
            hidden_size: 0,
            intermediate_size: 0,
            activation: Activation::SwiGlu,
            rms_norm_eps: 1e-6,
            zero_centred_norms: false,
            tie_word_embeddings: false,
            rope: Vec::new(),
            moe: None,
            is_sparse: Vec::new(),
        }
    }
}

impl DecoderConfig {
    /// Number of layers.
    pub fn num_layers(&self) -> usize {
        self.is_sparse.len()
    }

    /// The longest sequence for whose positions all layers have rotations.
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

    /// Width of the MLP that all shared experts form together.
    pub fn shared_intermediate_size(&self) -> usize {
        self.moe.as_ref().map_or(0, |moe| moe.shared_intermediate_size)
    }

    /// Refuses sizes that are each valid but too large together, by the key of `config`. A layer has at most
    /// `layer_tensors` tensors without its experts; the product of `attention` is the number of its weights.
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
