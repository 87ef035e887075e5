//! What a model crate supplies to become a program: its config, its tensors, how to load it, and
//! perhaps a checkpoint inside the binary.

use candle_core::DType;
use candle_nn::VarBuilder;
use model_runtime::{
    BlockContext, CausalLm, Config, ConfigError, DecoderOptions, Geometry, GeometryError, KvLayout, MlaForm,
    TensorLayout,
};
use moe_layer::{BackendSelection, MoePath};

use crate::device::DeviceChoice;

/// What the command line says about how a model is built. A family refuses, by name, what it does
/// not have.
#[derive(Clone, Debug, Default)]
pub struct LoadOptions {
    /// Name of the expert backend; `None`: the oracle chooses.
    pub backend: Option<String>,
    /// Expert path; `None`: the family's default.
    pub moe_path: Option<MoePath>,
    /// Form of multi-head latent attention; `None`: absorbed.
    pub mla: Option<MlaForm>,
    /// Bytes of experts that live in host memory beside each GPU, all layers together; `None`: all are on the device.
    pub expert_offload: Option<usize>,
    /// This rank's place, and how MoE layers cut their tokens.
    pub context: BlockContext,
}

impl LoadOptions {
    /// The options of a decoder, on the expert path `default` if none is asked for.
    pub fn decoder(&self, default: MoePath) -> DecoderOptions<'_> {
        DecoderOptions {
            path: self.moe_path.unwrap_or(default),
            backend: self.backend.as_deref(),
            context: &self.context,
            expert_offload: self.expert_offload,
        }
    }
}

/// A loaded model.
pub struct LoadedModel {
    /// The model.
    pub model: Box<dyn CausalLm>,
    /// The oracle's choice of expert backend with the rejected ones, as JSON; `chosen` alone where
    /// there was nothing to choose.
    pub backend: serde_json::Value,
}

impl LoadedModel {
    /// A model on a path of experts; `selection` is the oracle's choice on the fused one.
    pub fn new(
        model: Box<dyn CausalLm>,
        path: MoePath,
        selection: Option<BackendSelection>,
    ) -> candle_core::Result<Self> {
        let backend = match path {
            MoePath::Legacy => serde_json::json!({"chosen": "legacy"}),
            MoePath::Fused => serde_json::to_value(selection).map_err(candle_core::Error::wrap)?,
        };
        Ok(Self { model, backend })
    }
}

/// A checkpoint that is part of the program.
#[derive(Clone, Copy, Debug)]
pub struct Embedded {
    /// `model.safetensors`.
    pub weights: &'static [u8],
    /// `config.json`.
    pub config: &'static str,
    /// `generation_config.json`.
    pub generation_config: &'static str,
    /// `tokenizer.json`.
    pub tokenizer: &'static [u8],
    /// What it continues when no prompt is given.
    pub prompt: &'static str,
    /// How it talks, if it can.
    pub chat: Option<EmbeddedChat>,
}

/// How an embedded checkpoint talks.
#[derive(Clone, Copy, Debug)]
pub struct EmbeddedChat {
    /// The chat template, in Jinja.
    pub template: &'static str,
    /// What ends an answer, where nothing else is asked for.
    pub stop: &'static str,
}

/// A family of models that one binary runs.
pub trait ModelFamily {
    /// The parsed config.
    type Config: Sync;

    /// The `model_type` of its configs.
    const MODEL_TYPE: &'static str;

    /// A model of the family on the hub, for examples: `ORG/NAME`.
    const EXAMPLE: &'static str;

    /// Reads and validates `config.json`.
    fn config(config: &Config) -> Result<Self::Config, ConfigError>;

    /// What the family does not have of what a run asks for, by the flag's name; asked before anything is loaded.
    fn refuse(options: &LoadOptions, device: DeviceChoice) -> Option<&'static str> {
        let _ = (options, device);
        None
    }

    /// The tensors that a checkpoint of this config has, and the parts of them that the rank of this
    /// geometry holds. `has` tells which names are present, for layouts that differ in them.
    ///
    /// # Errors
    /// Sizes that the geometry cannot cut; none on one rank.
    fn layout(
        config: &Self::Config,
        geometry: &Geometry,
        has: &dyn Fn(&str) -> bool,
    ) -> Result<TensorLayout, GeometryError>;

    /// What the rank of this geometry caches of a token, in this dtype; `mla` as in [`LoadOptions`].
    ///
    /// # Errors
    /// Heads that the geometry cannot cut.
    fn kv_layout(
        config: &Self::Config,
        geometry: &Geometry,
        mla: Option<MlaForm>,
        dtype: DType,
    ) -> Result<KvLayout, GeometryError>;

    /// Names that a checkpoint may have without being expected; `*` is a wildcard.
    fn ignored(config: &Self::Config) -> &'static [&'static str];

    /// Loads the model, or one rank's part of it, in the dtype of `vb`, which is at the root of the
    /// checkpoint and shows the rank's slices.
    fn load(config: &Self::Config, options: &LoadOptions, vb: VarBuilder)
    -> candle_core::Result<LoadedModel>;

    /// The checkpoint in the binary, if it has one.
    fn embedded() -> Option<Embedded>;
}
