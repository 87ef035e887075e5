//! Opening a model for a command: checkpoint or random weights, device, dtype, backend.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use candle_core::DType;
use candle_nn::VarBuilder;
use model_runtime::{
    BlockContext, CausalLm, Checkpoint, Config, CpuIsa, DummyWeights, Exec, Geometry, RankView, TensorSlice,
};
use moe_comm::{Communicator, DeepEpMode, EpBackend, ParallelConfig};
use tracing::info;

use crate::cli::RunArgs;
use crate::device::DeviceFlag;
use crate::engine::{DpEngine, EngineConfig};
use crate::family::{LoadOptions, ModelFamily};
use crate::parallel::{self, Follower, Processes, Replica};
use crate::tokenizer::Tokenizer;
use crate::{hub, usage};

/// More threads than any machine runs well.
const MAX_THREADS: usize = 1024;

/// A model that is ready to run.
pub struct Session {
    /// The model.
    pub model: Box<dyn CausalLm>,
    /// Where it runs.
    pub ex: Exec,
    world: Arc<dyn Communicator>,
    /// The other data-parallel replicas of the model in this process.
    pub replicas: Vec<Replica>,
    parallel: ParallelConfig,
    /// The processes of the other ranks.
    processes: Option<Processes>,
    /// The checkpoint; `None` with random weights.
    pub checkpoint: Option<Checkpoint>,
    embedded_tokenizer: Option<&'static [u8]>,
}

impl Session {
    /// Opens a checkpoint folder or a model of the hub, or the embedded checkpoint if `model` is `None`.
    pub fn open<F: ModelFamily>(model: Option<&str>, args: &RunArgs, check_weights: bool) -> Result<Self> {
        Part::open::<F>(model, args, check_weights)?.session()
    }

    /// A model of this config with random weights.
    pub fn dummy<F: ModelFamily>(config: &Path, args: &RunArgs) -> Result<Self> {
        Part::dummy::<F>(config, args)?.session()
    }

    /// The engine that runs requests on all replicas.
    pub fn engine(&self, tokenizer: Option<Tokenizer>, config: &EngineConfig) -> Result<DpEngine<'_>> {
        let first = (self.model.as_ref(), self.ex.clone(), self.world.clone());
        let others = self
            .replicas
            .iter()
            .map(|replica| (replica.model.as_ref(), replica.ex.clone(), replica.world.clone()));
        let config = EngineConfig {
            ranks: match &self.processes {
                // Each has a GPU of its own.
                _ if self.ex.is_cuda() => 1,
                Some(processes) => processes.local_world_size(),
                None => self.parallel.world_size()?,
            },
            lockstep: self.parallel.enable_expert_parallel && self.parallel.dp > 1,
            enforce_eager: config.enforce_eager || self.reads_on_the_host()?,
            ..config.clone()
        };
        let remotes = self.processes.as_ref().map(|p| p.remote_engines(&self.parallel)).unwrap_or_default();
        DpEngine::with_remotes(std::iter::once(first).chain(others), remotes, tokenizer, &config)
    }

    /// Whether the expert-parallel backend decides on the host who needs a row, so that no step is a graph.
    fn reads_on_the_host(&self) -> Result<bool> {
        let geometry = self.parallel.geometry(0)?;
        let exact = match geometry.deepep_mode {
            DeepEpMode::HighThroughput => true,
            // A rank alone agrees with nobody that it only decodes.
            DeepEpMode::Auto => geometry.world_size == 1,
            DeepEpMode::LowLatency => false,
        };
        Ok(self.ex.is_cuda() && geometry.backend == EpBackend::DeepEp && exact)
    }

    /// Ends the processes of the other ranks, which is their only way to end well. What runs on the
    /// session's model is over.
    ///
    /// # Errors
    /// One of them failed.
    pub fn finish(&mut self) -> Result<()> {
        self.processes.take().map_or(Ok(()), Processes::finish)
    }

    /// The checkpoint's tokenizer.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        tokenizer(self.checkpoint.as_ref(), self.embedded_tokenizer)
    }
}

fn tokenizer(checkpoint: Option<&Checkpoint>, embedded: Option<&'static [u8]>) -> Result<Tokenizer> {
    match (embedded, checkpoint.and_then(|c| c.dir())) {
        (Some(bytes), _) => Tokenizer::from_bytes(bytes).context("the embedded tokenizer"),
        (None, Some(dir)) => Tokenizer::from_dir(dir),
        (None, None) => anyhow::bail!("a model with random weights has no tokenizer"),
    }
}

/// What this process has of a model.
pub(crate) struct Part {
    pub ranks: Ranks,
    pub processes: Option<Processes>,
    parallel: ParallelConfig,
    checkpoint: Option<Checkpoint>,
    embedded_tokenizer: Option<&'static [u8]>,
}

/// The ranks of this process.
pub(crate) enum Ranks {
    /// Data-parallel replicas, at least one.
    Replicas(Vec<Replica>),
    /// A rank that follows one in another process.
    Follower(Box<Follower>),
    /// The same on a GPU.
    #[cfg(feature = "cuda")]
    DeviceFollower(Box<crate::parallel::DeviceFollower>),
}

impl Part {
    /// As [`Session::open`].
    pub fn open<F: ModelFamily>(model: Option<&str>, args: &RunArgs, check_weights: bool) -> Result<Self> {
        let host = host_exec(args)?;
        if model.is_none() && F::embedded().is_none() {
            return Err(no_model());
        }
        let processes = Processes::start(args, model, &host)?;
        let ex = on_device(host, args, processes.as_ref())?;
        let (checkpoint, embedded_tokenizer) = match (model, F::embedded()) {
            (Some(model), _) => (Checkpoint::open(hub::resolve(model)?)?, None),
            (None, Some(e)) => {
                let checkpoint = Checkpoint::from_static(e.weights, e.config, Some(e.generation_config))?;
                (checkpoint, Some(e.tokenizer))
            }
            (None, None) => return Err(no_model()),
        };
        let config = F::config(&checkpoint.config)?;
        let has = |name: &str| checkpoint.tensors.info(name).is_some();
        let layout = F::layout(&config, &Geometry::default(), &has)?;
        checkpoint.tensors.verify(layout.tensors, F::ignored(&config))?;
        if check_weights {
            let report = checkpoint.tensors.nan_report();
            anyhow::ensure!(report.is_clean(), "the checkpoint has weights that are not finite: {report}");
        }
        let dtype = match &args.dtype {
            Some(name) => parse_dtype(name)?,
            None => checkpoint.dtype()?,
        };
        let tensors = |slices: Vec<TensorSlice>| {
            RankView::new(checkpoint.tensors.clone(), slices).var_builder(dtype, ex.device())
        };
        let loaded = load::<F>(&config, args, &has, &tensors, &ex, processes)?;
        Ok(Self { checkpoint: Some(checkpoint), embedded_tokenizer, ..loaded })
    }

    /// As [`Session::dummy`].
    pub fn dummy<F: ModelFamily>(config: &Path, args: &RunArgs) -> Result<Self> {
        let host = host_exec(args)?;
        let raw = Config::read(config)?;
        let processes = Processes::start(args, config.to_str(), &host)?;
        let ex = on_device(host, args, processes.as_ref())?;
        let config = F::config(&raw)?;
        let dtype = match &args.dtype {
            Some(name) => parse_dtype(name)?,
            None => raw.dtype()?.unwrap_or(DType::F32),
        };
        // Packed experts: one tensor is generated for each pack, at full speed.
        let specs = F::layout(&config, &Geometry::default(), &|_| true)?.tensors;
        let tensors = |slices: Vec<TensorSlice>| {
            RankView::new(DummyWeights::new(specs.clone(), 0), slices).var_builder(dtype, ex.device())
        };
        load::<F>(&config, args, &|_| true, &tensors, &ex, processes)
    }

    /// The tokenizer, if the model has one.
    pub fn tokenizer(&self) -> Option<Tokenizer> {
        tokenizer(self.checkpoint.as_ref(), self.embedded_tokenizer).ok()
    }

    fn session(self) -> Result<Session> {
        let Self { ranks, processes, parallel, checkpoint, embedded_tokenizer } = self;
        let Ranks::Replicas(mut replicas) = ranks else {
            anyhow::bail!("this process follows another one's rank and runs no command")
        };
        let Replica { model, ex, world } = replicas.remove(0);
        Ok(Session { model, ex, world, replicas, parallel, processes, checkpoint, embedded_tokenizer })
    }
}

/// The mistake of naming no model to a program that has none of its own.
pub fn no_model() -> anyhow::Error {
    usage(
        "no model is given, and none is part of this program: name one with --model (--help lists the flags)",
    )
}

/// Loads the model on one rank, on all that the flags ask for, or this process's part.
fn load<F: ModelFamily>(
    config: &F::Config,
    args: &RunArgs,
    has: &(dyn Fn(&str) -> bool + Sync),
    tensors: &(dyn Fn(Vec<TensorSlice>) -> VarBuilder<'static> + Sync),
    ex: &Exec,
    processes: Option<Processes>,
) -> Result<Part> {
    let (settings, chunked_moe) = (args.parallel.config()?, args.parallel.chunked_moe());
    let options = |context| LoadOptions {
        backend: args.moe_backend.clone(),
        moe_path: args.moe_path,
        mla: args.mla,
        context: BlockContext { batch_invariant: args.batch_invariant, ..context },
    };
    let source = parallel::Source::<F> { config, has, tensors, options: &options, chunked_moe };
    let (ranks, chosen) = if let Some(processes) = &processes {
        processes.load(&source, &settings, ex)?
    } else if settings.world_size()? == 1 {
        // One rank: its backend is `disabled`, or an explicit one over a group of itself.
        let geometry = settings.geometry(0)?;
        let context = BlockContext { geometry, chunked_moe, sliced_weights: true, ..BlockContext::default() };
        let world = context.groups.world.clone();
        let slices = F::layout(config, &context.geometry, has)?.slices_for(ex.device());
        let loaded = F::load(config, &options(context), tensors(slices))?;
        let replica = Replica { model: loaded.model, ex: ex.clone(), world };
        (Ranks::Replicas(vec![replica]), loaded.backend)
    } else {
        let (replicas, chosen) = parallel::load(&source, &settings, ex)?;
        (Ranks::Replicas(replicas), chosen)
    };
    info!(backend = %chosen["chosen"], "expert backend");
    if args.explain_backends && processes.as_ref().is_none_or(Processes::is_driver) {
        eprintln!("{}", serde_json::to_string_pretty(&chosen)?);
    }
    Ok(Part { ranks, processes, parallel: settings, checkpoint: None, embedded_tokenizer: None })
}

/// The execution context of the host that the flags ask for.
fn host_exec(args: &RunArgs) -> Result<Exec> {
    DeviceFlag::of(args)?;
    let mut ex = Exec::cpu().with_batch_invariant(args.batch_invariant);
    if let Some(isa) = &args.cpu_isa {
        ex = ex.with_isa(CpuIsa::from_name(isa).map_err(|e| usage(format!("--cpu-isa: {e}")))?)?;
    }
    if let Some(threads) = args.num_threads {
        if threads > MAX_THREADS {
            return Err(usage(format!("--num-threads {threads}: expected 1 to {MAX_THREADS}")));
        }
        ex = ex.with_threads(threads).map_err(|e| usage(format!("--num-threads {threads}: {e}")))?;
    }
    Ok(ex)
}

/// The same on the device that the flags ask for, and that is this rank's.
fn on_device(host: Exec, args: &RunArgs, processes: Option<&Processes>) -> Result<Exec> {
    let open = || DeviceFlag::of(args)?.open(processes.map_or(0, Processes::local_rank));
    let device = processes.map_or_else(open, |processes| processes.explained(open))?;
    if device.is_cpu() {
        info!(cpu_isa = host.isa().name(), threads = host.num_threads(), "running on the CPU");
        return Ok(host);
    }
    info!(device = ?device.location(), "running on CUDA");
    let ex = Exec::on(&device)?.with_isa(host.isa())?.with_batch_invariant(args.batch_invariant);
    Ok(match args.num_threads {
        Some(threads) => ex.with_threads(threads)?,
        None => ex,
    })
}

fn parse_dtype(name: &str) -> Result<DType> {
    match name {
        "f32" => Ok(DType::F32),
        "bf16" => Ok(DType::BF16),
        "f16" => Ok(DType::F16),
        other => Err(usage(format!("--dtype {other}: expected f32, bf16 or f16"))),
    }
}
