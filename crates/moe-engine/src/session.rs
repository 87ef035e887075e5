//! A loaded model on the process that runs requests, and the engine that runs them on all its ranks.

use std::sync::Arc;

use model_runtime::{CausalLm, Checkpoint, Exec};
use moe_comm::Communicator;
use tracing::{info, warn};

use crate::engine::{DpEngine, EngineConfig};
use crate::error::{Result, bail};
use crate::explain;
use crate::loss::Loss;
use crate::parallel::{Processes, Ranks, Replica};
use crate::run::{Opened, Run, Weights, tokenizer};
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
    world: Arc<dyn Communicator>,
    /// The settings, and the processes of the other ranks.
    run: Run,
    opened: Opened,
    /// The embedded tokenizer.
    tokenizer: Option<&'static [u8]>,
    /// The tokenizer, if it was read before the model.
    read_tokenizer: Option<Tokenizer>,
}

impl Run {
    /// Loads the model on the process that runs requests: on the only process, or on rank 0's.
    ///
    /// # Errors
    /// Weights that do not fit the family and its config; any error of reading them.
    pub fn session(self, weights: Weights) -> Result<Session> {
        let (opened, tokenizer) = self.open(weights)?;
        let (ranks, backend) = self.load(&opened)?;
        let session = Session::new(self, opened, (ranks, backend), tokenizer)?;
        let Session { model, ex, .. } = &session;
        for slow in explain::any_shape_stages(model.as_ref(), &ex.machine()) {
            warn!("{slow}");
        }
        if let Some(rows) = explain::quantised_activations(model.as_ref(), &ex.machine()) {
            info!(
                "steps of {rows} rows and more quantise activations to FP8, like the weights (W8A8); `fp8_activations` off keeps 16 bits"
            );
        }
        Ok(session)
    }
}

impl Session {
    fn new(
        run: Run,
        opened: Opened,
        (ranks, backend): (Ranks, serde_json::Value),
        tokenizer: Option<&'static [u8]>,
    ) -> Result<Self> {
        let Ranks::Replicas(mut replicas) = ranks else {
            bail!("this process follows another one's rank and runs no requests")
        };
        let Replica { model, ex, world } = replicas.remove(0);
        let checkpoint = opened.checkpoint().cloned();
        Ok(Self {
            model,
            ex,
            replicas,
            checkpoint,
            backend,
            world,
            run,
            opened,
            tokenizer,
            read_tokenizer: None,
        })
    }

    /// Whether an engine's error is the loss of a rank that the others survive by [going on](Self::go_on).
    pub fn may_go_on(&self) -> bool {
        self.run.may_go_on()
    }

    /// Loads the model again on the ranks that are left, after the loss of a rank whose experts all ranks need. Before
    /// that the engine is [left](DpEngine::leave), and afterwards a new one takes over its requests.
    ///
    /// # Errors
    /// The ranks that are left cannot hold the model, or no rank was lost. All of them then end.
    pub fn go_on(self) -> Result<(Self, Loss)> {
        let Self { model, replicas, world, mut run, opened, tokenizer, read_tokenizer, .. } = self;
        drop((model, replicas, world));
        let (ranks, backend, loss) = run.go_on(&opened)?;
        let session = Self::new(run, opened, (ranks, backend), tokenizer)?;
        Ok((Self { read_tokenizer, ..session }, loss))
    }

    /// The engine's defaults for this device and model.
    pub fn engine_defaults(&self) -> EngineConfig {
        EngineConfig::for_model(&self.ex, self.model.info())
    }

    /// The engine that runs requests on all replicas.
    pub fn engine(&self, tokenizer: Option<Tokenizer>, config: &EngineConfig) -> Result<DpEngine<'_>> {
        let first = (self.model.as_ref(), self.ex.clone(), self.world.clone());
        let Run { config: run, processes, .. } = &self.run;
        let config = EngineConfig {
            ranks: match processes {
                // Each has a GPU of its own.
                _ if self.ex.is_cuda() => 1,
                Some(processes) => processes.local_world_size(),
                None => run.parallel.world_size()?,
            },
            eplb: config.eplb.clone().or_else(|| run.eplb.clone()),
            lockstep: run.parallel.enable_expert_parallel && run.parallel.dp > 1,
            ..config.clone()
        };
        match processes {
            Some(processes) => {
                let leaders = processes.leaders(&run.parallel);
                let mut engine = DpEngine::over_processes(first, leaders, tokenizer, &config)?;
                if run.survives() || run.regroups() {
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
        self.run.processes.take().map_or(Ok(()), Processes::finish)
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
