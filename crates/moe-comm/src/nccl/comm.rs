//! A rank in a group of GPUs that communicate by NCCL.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, TryLockError};
use std::time::{Duration, Instant};

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::sys::CUstreamCaptureStatus;
use candle_core::{Error, Result, bail};
use moe_kernels::{Exec, Scratch, View, ViewMut};

use super::handle::{self, Handle, Progress};
use super::library;
use super::over_peers::over_peers;
use super::world::{Group, World};
use crate::DEFAULT_TIMEOUT;
use crate::call::{Call, Op};
use crate::check::Place;
use crate::error::CommError;
use crate::parts::Request;
use crate::peer::PeerAllReduce;
use crate::round::wait::{Outcome, Stop};
use crate::socket::Watch;

/// One rank in a group of GPUs that communicate by NCCL.
///
/// - **Order.** A collective puts its work on the stream of the given context and returns. Later ops of that context
///   see its result. Only [`barrier`](crate::Collectives::barrier) and collectives on views of host memory wait for the
///   device.
/// - **Host memory.** Views of host memory are copied through scratch memory of the device, and the call waits. This is
///   for small exchanges outside of a step. All views of one call must be in the same kind of memory.
/// - **Graphs.** Collectives on device views can be recorded into a [`Graph`](moe_kernels::cuda::Graph); every rank
///   must record the same ones. Their buffers must live as long as the graph: take them from the workspace, which keeps
///   them. Drop the graphs before the communicator; otherwise the communicator stays until the process ends. A replay
///   is not watched: call [`watch`](crate::Communicator::watch) after it.
/// - **Failures.** Work that has not ended within the time limit fails the world. The limit counts from the call and so
///   includes earlier work on the stream. Broken connections, wrong arguments, panics and
///   [`abort`](crate::Communicator::abort) fail it as well. All communicators of the world in this process are then
///   aborted, and a host that waits for the stream continues. Results are unspecified, so call
///   [`check`](crate::Communicator::check) before using them. NCCL sends no reasons: a rank in another process learns
///   of a failure by its own limit or connections.
/// - **Peer memory.** Where the ranks can share memory, four kinds of collectives run on a [`PeerAllReduce`]: sums of
///   f32 and bf16 of up to [`PeerAllReduce::CAPACITY`] bytes; gathers of parts of whole 16 bytes (of integers: 8);
///   scattered sums of such parts in f32; and the [fused collectives](crate::FusedCollective) of device views. They all
///   run on the stream that the communicator was made with. NaNs may lose their payload.
/// - **Sums.** The result has the same bits on every rank. Sums over peer memory are added in rank order in f32. For
///   other sums NCCL chooses the order of addition by size and topology, and rounds between additions of f16 and bf16.
///   Whether a maximum or minimum returns a NaN is not defined.
/// - **Agreement.** NCCL does not compare calls. Ranks that disagree about dtypes or counts may get wrong data. Ranks
///   that call different collectives stall until the time limit.
///
/// Each eager call starts a thread on the host (some 10 us), because a library call that blocks cannot be aborted.
/// Recorded calls have no such cost on replay. NCCL's own variable `NCCL_COMM_BLOCKING=1` avoids the threads, but then
/// calls can hang while connections are made.
pub struct NcclComm {
    place: Place,
    /// This field is declared before `group`, so that it is dropped first, which waits for its kernels.
    peers: std::result::Result<PeerAllReduce, String>,
    uses_peers: AtomicBool,
    group: Arc<Group>,
    world: Arc<World>,
    /// Ordinal of the device.
    device: usize,
    /// Held during a call.
    turn: Mutex<()>,
}

impl NcclComm {
    /// Makes a new identity for a group. One rank makes it and sends it to all others.
    ///
    /// # Errors
    /// NCCL is too old, or finds no network interface.
    pub fn unique_id() -> Result<[u8; 128]> {
        handle::unique_id()
    }

    /// The version of the NCCL that is loaded, such as "2.28.9".
    ///
    /// # Errors
    /// NCCL is too old.
    pub fn version() -> Result<String> {
        Ok(library::version()?.to_string())
    }

    /// Joins the group of `id` as `rank` of `world_size`, on the device of `ex`. Returns when all ranks
    /// have joined. The time limit is [`DEFAULT_TIMEOUT`].
    ///
    /// # Errors
    /// No CUDA context; a rank outside of the world; NCCL is too old; a rank did not join in time.
    pub fn new(id: [u8; 128], rank: usize, world_size: usize, ex: &Exec) -> Result<Self> {
        Self::with_timeout(id, rank, world_size, ex, DEFAULT_TIMEOUT)
    }

    /// Like [`new`](Self::new), with a time limit for joining and for each collective.
    pub fn with_timeout(
        id: [u8; 128],
        rank: usize,
        world_size: usize,
        ex: &Exec,
        limit: Duration,
    ) -> Result<Self> {
        if rank >= world_size {
            bail!("NCCL: rank {rank} is outside of a world of {world_size} ranks")
        }
        let context = ex.stream()?.context().clone();
        context.bind_to_thread().w()?;
        let handle = Handle::init(id, rank, world_size)?;
        let place = Place { rank, size: world_size };
        let name = format!("rank {rank} of {world_size}");
        Self::join(place, name, limit, handle, World::join(id)?, ex)
    }

    /// Leaves the world with all of its groups in this process; later calls fail. Dropping a communicator instead makes
    /// the ranks of a host wait for each other in the library. Call this in a process that is about to end, when no
    /// rank has work left.
    pub fn leave(&self) {
        self.world.leave();
    }

    /// Aborts this world as soon as the world of the hosts has failed, and reports the cause of that failure. The hosts
    /// know which rank died, while kernels would wait for it forever. A separate thread does this; it ends with the
    /// world of the hosts.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn end_with(self: &Arc<Self>, hosts: Watch) -> Result<()> {
        let device = Arc::downgrade(self);
        let end = move || {
            if let (Some(cause), Some(device)) = (hosts.wait(), device.upgrade()) {
                device.fail(&format!("aborted: {cause}"));
            }
        };
        std::thread::Builder::new().name("end-nccl".into()).spawn(end)?;
        Ok(())
    }

    /// Makes the rank of the group that `handle` is joining.
    fn join(
        place: Place,
        name: String,
        limit: Duration,
        handle: Handle,
        world: Arc<World>,
        ex: &Exec,
    ) -> Result<Self> {
        let stream = ex.stream()?;
        let group = Group::new(name, limit, handle, stream)?;
        world.register(&group);
        let device = stream.context().ordinal();
        let peers = Err("the group is not complete".to_string());
        let uses_peers = AtomicBool::new(true);
        let mut comm = Self { place, peers, uses_peers, group, world, device, turn: Mutex::new(()) };
        if let Err(stop) = comm.settle(&comm.group.handle, "joining the group") {
            return Err(comm.failed("", stop));
        }
        // The watching thread ends a wait within twice the limit, and knows which collective was called. The kernels'
        // own, longer limit is for a process whose threads all hang.
        comm.peers = PeerAllReduce::new(&comm, &mut ex.clone(), limit.saturating_mul(4), ex)?;
        if let Ok(peers) = &comm.peers {
            comm.group.watch_peers(peers.status().clone());
        }
        Ok(comm)
    }

    /// The all-reduces over peer memory, or why the ranks cannot share memory.
    pub fn peers(&self) -> std::result::Result<&PeerAllReduce, &str> {
        self.peers.as_ref().map_err(String::as_str)
    }

    /// Sets whether small sums use peer memory where they can (the default), for comparisons. All ranks must make the
    /// same setting between the same two calls.
    pub fn use_peers(&self, on: bool) {
        self.uses_peers.store(on, Ordering::Relaxed);
    }

    pub(super) fn usable_peers(&self) -> Option<&PeerAllReduce> {
        self.peers.as_ref().ok().filter(|_| self.uses_peers.load(Ordering::Relaxed))
    }

    pub(super) fn place(&self) -> Place {
        self.place
    }

    /// Runs a collective whose checked arguments gave `call`. Without `input`, `out` is both input and output.
    /// `request` says what to do with the views, which are in device memory.
    pub(super) fn collective<'c>(
        &self,
        op: Op,
        call: Result<Call>,
        input: Option<View<'_>>,
        mut out: ViewMut<'_>,
        ex: &mut Exec,
        request: impl for<'v> FnOnce(Option<View<'v>>, ViewMut<'v>) -> Result<Request<'v, 'c>>,
    ) -> Result<()> {
        self.guarded(op, || {
            call?;
            if out.is_cuda() {
                return self.launch(op, request(input, out)?, ex);
            }
            let (input, mut result) = self.staged(input, &out, ex)?;
            let views = request(input.as_ref().map(|input| input.view()), result.view_mut())?;
            self.launch(op, views, ex)?;
            self.wait(ex)?;
            Ok(out.copy_from(ex.to_host(result.view())?.view())?)
        })
    }

    /// Copies host views to the device. Without an input, the contents of the output are copied.
    fn staged(
        &self,
        input: Option<View<'_>>,
        out: &ViewMut<'_>,
        ex: &Exec,
    ) -> Result<(Option<Scratch>, Scratch)> {
        if is_recorded(ex)? {
            bail!("views of host memory cannot take part in a recorded graph; pass views of the device")
        }
        match input {
            Some(input) => Ok((Some(ex.scratch_from_host(input)?), ex.scratch(out.dtype(), out.dims())?)),
            None => Ok((None, ex.scratch_from_host(out.as_view())?)),
        }
    }

    /// Runs one call of this rank; any failure fails the world.
    pub(super) fn guarded<T>(&self, op: Op, f: impl FnOnce() -> Outcome<T>) -> Result<T> {
        let outcome = match self.turn.try_lock() {
            _ if self.world.failure().is_some() => Err(Stop::Failed),
            Err(TryLockError::WouldBlock) => {
                Err(Stop::Cause(format!("called {op} while another of its threads was in a collective")))
            }
            _turn => f(),
        };
        outcome.map_err(|stop| self.failed(&format!("{op} on "), stop))
    }

    /// Runs a call that puts its own work on the stream of the context.
    pub(super) fn on_stream(
        &self,
        op: Op,
        ex: &mut Exec,
        f: impl FnOnce(&mut Exec) -> Result<()>,
    ) -> Result<()> {
        self.guarded(op, || {
            f(ex)?;
            self.mark(op, ex)
        })
    }

    /// Puts a collective on the stream of the context.
    pub(super) fn launch(&self, op: Op, mut request: Request<'_, '_>, ex: &mut Exec) -> Outcome<()> {
        let at = ex.stream()?.context().ordinal();
        if at != self.device {
            let own = self.device;
            return Err(Stop::Cause(format!("expected a context on CUDA device {own}, got one on {at}")));
        }
        if !over_peers(self.usable_peers(), &mut request, ex)?
            && self.group.handle.launch(&request.parts(self.place)?, ex)? == Progress::Busy
        {
            self.settle(&self.group.handle, op.name())?;
        }
        self.mark(op, ex)
    }

    /// Makes the watching thread watch the work on the stream, unless the stream is being recorded.
    pub(super) fn mark(&self, op: Op, ex: &Exec) -> Outcome<()> {
        if !is_recorded(ex)? {
            self.group.mark(op, ex.stream()?)?;
        }
        Ok(())
    }

    /// Waits until the library has finished the last call on a handle; the device may still be working.
    fn settle(&self, handle: &Handle, what: &str) -> Outcome<()> {
        self.until(what, self.group.limit, || Ok(handle.progress()? == Progress::Done))
    }

    /// Waits for everything on the stream. The collectives on it are watched, so this ends.
    fn wait(&self, ex: &Exec) -> Outcome<()> {
        let event = ex.stream()?.record_event(None).w()?;
        self.until("the stream", Duration::MAX, || event.try_is_complete().w())
    }

    /// Repeats a question until the answer is yes, the world has failed, or the time is over.
    fn until(&self, what: &str, limit: Duration, mut done: impl FnMut() -> Result<bool>) -> Outcome<()> {
        let start = Instant::now();
        for asked in 0u64.. {
            if self.world.failure().is_some() {
                return Err(Stop::Failed);
            }
            if done()? {
                break;
            }
            if start.elapsed() > limit {
                return Err(Stop::Cause(format!(
                    "{what} did not end within {limit:?}: another rank is missing"
                )));
            }
            // The library's thread needs some 10 us, so the first repetitions only yield; after that the waiting rank
            // sleeps between them.
            match asked {
                0..1000 => std::thread::yield_now(),
                _ => std::thread::sleep(Duration::from_micros(50)),
            }
        }
        Ok(())
    }

    /// The group of the ranks with the same colour.
    pub(super) fn part(&self, color: usize, key: usize, ex: &Exec) -> Outcome<Self> {
        if is_recorded(ex)? {
            return Err(Stop::Cause("groups cannot be split while a graph is recorded".to_string()));
        }
        ex.stream()?.context().bind_to_thread().w()?;
        let slot = self.group.handle.split_begin(color, key)?;
        self.settle(&self.group.handle, "split")?;
        let handle = self.group.handle.split_end(&slot)?;
        self.settle(&handle, "split")?;
        let (rank, size) = handle.place()?;
        let name = format!("rank {rank} of {size} (split from {})", self.group.name);
        let limit = self.group.limit;
        let world = self.world.clone();
        Ok(Self::join(Place { rank, size }, name, limit, handle, world, ex)?)
    }

    /// Fails the world for a cause of this rank, and returns its failure as this rank reports it.
    pub(super) fn failed(&self, context: &str, stop: Stop) -> Error {
        if let Stop::Cause(cause) = stop {
            self.fail(&format!("failed: {cause}"));
        }
        let cause = self.world.failure().unwrap_or("unknown failure");
        CommError(format!("{context}{}: {cause}", self.group.name)).into()
    }

    /// Fails the world; `what` follows this rank's name.
    pub(super) fn fail(&self, what: &str) {
        self.world.fail(format!("{} {what}", self.group.name));
    }

    /// An error if the world has failed, or the library says that it has.
    pub(super) fn checked(&self) -> Result<()> {
        // No event is queried here, because that would end the recording of a graph.
        if let (None, Some(cause)) = (self.world.failure(), self.group.reported()) {
            self.fail(&format!("failed: {cause}"));
        }
        match self.world.failure() {
            Some(_) => Err(self.failed("", Stop::Failed)),
            None => Ok(()),
        }
    }
}

/// Whether the context's stream is being recorded into a graph.
pub(super) fn is_recorded(ex: &Exec) -> Result<bool> {
    let status = ex.stream()?.capture_status().w()?;
    Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

impl fmt::Debug for NcclComm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NcclComm({}, CUDA device {})", self.group.name, self.device)
    }
}

impl Drop for NcclComm {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.fail("panicked");
        }
    }
}
