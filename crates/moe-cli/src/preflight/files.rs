//! The configs of a checkpoint.

use std::path::Path;

use anyhow::{Result, bail};
use model_runtime::checkpoint::Configs;
use model_runtime::config::{RopeConfig, limits};
use model_runtime::{Config, Geometry, QuantConfig, is_gate_up_pack};
use moe_comm::ExpertMap;
use moe_engine::tokenizer::Tokenizer;
use moe_engine::{DeviceChoice, Embedded, ModelSpec, Run};
use moe_layer::hf::NUM_EXPERTS;

use super::asks::Asks;
use super::known::Known;
use crate::cli::RunArgs;
use crate::error::usage;

/// Values that transformers writes into every config. They are required, because a model of default sizes is never
/// intended.
const REQUIRED: [&str; 3] = ["hidden_size", "num_hidden_layers", "vocab_size"];

/// The configs of a checkpoint.
pub struct Files {
    config: Config,
    generation: Option<Config>,
    quantisation: Option<QuantConfig>,
}

impl Files {
    /// Reads the configs in a folder or in a GGUF file.
    pub fn read(dir: &Path) -> Result<Self> {
        let Configs { config, generation, quantisation } = Configs::read(dir)?;
        Ok(Self { config, generation, quantisation })
    }

    /// Makes the configs of a model with random weights.
    pub fn random(config: Config) -> Result<Self> {
        let quantisation = config.quantisation()?;
        Ok(Self { config, generation: None, quantisation })
    }

    /// Reads the configs of a checkpoint that is part of the program.
    pub fn embedded(embedded: &Embedded) -> Result<Self> {
        Ok(Self {
            config: Config::parse(embedded.config, "the embedded config.json")?,
            generation: Some(Config::parse(
                embedded.generation_config,
                "the embedded generation_config.json",
            )?),
            quantisation: None,
        })
    }

    /// The model's config.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The configs, with the quantisation in the form in which a run holds the weights.
    ///
    /// # Errors
    /// Settings that have no effect on these weights.
    pub fn held(self, args: &RunArgs) -> Result<Self> {
        let quantisation = args.config().held(self.quantisation)?;
        Ok(Self { quantisation, ..self })
    }

    /// Checks that a model with these configs can run on the requested ranks and with the requested values.
    pub fn check(&self, model: &dyn ModelSpec, args: &RunArgs, asks: &Asks) -> Result<()> {
        check_required(&self.config)?;
        let geometry = args.config().parallel.geometry(0)?;
        self.check_redundant(args, &geometry)?;
        // Only checkpoints without quantisation have packs. Quantised ones store experts one by one.
        let has = |name: &str| self.quantisation.is_none() || !is_gate_up_pack(name);
        let layout = model.layout(&geometry, &has).map_err(|e| usage(e.to_string()))?;
        if let Some(quantisation) = &self.quantisation {
            let on_gpu = args.config().device != DeviceChoice::Cpu;
            layout.check_quantised(quantisation, on_gpu).map_err(|e| usage(e.to_string()))?;
        }
        self.check_values(asks)
    }

    /// Checks that weights and KV cache fit in the memory of the ranks.
    pub fn check_memory(&self, run: &Run, asks: &Asks) -> Result<()> {
        let context = self.context();
        let quantisation = self.quantisation.as_ref();
        let engine = |default| asks.engine_config(default, context);
        Ok(run.check_memory(&self.config, quantisation, context, engine)?)
    }

    /// Checks that the ranks have room for additional copies of experts.
    fn check_redundant(&self, args: &RunArgs, geometry: &Geometry) -> Result<()> {
        let redundant = args.parallel.placements.num_redundant_experts;
        let experts = self.config.opt_size(&NUM_EXPERTS, limits::EXPERTS)?;
        let (Some(experts), 1..) = (experts, redundant) else { return Ok(()) };
        let map = ExpertMap::initial(experts, redundant, geometry.ep_size);
        map.map(drop).map_err(|e| usage(format!("--num-redundant-experts: {e}")))
    }

    /// Checks the requested values against the sizes in the config.
    pub fn check_values(&self, asks: &Asks) -> Result<()> {
        asks.check_values(self.generation.as_ref(), self.vocab_size()?, self.context())
    }

    /// The known properties of the model; `dir` is its folder.
    pub fn known<'a>(&'a self, dir: Option<&'a Path>, tokenizer: Option<&'a Tokenizer>) -> Result<Known<'a>> {
        let vocab_size = self.vocab_size()?;
        let context = self.context();
        Ok(Known { config: &self.config, dir, tokenizer, vocab_size, context })
    }

    fn vocab_size(&self) -> Result<usize> {
        Ok(self.config.opt_size(&["vocab_size"], limits::VOCAB)?.unwrap_or(usize::MAX))
    }

    /// The longest sequence; unlimited if only the family knows it.
    fn context(&self) -> usize {
        // The size of a head has no effect on the context.
        const HEAD_DIM: usize = 64;
        let declared = self.config.opt_size(&["max_position_embeddings"], limits::POSITIONS).ok().flatten();
        let rope = declared.and_then(|len| RopeConfig::from_config(&self.config, HEAD_DIM, len).ok());
        rope.map_or(usize::MAX, |rope| rope.max_context_len())
    }
}

/// Checks that a config has the values that every checkpoint's config has.
pub fn check_required(config: &Config) -> Result<()> {
    match REQUIRED.into_iter().find(|key| !config.has(key)) {
        Some(key) => bail!(config.invalid(key, "the number that every checkpoint has there", "nothing")),
        None => Ok(()),
    }
}
