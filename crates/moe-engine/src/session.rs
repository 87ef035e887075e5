//! A loaded model on the process that runs requests, and the engine that runs them on all its ranks.

use std::sync::Arc;

use model_runtime::{CausalLm, Checkpoint, Exec};
use moe_comm::{Communicator, ParallelConfig};
use tracing::warn;

use crate::engine::{DpEngine, EngineConfig};
use crate::eplb::EplbConfig;
use crate::error::{Context, Result, bail};
use crate::parallel::{Processes, Replica};
use crate::tokenizer::Tokenizer;

/// A model that is ready to run; [`Run::session`](crate::Run::session) makes one.
pub struct Session {
    /// The model.
    pub model: Arc<dyn CausalLm>,
    /// Where it runs.
    pub ex: Exec,
    /// The other data-parallel replicas of the model in this process.
    pub replicas: Vec<Replica>,
    /// The checkpoint; `None` with random weights.
    pub checkpoint: Option<Checkpoint>,
    /// The oracle's choice of expert backend with the rejected ones, as JSON.
    pub backend: serde_json::Value,
    pub(crate) world: Arc<dyn Communicator>,
    pub(crate) parallel: ParallelConfig,
    /// Whether engines go on without a replica that is lost.
    pub(crate) survives: bool,
    /// How engines balance the experts.
    pub(crate) eplb: Option<EplbConfig>,
    /// The processes of the other ranks.
    pub(crate) processes: Option<Processes>,
    /// The embedded tokenizer.
    pub(crate) tokenizer: Option<&'static [u8]>,
    /// The tokenizer, if it was read before the model.
    pub(crate) read_tokenizer: Option<Tokenizer>,
}

impl Session {
    /// The engine's defaults for this device and model.
    pub fn engine_defaults(&self) -> EngineConfig {
        EngineConfig::for_model(&self.ex, self.model.info())
    }

    /// The engine that runs requests on all replicas.
    pub fn engine(&self, tokenizer: Option<Tokenizer>, config: &EngineConfig) -> Result<DpEngine<'_>> {
        let first = (self.model.as_ref(), self.ex.clone(), self.world.clone());
        let config = EngineConfig {
            ranks: match &self.processes {
                // Each has a GPU of its own.
                _ if self.ex.is_cuda() => 1,
                Some(processes) => processes.local_world_size(),
                None => self.parallel.world_size()?,
            },
            eplb: config.eplb.clone().or_else(|| self.eplb.clone()),
            lockstep: self.parallel.enable_expert_parallel && self.parallel.dp > 1,
            ..config.clone()
        };
        match &self.processes {
            Some(processes) => {
                let leaders = processes.leaders(&self.parallel);
                let mut engine = DpEngine::over_processes(first, leaders, tokenizer, &config)?;
                if self.survives {
                    engine.survive();
                }
                Ok(engine)
            }
            None => DpEngine::new(first, self.replicas.clone(), tokenizer, &config),
        }
    }

    /// Ends the processes of the other ranks. Without this call they end with an error. Nothing can run on the
    /// session's model afterwards.
    pub fn finish(&mut self) -> Result<()> {
        self.processes.take().map_or(Ok(()), Processes::finish)
    }

    /// Keeps the checkpoint's tokenizer, which was read before the model.
    ///
    /// # Errors
    /// An end token of the checkpoint is not a valid token id.
    pub fn keep_tokenizer(&mut self, tokenizer: Tokenizer) -> Result<()> {
        let named = self.named_ends()?;
        if let Some(end) = tokenizer.end_token().filter(|end| !named.is_empty() && !named.contains(end)) {
            warn!(
                "the checkpoint's config ends texts with the tokens {named:?}, and its tokenizer with {end}: texts end at \
                 each of them"
            );
        }
        self.read_tokenizer = Some(tokenizer);
        Ok(())
    }

    /// The ids that end a text: the ones in generation_config.json, or else in config.json, and the tokenizer's.
    pub fn eos_token_ids(&self) -> Result<Vec<u32>> {
        let mut ids = self.named_ends()?;
        let own = self.read_tokenizer.as_ref().and_then(Tokenizer::end_token);
        ids.extend(own.filter(|own| !ids.contains(own)));
        Ok(ids)
    }

    fn named_ends(&self) -> Result<Vec<u32>> {
        match &self.checkpoint {
            Some(checkpoint) => Ok(checkpoint.eos_token_ids()?),
            None => Ok(Vec::new()),
        }
    }

    /// The checkpoint's tokenizer.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        if let Some(tokenizer) = &self.read_tokenizer {
            return Ok(tokenizer.clone());
        }
        tokenizer(self.checkpoint.as_ref(), self.tokenizer)
    }
}

/// The embedded tokenizer, or the one in a checkpoint's folder.
pub(crate) fn tokenizer(
    checkpoint: Option<&Checkpoint>,
    embedded: Option<&'static [u8]>,
) -> Result<Tokenizer> {
    match (embedded, checkpoint.and_then(|c| c.dir())) {
        (Some(bytes), _) => Tokenizer::from_bytes(bytes).context("the embedded tokenizer"),
        (None, Some(dir)) => Tokenizer::from_dir(dir),
        (None, None) => bail!("a model with random weights has no tokenizer"),
    }
}
