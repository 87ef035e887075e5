//! What a model crate supplies to become a program: its config, its tensors, how to load it, and
//! perhaps a checkpoint inside the binary.

use candle_nn::VarBuilder;
use model_runtime::{CausalLm, Config, ConfigError, TensorSpec};

/// A loaded model.
pub struct LoadedModel {
    /// The model.
    pub model: Box<dyn CausalLm>,
    /// The oracle's choice of expert backend with the rejected ones, as JSON.
    pub backend: serde_json::Value,
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
}

/// A family of models that one binary runs.
pub trait ModelFamily {
    /// The parsed config.
    type Config;

    /// Reads and validates `config.json`.
    fn config(config: &Config) -> Result<Self::Config, ConfigError>;

    /// The tensors that a checkpoint of this config has. `has` tells which names are present, for
    /// layouts that differ in them.
    fn tensors(config: &Self::Config, has: &dyn Fn(&str) -> bool) -> Vec<TensorSpec>;

    /// Names that a checkpoint may have without being expected; `*` is a wildcard.
    fn ignored(config: &Self::Config) -> &'static [&'static str];

    /// Loads the model in the dtype of `vb`, which is at the root of the checkpoint. `backend`
    /// names the expert backend.
    fn load(config: &Self::Config, backend: Option<&str>, vb: VarBuilder)
    -> candle_core::Result<LoadedModel>;

    /// The checkpoint in the binary, if it has one.
    fn embedded() -> Option<Embedded>;
}
