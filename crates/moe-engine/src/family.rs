//! Model families: which configs belong to a family, what its models consist of, and how they are loaded.

use candle_core::DType;
use candle_nn::VarBuilder;
use model_runtime::{
    BlockContext, CausalLm, Config, ConfigError, DecoderConfig, DecoderOptions, Geometry, GeometryError,
    LayerStates, MixerConfig, MlaConfig, MlaForm, MtpConfig, TensorLayout,
};
use moe_layer::{BackendSelection, MoePath};

use crate::device::DeviceChoice;

/// Options of the command line for building a model. A family refuses, by name, an option that it does not support.
#[derive(Clone, Debug, Default)]
pub struct LoadOptions {
    /// Name of the expert backend; `None`: the oracle chooses.
    pub backend: Option<String>,
    /// Expert path; `None`: the family's default.
    pub moe_path: Option<MoePath>,
    /// Form of multi-head latent attention; `None`: absorbed.
    pub mla: Option<MlaForm>,
    /// Bytes of experts that are in host memory for each GPU, all layers together; `None` means that all are on the
    /// device.
    pub expert_offload: Option<usize>,
    /// This rank's place, and how MoE layers cut their tokens into chunks.
    pub context: BlockContext,
}

impl LoadOptions {
    /// The options of a decoder, with the expert path `default` if no path is requested.
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
    /// The oracle's choice of expert backend and the rejected ones, as JSON; only `chosen` if there was nothing to
    /// choose.
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
    /// The prompt that it continues if none is given.
    pub prompt: &'static str,
    /// How it is used for chat, if it can be.
    pub chat: Option<EmbeddedChat>,
}

/// How an embedded checkpoint is used for chat.
#[derive(Clone, Copy, Debug)]
pub struct EmbeddedChat {
    /// The chat template, in Jinja.
    pub template: &'static str,
    /// The text that ends an answer, unless another is requested.
    pub stop: &'static str,
}

/// A model family: a row of the table in which a program looks up a config.
#[derive(Clone, Copy, Debug)]
pub struct ModelFamily {
    /// The `model_type` of its configs.
    pub model_type: &'static str,
    /// The name of its models in `architectures`, which counts in a config without `model_type`.
    pub architecture: &'static str,
    /// A model of the family on the hub, for examples: `ORG/NAME`.
    pub example: &'static str,
    /// Reads and validates a config.json of this family.
    pub parse: fn(&Config) -> Result<Box<dyn ModelSpec>, ConfigError>,
}

/// The number of equal letters with which two names must begin to be similar.
const SHORTEST_WORD: usize = 4;

/// A model as its config.json describes it: its tensors, what it caches of a token, how it is loaded.
pub trait ModelSpec: Send + Sync {
    /// The decoder around the attention.
    fn decoder(&self) -> &DecoderConfig;

    /// The attention of the layers.
    fn attention(&self) -> AttentionSpec<'_>;

    /// The requested option that the family does not support, by its flag; this is asked before weights are read.
    fn refuse(&self, options: &LoadOptions, device: DeviceChoice) -> Option<&'static str> {
        let _ = (options, device);
        None
    }

    /// The tensors in a checkpoint of this config, and the parts of them that the rank of this geometry holds. `has`
    /// tells which names exist, for layouts that differ in names.
    ///
    /// # Errors
    /// Sizes that the geometry cannot divide; there are none on one rank.
    fn layout(&self, geometry: &Geometry, has: &dyn Fn(&str) -> bool) -> Result<TensorLayout, GeometryError>;

    /// The data that each layer keeps of a sequence on the rank of this geometry, in this dtype; `mla` as in
    /// [`LoadOptions`].
    ///
    /// # Errors
    /// Heads that the geometry cannot divide.
    fn states(
        &self,
        geometry: &Geometry,
        mla: Option<MlaForm>,
        dtype: DType,
    ) -> Result<LayerStates, GeometryError>;

    /// The head for multi-token prediction that a checkpoint of this config may have. A run leaves it out.
    fn mtp(&self) -> Option<&MtpConfig> {
        None
    }

    /// Names that a checkpoint may have although they are not expected; `*` is a wildcard.
    fn ignored(&self) -> &'static [&'static str] {
        self.decoder().ignored()
    }

    /// Loads the model, or one rank's part of it, in the dtype of `vb`. `vb` is at the root of the checkpoint and
    /// provides the rank's slices.
    fn load(&self, options: &LoadOptions, vb: VarBuilder) -> candle_core::Result<LoadedModel>;
}

/// The attention of a model, with the heads of all ranks.
// This enum is exhaustive: tools that run layers must know each kind of attention.
#[derive(Clone, Copy, Debug)]
pub enum AttentionSpec<'a> {
    /// Layers have grouped-query attention or linear attention: one config for each layer.
    Layers(&'a [MixerConfig]),
    /// Heads share a latent row.
    Latent(&'a MlaConfig),
}

impl AttentionSpec<'_> {
    /// Whether some layers have linear attention.
    pub fn has_linear(&self) -> bool {
        let is_linear = |mixer: &MixerConfig| matches!(mixer, MixerConfig::Linear(_));
        matches!(self, Self::Layers(mixers) if mixers.iter().any(is_linear))
    }
}

/// The families that a program runs.
#[derive(Clone, Copy, Debug)]
pub struct Families {
    /// All known families.
    pub table: &'static [ModelFamily],
    /// The `model_type` of the only family that this program runs; `None` if it runs all.
    pub only: Option<&'static str>,
}

impl Families {
    /// The families that this program runs, in the table's order.
    pub fn run_here(&self) -> impl Iterator<Item = &'static ModelFamily> {
        let only = self.only;
        self.table.iter().filter(move |family| only.is_none_or(|only| only == family.model_type))
    }

    /// Reads and validates a config.json with the reader of its family.
    ///
    /// # Errors
    /// A config of a family that this program does not run; the error lists the known ones. Errors of the family's
    /// reader.
    pub fn parse(&self, config: &Config) -> Result<Box<dyn ModelSpec>, ConfigError> {
        if let Some(model_type) = config.opt_string(&["model_type"])? {
            let family = self.run_here().find(|family| family.model_type == model_type);
            let unknown = || {
                let known = match self.nearest(model_type) {
                    Some(near) => format!(
                        "; the nearest one by name is {:?} ({}); {}",
                        near.model_type,
                        near.example,
                        self.listed()
                    ),
                    None => format!("; {}", self.listed()),
                };
                config.unsupported(format!("model_type {model_type:?}"), &known)
            };
            return (family.ok_or_else(unknown)?.parse)(config);
        }
        let names = config.strings(&["architectures"])?;
        let family = self.run_here().find(|family| names.contains(&family.architecture));
        let expected =
            || format!("the type of a model, or a known name in `architectures`: {}", self.listed());
        let family = family.ok_or_else(|| config.invalid("model_type", &expected(), "nothing"))?;
        (family.parse)(&config.with("model_type", family.model_type))
    }

    /// The family whose name has the longest beginning in common with a name, if that is a word at least.
    fn nearest(&self, model_type: &str) -> Option<&'static ModelFamily> {
        let common = |family: &ModelFamily| {
            let pairs = family.model_type.bytes().zip(model_type.bytes());
            pairs.take_while(|(a, b)| a == b).count()
        };
        let longest = self.run_here().map(common).max().filter(|&len| len >= SHORTEST_WORD)?;
        self.run_here().find(|family| common(family) == longest)
    }

    /// What this program runs, and which program runs more.
    fn listed(&self) -> String {
        let quoted = |family: &ModelFamily| format!("{:?}", family.model_type);
        let here: Vec<String> = self.run_here().map(quoted).collect();
        let all: Vec<String> = self.table.iter().map(quoted).collect();
        match self.only {
            Some(_) => format!(
                "this program runs model_type {}; the program `moe` runs {}",
                here.join(", "),
                all.join(", ")
            ),
            None => format!("this program runs model_type {}", here.join(", ")),
        }
    }
}
