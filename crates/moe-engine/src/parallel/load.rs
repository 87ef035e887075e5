//! Loads a model over the ranks of a world of threads, or the part of it that belongs to one process.

use std::sync::Arc;
use std::time::Duration;

use candle_core::DType;
use model_runtime::{BlockContext, CausalLm, Exec, ParallelGroups, RankView, TensorSlice};
use moe_comm::{Communicator, Geometry, ParallelConfig, ThreadComm, Window};
#[cfg(feature = "nccl")]
use moe_comm::{NcclWindow, PeerWindow};
use moe_layer::ChunkedMoe;
use tracing::info;

use super::ranks::{LocalRanks, Rank};
use crate::error::{Context, Result, ensure, failed};
use crate::family::{LoadOptions, ModelSpec};
use crate::{panic_text, usage};

/// The time that a rank waits for another one in one collective. It is far longer than any layer computes.
const PATIENCE: Duration = Duration::from_secs(300);

/// A data-parallel replica: a model together with the context in which it runs.
#[derive(Clone)]
pub struct Replica {
    /// The model, split over its tensor-parallel ranks.
    pub model: Arc<dyn CausalLm>,
    /// The context in which its first rank runs.
    pub ex: Exec,
    /// The world of its ranks. Its engine marks the world as failed when the engine cannot continue.
    pub world: Arc<dyn Communicator>,
}

/// The arguments of loading that are the same for all ranks.
pub struct Source<'a> {
    /// The model.
    pub model: &'a dyn ModelSpec,
    /// Returns whether the checkpoint has a tensor of this name.
    pub has: &'a (dyn Fn(&str) -> bool + Sync),
    /// Returns the tensors as a rank with these slices sees them.
    pub tensors: &'a (dyn Fn(Vec<TensorSlice>) -> RankView + Sync),
    /// The model dtype.
    pub dtype: DType,
    /// Returns the load options of the rank with this context.
    pub options: &'a (dyn Fn(BlockContext) -> LoadOptions + Sync),
    /// How MoE layers split their tokens into chunks.
    pub chunked_moe: ChunkedMoe,
}

/// The geometry of a rank and the slices that it reads.
type Place = (Geometry, Vec<TensorSlice>);

/// Loads every rank of `parallel`, each with its own slices, and returns the choice that the oracle made on the first
/// rank. `ex` gives the instruction set and the threads, which the ranks share evenly.
pub fn load(
    source: &Source,
    parallel: &ParallelConfig,
    ex: &Exec,
) -> Result<(Vec<Replica>, serde_json::Value)> {
    let world = ThreadComm::world_with_timeout(parallel.world_size()?, PATIENCE);
    load_over(source, parallel, world.into_iter().map(|comm| Arc::new(comm) as _).collect(), ex)
}

/// Does the same as [`load`] over an existing world. `comms` are the communicators of its ranks, in order.
///
/// # Errors
/// The world has another size, or [`load`] fails.
pub fn load_over(
    source: &Source,
    parallel: &ParallelConfig,
    comms: Vec<Arc<dyn Communicator>>,
    ex: &Exec,
) -> Result<(Vec<Replica>, serde_json::Value)> {
    let world = parallel.world_size()?;
    ensure!(comms.len() == world, "loading {world} ranks over {} communicators", comms.len());
    let threads = (ex.num_threads() / world).max(1);
    let places = (0..world).map(|rank| place(source, parallel, rank, ex)).collect::<Result<Vec<_>>>()?;
    let load_rank =
        |(comm, place): (Arc<dyn Communicator>, Place)| load_place(source, place, comm, None, ex, threads);
    let load_rank = &load_rank;
    let ranks = std::thread::scope(|scope| {
        let threads: Vec<_> =
            comms.into_iter().zip(places).map(|place| scope.spawn(move || load_rank(place))).collect();
        let joined = threads.into_iter().map(|thread| thread.join());
        let rank = |joined: std::thread::Result<Result<_>>| {
            joined.map_err(|panic| failed!("a rank panicked while it loaded: {}", panic_text(&*panic)))?
        };
        joined.map(rank).collect::<Result<Vec<_>>>()
    })?;
    let mut ranks = ranks.into_iter();
    let first = parallel.geometry(0)?;
    info!(
        tp = parallel.tp, dp = parallel.dp, ep = first.ep_size, backend = %first.backend, threads_per_rank = threads,
        "running on {world} ranks, threads of this process"
    );
    let mut replicas = Vec::new();
    let mut chosen = serde_json::Value::Null;
    while let Some((first, ex, backend)) = ranks.next() {
        let followers = ranks.by_ref().take(parallel.tp - 1).map(|(rank, ex, _)| (rank, ex)).collect();
        let model = LocalRanks::new(first, followers)?;
        if replicas.is_empty() {
            chosen = backend;
        }
        replicas.push(Replica { world: model.world(), model: Arc::new(model), ex });
    }
    Ok((replicas, chosen))
}

/// A rank, the context in which it runs, and the oracle's choice.
type Loaded = (Rank, Exec, serde_json::Value);

/// Loads the rank of this process, on `threads` threads and on the device of `ex`. `device` is the communicator of the
/// GPUs of all ranks, if they run on GPUs.
pub(crate) fn load_rank(
    source: &Source,
    parallel: &ParallelConfig,
    comm: Arc<dyn Communicator>,
    device: Option<Arc<dyn Communicator>>,
    ex: &Exec,
    threads: usize,
) -> Result<Loaded> {
    let place = place(source, parallel, comm.rank(), ex);
    load_place(source, place.inspect_err(|e| comm.abort(&format!("{e:#}")))?, comm, device, ex, threads)
}

/// Returns the geometry and the slices of a rank. If the geometry cannot split a size of the model, that is a mistake
/// in the call, which is found before anything is loaded.
fn place(source: &Source, parallel: &ParallelConfig, rank: usize, ex: &Exec) -> Result<Place> {
    let geometry = parallel.geometry(rank)?;
    let layout = source.model.layout(&geometry, source.has).map_err(|e| usage(e.to_string()))?;
    Ok((geometry, layout.slices_for(ex.device())))
}

fn load_place(
    source: &Source,
    (geometry, slices): Place,
    comm: Arc<dyn Communicator>,
    device: Option<Arc<dyn Communicator>>,
    ex: &Exec,
    threads: usize,
) -> Result<Loaded> {
    let invariant = ex.batch_invariant();
    let fp8_activations = ex.fp8_activations();
    let ex = Exec::on(ex.device())?.with_isa(ex.isa())?.with_threads(threads)?;
    let mut ex = ex.with_batch_invariant(invariant).with_fp8_activations(fp8_activations);
    let load = || -> Result<_> {
        let groups = ParallelGroups::new(&geometry, comm.clone(), &mut Exec::cpu())?;
        // Layers exchange their data from GPU to GPU.
        let layers = match &device {
            Some(device) => ParallelGroups::new(&geometry, device.clone(), &mut ex)?,
            None => groups.clone(),
        };
        let tensors = (source.tensors)(slices);
        let owners = layers.ep.clone();
        let context = BlockContext {
            quant: Some(Arc::new(tensors.clone())),
            geometry: geometry.clone(),
            groups: layers,
            chunked_moe: source.chunked_moe,
            sliced_weights: true,
            cpu_isa: ex.device().is_cpu().then(|| ex.isa()),
            ..BlockContext::default()
        };
        let vb = tensors.var_builder(source.dtype, ex.device());
        let loaded = source.model.load(&(source.options)(context), vb);
        let loaded = loaded.with_context(|| format!("loading rank {}", geometry.rank))?;
        let window = landing_window(loaded.model.as_ref(), (groups.ep.as_ref(), owners), &ex)?;
        Ok((loaded, groups, window))
    };
    let (loaded, groups, window) = load().inspect_err(|e| comm.abort(&format!("{e:#}")))?;
    Ok((Rank { model: loaded.model, geometry, groups, device, window }, ex, loaded.backend))
}

/// Creates the window in which the experts that move to this rank's GPU arrive. This happens before the KV cache takes
/// the memory that is left. Returns `None` if experts do not move between GPUs. They travel over peer memory, or over
/// NCCL if these GPUs cannot access each other's memory. This is a collective of the ranks that share the experts, both
/// of their hosts and of their GPUs.
///
/// # Errors
/// There is no memory left, or a collective fails.
#[cfg(feature = "nccl")]
fn landing_window(
    model: &dyn CausalLm,
    (hosts, gpus): (&dyn Communicator, Arc<dyn Communicator>),
    ex: &Exec,
) -> Result<Option<Arc<dyn Window>>> {
    let layers = model.info().moe.as_ref().map_or(0, |moe| moe.layers.len());
    let bytes = (0..layers).filter_map(|layer| model.placed_experts(layer)?.landing_bytes()).max();
    let Some(bytes) = bytes.filter(|_| ex.is_cuda()) else { return Ok(None) };
    match PeerWindow::new(hosts, &mut Exec::cpu(), bytes, ex)? {
        Ok(window) => Ok(Some(Arc::new(window))),
        Err(why) => {
            info!("experts move by NCCL, between steps: the ranks cannot share memory: {why}");
            Ok(Some(Arc::new(NcclWindow::new(gpus, bytes, ex)?)))
        }
    }
}

/// Without GPUs, experts move in host memory only, so there is no window.
#[cfg(not(feature = "nccl"))]
fn landing_window(
    _: &dyn CausalLm,
    _: (&dyn Communicator, Arc<dyn Communicator>),
    _: &Exec,
) -> Result<Option<Arc<dyn Window>>> {
    Ok(None)
}
