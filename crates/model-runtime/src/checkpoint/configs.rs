//! The configs of a checkpoint, without its weights.

use std::path::Path;

use moe_quant::QuantConfig;

use super::CheckpointError;
use super::gguf::{self, Gguf};
use crate::config::Config;

/// The facts about a model in the small files of a checkpoint, or in the metadata of a GGUF file.
pub struct Configs {
    /// `config.json`.
    pub config: Config,
    /// `generation_config.json`, if there is one.
    pub generation: Option<Config>,
    /// How it is quantised; `None`: it is not.
    pub quantisation: Option<QuantConfig>,
}

impl Configs {
    /// Reads only `config.json` of a checkpoint directory, or the metadata of a GGUF file.
    ///
    /// # Errors
    /// A file that cannot be read or is not valid.
    pub fn model(path: &Path) -> Result<Config, CheckpointError> {
        match Gguf::find(path)? {
            Some(file) => Ok(Gguf::open(&file)?.read()?.config),
            None => Ok(Config::read(&path.join("config.json"))?),
        }
    }

    /// Reads the configs of a checkpoint directory, or of a GGUF file.
    ///
    /// # Errors
    /// A file that cannot be read or is not valid.
    pub fn read(path: &Path) -> Result<Self, CheckpointError> {
        if let Some(file) = Gguf::find(path)? {
            let said = Gguf::open(&file)?.read()?;
            let gguf::GgufContents { config, generation, quantisation, .. } = said;
            return Ok(Self { config, generation, quantisation: Some(quantisation) });
        }
        let config = Self::model(path)?;
        let generation = path.join("generation_config.json");
        let generation = generation.is_file().then(|| Config::read(&generation)).transpose()?;
        let quantisation = config.quantisation_in(path)?;
        Ok(Self { config, generation, quantisation })
    }
}
