//! From settings to a model that is ready: processes, device, dtype, weights, ranks.

use std::sync::Arc;

use candle_core::DType;
use model_runtime::{
    BlockContext, Checkpoint, Config, DummyWeights, Exec, Geometry, PackOrder, QuantConfig, RankView,
    TensorSlice,
};
use tracing::{info, warn};

use crate::dequantised;
use crate::engine;
use crate::engine::EngineConfig;
use crate::error::{Context, Result, bail};
use crate::family::{Embedded, Families, ModelSpec};
use crate::footprint::{Footprint, Place, StepSizes};
use crate::parallel::{self, Processes, Ranks, Replica};
use crate::run_config::RunConfig;
use crate::tokenizer::Tokenizer;

/// What a model is made of.
#[non_exhaustive]
pub enum Weights {
    /// A checkpoint.
    Checkpoint(Checkpoint),
    /// A checkpoint that is part of the program.
    Embedded(Embedded),
    /// Random weights for this config: to measure with, not to talk to.
    Random(Config),
}

/// A run whose processes are there and whose device is open, before its model is loaded.
///
/// ```text
/// Run::start ─► session  on the first process: requests go to its engine
///            └► serve    on the others: steps come from the first one's
/// ```
pub struct Run {
    pub(crate) config: RunConfig,
    pub(crate) families: Families,
    /// The processes of all ranks; `None` if all ranks are in this process.
    pub(crate) processes: Option<Processes>,
    ex: Exec,
}

/// Weights that were checked, so that they can be loaded, also more than once.
pub(crate) enum Opened {
    Checkpoint(Box<Checkpoint>),
    Random(Config),
}

impl Run {
    /// Starts the processes of the other ranks, or joins them, and then opens the device of this process's ranks. A
    /// started process runs this program with the same arguments, and its placement is
    /// [`Placement::Launched`](parallel::Placement). The model must belong to one of `families`. `model` is its name:
    /// ranks compare these names, so that a rank that runs another model is found.
    ///
    /// # Errors
    /// Impossible settings ([`UsageError`](crate::UsageError)); a rank that does not appear or has other settings; a
    /// device that does not exist.
    pub fn start(config: &RunConfig, families: Families, model: &str) -> Result<Self> {
        config.check()?;
        let host = config.host_exec()?;
        let processes = Processes::start(config, model, &host)?;
        let ex = on_device(host, config, processes.as_ref())?;
        Ok(Self { config: config.clone(), families, processes, ex })
    }

    /// Checks that the weights of a model of this config fit in memory together with the KV cache. `engine` returns the
    /// settings of the cache, from a device's defaults. The memory is that of this process's device, or on the CPU that
    /// of this host for all its ranks. Nothing is read or downloaded. `max_context_len` is the longest sequence of the
    /// model, or `usize::MAX` if that is not known.
    ///
    /// # Errors
    /// Too little memory ([`UsageError`](crate::UsageError)), with the settings that would fit; a config that no family
    /// runs.
    pub fn check_memory(
        &self,
        config: &Config,
        quantisation: Option<&QuantConfig>,
        max_context_len: usize,
        engine: impl FnOnce(EngineConfig) -> EngineConfig,
    ) -> Result<()> {
        let check = || {
            let engine = engine(EngineConfig::for_device(&self.ex));
            self.check_room(config, quantisation, max_context_len, &engine)
        };
        match &self.processes {
            Some(processes) => processes.explained(check),
            None => check(),
        }
    }

    fn check_room(
        &self,
        config: &Config,
        quantisation: Option<&QuantConfig>,
        max_context_len: usize,
        engine: &EngineConfig,
    ) -> Result<()> {
        let on_gpu = self.ex.is_cuda();
        let (first, ranks) = match &self.processes {
            None => (0, self.config.parallel.world_size()?),
            Some(processes) if on_gpu => (processes.rank(), 1),
            // The processes of a host share its memory, so its first process checks for all of them.
            Some(processes) if processes.local_rank > 0 => return Ok(()),
            Some(processes) => (processes.rank(), processes.local_world_size()),
        };
        let Some(free) = engine::available_memory(&self.ex, engine.gpu_memory)? else { return Ok(()) };
        // A config may name no dtype. Its weights then need at least the memory of bf16, whatever they are stored in.
        let dtype = self.config.dtype.map_or_else(|| config.dtype(), |dtype| Ok(Some(dtype)))?;
        let dtype = dtype.unwrap_or(DType::BF16);
        let world = self.config.parallel.world_size()?;
        let held = (first..first + ranks).map(|rank| rank % world);
        let quantisation = self.config.held(quantisation.cloned())?;
        let quantisation = quantisation.as_ref();
        let model = self.families.parse(config)?;
        let footprint = Footprint::of(model.as_ref(), config, quantisation, &self.config, held, dtype)?;
        let place = Place {
            on_gpu,
            offload: self.config.expert_offload.filter(|_| on_gpu).unwrap_or(0) as u64,
            host_free: engine::host_memory(),
            gpus: self.config.device.gpus(),
        };
        footprint.check_weights(free, &place)?;
        let geometry = self.config.parallel.geometry(first)?;
        let states = model.states(&geometry, self.config.mla, dtype)?;
        footprint.check_cache(free, &states, &StepSizes::of(config, max_context_len)?, engine, &place)
    }

    /// The approximate number of bytes that the ranks of this process read from a checkpoint's files.
    ///
    /// # Errors
    /// A config that the family does not run; sizes that the ranks cannot divide.
    pub fn bytes_to_read(&self, checkpoint: &Checkpoint) -> Result<u64> {
        let model = self.families.parse(&checkpoint.config)?;
        let ranks = match &self.processes {
            None => 0..self.config.parallel.world_size()?,
            Some(processes) => processes.rank()..processes.rank() + 1,
        };
        let mut held = 0u64;
        let mut all = 0u64;
        for rank in ranks.clone() {
            let geometry = self.config.parallel.geometry(rank)?;
            let layout = model.layout(&geometry, &|name| checkpoint.has(name))?;
            held += layout.held().iter().map(|tensor| tensor.elements as u64).sum::<u64>();
            all += layout
                .tensors
                .iter()
                .map(|t| t.shape.iter().map(|&dim| dim as u64).product::<u64>())
                .sum::<u64>();
        }
        let share = held as f64 / all.max(1) as f64 * ranks.len() as f64;
        Ok((checkpoint.tensors.bytes() as f64 * share) as u64)
    }

    /// Loads this process's rank and does the work that rank 0's process sends, until rank 0 says stop.
    pub fn serve(mut self, weights: Weights) -> Result<()> {
        let (opened, embedded) = self.open(weights)?;
        // A missing tokenizer is an error only if requests need text. Then rank 0 gets this error.
        let tokenizer = tokenizer(opened.checkpoint(), embedded);
        let loaded = self.load(&opened);
        let mut served = loaded.and_then(|(ranks, _)| self.serve_rank(ranks, &tokenizer));
        while served.is_err() && self.may_go_on() {
            served = self.go_on(&opened).and_then(|(ranks, ..)| self.serve_rank(ranks, &tokenizer));
        }
        served?;
        self.processes.map_or(Ok(()), Processes::finish)
    }

    /// Does the work of this process's rank. The model is dropped at the end.
    fn serve_rank(&self, ranks: Ranks, tokenizer: &Result<Tokenizer>) -> Result<()> {
        let Some(processes) = &self.processes else {
            bail!("this process is a rank of its own and has no driver")
        };
        match ranks {
            Ranks::Follower(mut follower) => follower.serve(&processes.messages),
            Ranks::Replicas(replicas) => replicas.iter().try_for_each(|Replica { model, ex, world }| {
                engine::serve(model.as_ref(), ex, tokenizer, world, &processes.messages)
            }),
        }
    }

    /// Checks the weights. Returns them with the embedded tokenizer, if there is one.
    pub(crate) fn open(&self, weights: Weights) -> Result<(Opened, Option<&'static [u8]>)> {
        let (mut checkpoint, tokenizer) = match weights {
            Weights::Random(config) => return Ok((Opened::Random(config), None)),
            Weights::Checkpoint(checkpoint) => (checkpoint, None),
            Weights::Embedded(e) => {
                let checkpoint = Checkpoint::from_static(e.weights, e.config, Some(e.generation_config))?;
                (checkpoint, Some(e.tokenizer))
            }
        };
        checkpoint.quantisation = self.config.held(checkpoint.quantisation)?;
        let model = self.families.parse(&checkpoint.config)?;
        let has = |name: &str| checkpoint.has(name);
        let expected = model.layout(&Geometry::default(), &has)?.tensors;
        let verified = checkpoint.verify(&expected, model.ignored())?;
        // The warnings are written once, and not by every process.
        let tells = self.processes.as_ref().is_none_or(|processes| processes.rank() == 0);
        if tells {
            verified.warnings().for_each(|warning| warn!("{warning}"));
        }
        if self.config.check_weights {
            checkpoint.tensors.check_finite().context("the checkpoint has weights that are not finite")?;
        }
        let dtype = self.config.dtype.map_or_else(|| checkpoint.dtype(), Ok)?;
        if tells
            && let Some(told) =
                dequantised::told(model.as_ref(), &checkpoint, &expected, &self.config, dtype)?
        {
            info!("{told}");
        }
        for note in checkpoint.quantisation.iter().flat_map(|config| config.notes()) {
            warn!("{note}");
        }
        Ok((Opened::Checkpoint(Box::new(checkpoint)), tokenizer))
    }

    /// Loads the only rank, all ranks on threads, or the rank of this process.
    pub(crate) fn load(&self, opened: &Opened) -> Result<(Ranks, serde_json::Value)> {
        match opened {
            Opened::Checkpoint(checkpoint) => self.load_checkpoint(checkpoint),
            Opened::Random(config) => self.load_random(config),
        }
    }

    fn load_checkpoint(&self, checkpoint: &Checkpoint) -> Result<(Ranks, serde_json::Value)> {
        let model = self.families.parse(&checkpoint.config)?;
        let has = |name: &str| checkpoint.has(name);
        let expected = model.layout(&Geometry::default(), &has)?.tensors;
        let dtype = self.config.dtype.map_or_else(|| checkpoint.dtype(), Ok)?;
        let tensors = |slices: Vec<TensorSlice>| checkpoint.rank_view(&expected, slices);
        self.load_ranks(model.as_ref(), &has, &tensors, dtype)
    }

    fn load_random(&self, raw: &Config) -> Result<(Ranks, serde_json::Value)> {
        let model = self.families.parse(raw)?;
        let dtype = self.config.dtype.map_or_else(|| raw.dtype(), |dtype| Ok(Some(dtype)))?;
        let dtype = dtype.unwrap_or(DType::F32);
        let quantisation = self.config.held(raw.quantisation()?)?.filter(|config| !config.is_dequantised());
        // One tensor is generated for each pack of experts, which is fast. Quantised experts are separate matrices.
        // Packs in another order would have to be reordered by the host, so they are generated as matrices, too.
        let packs = model.decoder().names.matrices.pack_order == PackOrder::Rows && quantisation.is_none();
        let has = |name: &str| packs || name.ends_with(".weight");
        let specs = model.layout(&Geometry::default(), &has)?.tensors;
        let tensors = |slices: Vec<TensorSlice>| {
            let weights = DummyWeights::new(specs.clone(), 0).with_stored_dtype(dtype);
            RankView::new(weights.with_quantisation(quantisation.clone()), slices)
        };
        self.load_ranks(model.as_ref(), &has, &tensors, dtype)
    }

    fn load_ranks(
        &self,
        model: &dyn ModelSpec,
        has: &(dyn Fn(&str) -> bool + Sync),
        tensors: &(dyn Fn(Vec<TensorSlice>) -> RankView + Sync),
        dtype: DType,
    ) -> Result<(Ranks, serde_json::Value)> {
        let parallel = &self.config.parallel;
        let chunked_moe = self.config.chunked_moe;
        let ex = &self.ex;
        let placements = self.config.placements.read(self.config.eplb.is_some())?;
        let options =
            |context| self.config.load_options(BlockContext { placements: placements.clone(), ..context });
        let source = parallel::Source { model, has, tensors, dtype, options: &options, chunked_moe };
        let (ranks, chosen) = if let Some(processes) = &self.processes {
            processes.load(&source, parallel, ex)?
        } else if parallel.world_size()? == 1 {
            // The backend of a single rank is `disabled`, or one that the user names, over a group of this rank alone.
            let geometry = parallel.geometry(0)?;
            let context = BlockContext {
                geometry,
                chunked_moe,
                sliced_weights: true,
                cpu_isa: ex.device().is_cpu().then(|| ex.isa()),
                ..BlockContext::default()
            };
            let world = context.groups.world.clone();
            let slices = model.layout(&context.geometry, has)?.slices_for(ex.device());
            let tensors = tensors(slices);
            let context = BlockContext { quant: Some(Arc::new(tensors.clone())), ..context };
            let loaded = model.load(&options(context), tensors.var_builder(dtype, ex.device()))?;
            let replica = Replica { model: Arc::from(loaded.model), ex: ex.clone(), world };
            (Ranks::Replicas(vec![replica]), loaded.backend)
        } else {
            let (replicas, chosen) = parallel::load(&source, parallel, ex)?;
            (Ranks::Replicas(replicas), chosen)
        };
        info!(backend = %chosen["chosen"], "expert backend");
        Ok((ranks, chosen))
    }
}

impl Opened {
    pub fn checkpoint(&self) -> Option<&Checkpoint> {
        match self {
            Self::Checkpoint(checkpoint) => Some(checkpoint),
            Self::Random(_) => None,
        }
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

/// The host's context on the requested device. If there are processes, it is the device of this process's rank.
fn on_device(host: Exec, config: &RunConfig, processes: Option<&Processes>) -> Result<Exec> {
    let open = || config.device.open(processes.map_or(0, |processes| processes.local_rank));
    let device = processes.map_or_else(open, |processes| processes.explained(open))?;
    if device.is_cpu() {
        let cores = std::thread::available_parallelism().map_or(usize::MAX, |cores| cores.get());
        if host.num_threads() > cores {
            warn!(
                "`num_threads` {}: this process may use {cores} cores, and more threads make it slower",
                host.num_threads()
            );
        }
        info!(cpu_isa = host.isa().name(), threads = host.num_threads(), "running on the CPU");
        return Ok(host);
    }
    info!(device = ?device.location(), "running on CUDA");
    let ex = Exec::on(&device)?
        .with_isa(host.isa())?
        .with_batch_invariant(config.batch_invariant)
        .with_fp8_activations(config.fp8_activations);
    Ok(match config.num_threads {
        Some(threads) => ex.with_threads(threads)?,
        None => ex,
    })
}
