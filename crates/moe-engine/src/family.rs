//! Families of models: which configs belong to one, what a model of it is made of, and how it is loaded.

use candle_core::DType;
use candle_nn::VarBuilder;
use model_runtime::{
    AttentionConfig, BlockContext, CausalLm, Config, ConfigError, DecoderConfig, DecoderOptions, Geometry,
    GeometryError, LayerStates, MlaConfig, MlaForm, TensorLayout,
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

/// A family of models: a row of the table that a program looks a config up in.
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

/// A model as its config.json describes it: its tensors, what it caches of a token, how it is loaded.
pub trait ModelSpec: Send + Sync {
    /// What surrounds the attention.
    fn decoder(&self) -> &DecoderConfig;

    /// The attention of the layers.
    fn attention(&self) -> AttentionSpec<'_>;

    /// What the family does not have of what a run asks for, by the flag's name; asked before weights are read.
    fn refuse(&self, options: &LoadOptions, device: DeviceChoice) -> Option<&'static str> {
        let _ = (options, device);
        None
    }

    /// The tensors that a checkpoint of this config has, and the parts of them that the rank of this
    /// geometry holds. `has` tells which names are present, for layouts that differ in them.
    ///
    /// # Errors
    /// Sizes that the geometry cannot cut; none on one rank.
    fn layout(&self, geometry: &Geometry, has: &dyn Fn(&str) -> bool) -> Result<TensorLayout, GeometryError>;

    /// What each layer keeps of a sequence on the rank of this geometry, in this dtype; `mla` as in [`LoadOptions`].
    ///
    /// # Errors
    /// Heads that the geometry cannot cut.
    fn states(
        &self,
        geometry: &Geometry,
        mla: Option<MlaForm>,
        dtype: DType,
    ) -> Result<LayerStates, GeometryError>;

    /// Names that a checkpoint may have without being expected; `*` is a wildcard.
    fn ignored(&self) -> &'static [&'static str] {
        self.decoder().ignored()
    }

    /// Loads the model, or one rank's part of it, in the dtype of `vb`, which is at the root of the
    /// checkpoint and shows the rank's slices.
    fn load(&self, options: &LoadOptions, vb: VarBuilder) -> candle_core::Result<LoadedModel>;
}

/// The attention of a model, with the heads of all ranks.
#[derive(Clone, Copy, Debug)]
pub enum AttentionSpec<'a> {
    /// Heads share keys and values in groups: one config for each layer.
    GroupedQuery(&'a [AttentionConfig]),
    /// Heads share a latent row.
    Latent(&'a MlaConfig),
}

/// The families that a program runs.
#[derive(Clone, Copy, Debug)]
pub struct Families {
    /// All that there are.
    pub table: &'static [ModelFamily],
    /// The `model_type` of the only one that this program runs; `None`: it runs all.
    pub only: Option<&'static str>,
}

impl Families {
    /// The families that this program runs, in the table's order.
    pub fn run_here(&self) -> impl Iterator<Item = &'static ModelFamily> {
        let only = self.only;
        self.table.iter().filter(move |family| only.is_none_or(|only| only == family.model_type))
    }

    /// Reads and validates a config.json by the reader of its family.
    ///
    /// # Errors
    /// A config of no family that this program runs, with those that are known; what the family's reader finds wrong.
    pub fn parse(&self, config: &Config) -> Result<Box<dyn ModelSpec>, ConfigError> {
        if let Some(model_type) = config.opt_string(&["model_type"])? {
            let family = self.run_here().find(|family| family.model_type == model_type);
            let unknown =
                || config.unsupported(format!("model_type {model_type:?}"), &format!("; {}", self.listed()));
            return (family.ok_or_else(unknown)?.parse)(config);
        }
        let names = config.strings(&["architectures"])?;
        let family = self.run_here().find(|family| names.contains(&family.architecture));
        let expected =
            || format!("the type of a model, or a known name in `architectures`: {}", self.listed());
        let family = family.ok_or_else(|| config.invalid("model_type", &expected(), "nothing"))?;
        (family.parse)(&config.with("model_type", family.model_type))
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
