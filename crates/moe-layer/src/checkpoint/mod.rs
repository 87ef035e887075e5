//! The sparse block of a published model, from its config.json.
//!
//! A [`CheckpointBlock`] describes one block of a checkpoint as data: sizes and routing, names of tensors and order of
//! packs, shared experts, and quantisation of weights. [`CheckpointBlock::from_config`] fills it in for every
//! `model_type` of the table (`table.rs`). Its fields are public, so a model of another type can start from a similar
//! one.

mod gate;
mod load;
mod names;
mod quantised;
mod table;

use moe_kernels::Activation;
use moe_kernels::candle::Result;
use moe_quant::QuantConfig;
use moe_router::RouterConfig;
use moe_router::hf::Keys;
use serde_json::Value;

use crate::error::BlockError;
use crate::options::BlockOptions;
use table::{Family, FamilyActivation, Shared};

pub use gate::router_gate;
pub use names::BlockNames;
pub use quantised::QuantisedVars;
pub use table::model_types;

/// Shared experts of a block, as one MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedSpec {
    /// Width of the MLP: the sum over the shared experts.
    pub intermediate_size: usize,
    /// Whether the sigmoid of a gate scales their output for each token (Qwen2-MoE).
    pub gated: bool,
}

/// One sparse block of a checkpoint, as data.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CheckpointBlock {
    /// Routing, sizes and activation.
    pub options: BlockOptions,
    /// The names of its tensors.
    pub names: BlockNames,
    /// Shared experts, if there are any.
    pub shared: Option<SharedSpec>,
    /// How the weights are quantised; `None` means that all are floats. [`QuantConfig::dequantised`] makes a block load
    /// them as floats.
    pub quant: Option<QuantConfig>,
}

impl CheckpointBlock {
    /// A block with the usual names, without shared experts, in floats. For other settings, change the fields.
    pub fn new(options: BlockOptions) -> Self {
        Self { options, names: BlockNames::default(), shared: None, quant: None }
    }

    /// The block of a decoder layer (dense layers count) of the model of this `config.json`. For a multimodal model,
    /// its `text_config` is used. The caller must know which layers are sparse.
    ///
    /// # Errors
    /// A `model_type` that the table does not have ([`model_types`] lists them); keys that are missing, contradict each
    /// other or have the wrong type; an unknown routing or activation; a `quantization_config` that is not supported.
    pub fn from_config(config: &Value, layer: usize) -> Result<Self> {
        let keys = Keys::of(config)?;
        let family = Family::of(keys)?;
        let router = RouterConfig::from_hf_layer(config, layer)?;
        let options = BlockOptions {
            intermediate_size: keys.required(&[family.width], None)?,
            activation: activation(keys, family.activation)?,
            expert_bias: family.expert_bias,
            layer,
            ..BlockOptions::new(router, keys.required(&["hidden_size"], None)?, 0)
        };
        options.check()?;
        let shared = shared(keys, family, options.intermediate_size)?;
        let quant = QuantConfig::from_json(config)?;
        Ok(Self { names: family.names, shared, quant, ..Self::new(options) })
    }

    /// Uses the `quantization_config` of this `config.json`, if it has one.
    ///
    /// # Errors
    /// A header that is not supported. The error has the key, the expected value and the actual one.
    pub fn with_quantisation(self, config: &Value) -> Result<Self> {
        Ok(Self { quant: QuantConfig::from_json(config)?, ..self })
    }
}

/// The activation of a family's experts.
fn activation(keys: Keys<'_>, family: FamilyActivation) -> Result<Activation> {
    match family {
        FamilyActivation::Named => named_activation(keys),
        FamilyActivation::GptOss => Ok(Activation::SwiGluOai {
            alpha: keys.number("swiglu_alpha")?.unwrap_or(1.702),
            limit: keys.number("swiglu_limit")?.unwrap_or(7.0),
        }),
        FamilyActivation::Clamped { limit } => {
            Ok(Activation::ClampedSwiGlu { limit: keys.number("swiglu_limit")?.unwrap_or(limit) })
        }
    }
}

/// The activation with the name under `hidden_act`; silu if the key is missing.
fn named_activation(keys: Keys<'_>) -> Result<Activation> {
    match keys.text("hidden_act")?.unwrap_or("silu") {
        "silu" | "swish" => Ok(Activation::SwiGlu),
        "gelu" => Ok(Activation::Gelu),
        "gelu_pytorch_tanh" | "gelu_new" => Ok(Activation::GeluTanh),
        "relu" => Ok(Activation::Relu),
        other => {
            let expected = "silu, gelu, gelu_pytorch_tanh or relu";
            Err(BlockError::Activation { got: other.to_string(), expected }.into())
        }
    }
}

/// The shared experts in a config.
fn shared(keys: Keys<'_>, family: &Family, expert_width: usize) -> Result<Option<SharedSpec>> {
    let spec = match family.shared {
        Shared::None => return Ok(None),
        Shared::AsWide => SharedSpec { intermediate_size: expert_width, gated: false },
        Shared::Count { key, default } => {
            let count = keys.count(&[key])?.unwrap_or(default);
            let Some(intermediate_size) = count.checked_mul(expert_width) else {
                return Err(BlockError::SharedWidth { key, count, width: expert_width }.into());
            };
            SharedSpec { intermediate_size, gated: false }
        }
        Shared::Gated { width } => {
            SharedSpec { intermediate_size: keys.required(&[width], None)?, gated: true }
        }
    };
    Ok(Some(spec).filter(|spec| spec.intermediate_size > 0))
}
