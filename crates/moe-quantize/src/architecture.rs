//! The models whose checkpoints are made: their configs and tensors, by the `model_type` of config.json.

use anyhow::{Result, bail};
use candle_nn::VarBuilder;
use model_families::deepseek_v2::{DeepseekV2Config, DeepseekV2Family};
use model_families::qwen3_moe::{Qwen3MoeConfig, Qwen3MoeFamily};
use model_runtime::{Config, DecoderConfig, Geometry, TensorLayout};
use moe_engine::{LoadOptions, LoadedModel, ModelFamily};
use serde_json::Value;

/// Where a header of quantisation lies in config.json.
pub const QUANTISATION_KEYS: [&str; 2] = ["quantization_config", "compression_config"];

/// A model's config, read and validated.
pub enum Architecture {
    /// Qwen3-MoE.
    Qwen3Moe(Box<Qwen3MoeConfig>),
    /// DeepSeek-V2.
    DeepseekV2(Box<DeepseekV2Config>),
}

impl Architecture {
    /// Reads a config.json, whether it is of a quantised checkpoint or not; `file` names it in errors.
    ///
    /// # Errors
    /// Another `model_type`; what the model's own reader finds wrong.
    pub fn new(config: &Value, file: &str) -> Result<Self> {
        let mut plain = config.clone();
        if let Some(map) = plain.as_object_mut() {
            QUANTISATION_KEYS.iter().for_each(|key| drop(map.remove(*key)));
        }
        let parsed = Config::parse(&plain.to_string(), file)?;
        match parsed.string(&["model_type"])? {
            "qwen3_moe" => Ok(Self::Qwen3Moe(Box::new(Qwen3MoeFamily::config(&parsed)?))),
            "deepseek_v2" => Ok(Self::DeepseekV2(Box::new(DeepseekV2Family::config(&parsed)?))),
            other => {
                bail!("{file}: `model_type`: expected \"qwen3_moe\" or \"deepseek_v2\", got {other:?}")
            }
        }
    }

    /// The decoder around the attention.
    pub fn decoder(&self) -> &DecoderConfig {
        match self {
            Self::Qwen3Moe(config) => &config.decoder,
            Self::DeepseekV2(config) => &config.decoder,
        }
    }

    /// The tensors of a float checkpoint; `has` tells which names are there, for layouts that differ in them.
    ///
    /// # Errors
    /// None on one rank, which this is.
    pub fn layout(&self, has: &dyn Fn(&str) -> bool) -> Result<TensorLayout> {
        let geometry = Geometry::default();
        Ok(match self {
            Self::Qwen3Moe(config) => Qwen3MoeFamily::layout(config, &geometry, has)?,
            Self::DeepseekV2(config) => DeepseekV2Family::layout(config, &geometry, has)?,
        })
    }

    /// Names that a checkpoint may have without being expected; `*` is a wildcard.
    pub fn ignored(&self) -> &'static [&'static str] {
        match self {
            Self::Qwen3Moe(config) => Qwen3MoeFamily::ignored(config),
            Self::DeepseekV2(config) => DeepseekV2Family::ignored(config),
        }
    }

    /// The model with the tensors of `vb`, in its dtype.
    ///
    /// # Errors
    /// Missing or wrongly shaped tensors.
    pub fn load(&self, vb: VarBuilder) -> Result<LoadedModel> {
        let options = LoadOptions::default();
        Ok(match self {
            Self::Qwen3Moe(config) => Qwen3MoeFamily::load(config, &options, vb)?,
            Self::DeepseekV2(config) => DeepseekV2Family::load(config, &options, vb)?,
        })
    }
}
