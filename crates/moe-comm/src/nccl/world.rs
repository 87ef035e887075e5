//! State that all groups of one world share in this process: the first failure, and the thread that looks for one.
//!
//! NCCL's kernels wait for other ranks forever. So a watching thread asks two things: events on the groups' streams,
//! whether the work is done, and the library, whether its connections broke. If work is late or a connection broke, the
//! world fails. Every communicator of the world in this process is then aborted, which ends the waiting kernels and so
//! every wait for the stream.
//!
//! Ranks that are threads of one process find their common world by the identity of its group. Ranks in other processes
//! notice a failure by their own time limits and connections.

use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::thread;
use std::time::{Duration, Instant};

use candle_core::Result;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{CudaContext, CudaEvent, CudaStream};

use super::handle::Handle;
use crate::call::Op;
use crate::error::plain;
use crate::lock::lock;
use crate::overdue::Marks;
use crate::peer::Status;

/// How often the watching thread looks.
const PERIOD: Duration = Duration::from_millis(50);

/// One rank's part of a group.
pub(super) struct Group {
    /// "rank 1 of 4".
    pub name: String,
    /// The time limit for work, counted from the call.
    pub limit: Duration,
    pub handle: Handle,
    context: Arc<CudaContext>,
    marks: Mutex<Marks<CudaEvent>>,
    /// Ends the waiting of kernels over peer memory.
    peers: OnceLock<Arc<Status>>,
}

impl Group {
    pub(super) fn new(
        name: String,
        limit: Duration,
        handle: Handle,
        stream: &CudaStream,
    ) -> Result<Arc<Self>> {
        let context = stream.context().clone();
        let event = || context.new_event(None).w();
        let marks = Mutex::new(Marks::new(event()?, event()?));
        Ok(Arc::new(Self { name, limit, handle, context, marks, peers: OnceLock::new() }))
    }

    /// Makes all-reduces over peer memory fail with the group, and the group fail with them.
    pub(super) fn watch_peers(&self, status: Arc<Status>) {
        // The value is set once, when the group is made.
        let _ = self.peers.set(status);
    }

    /// The failure that the library or the peers report, if there is one.
    pub(super) fn reported(&self) -> Option<String> {
        let library = self.handle.progress().err().map(|e| plain(&e));
        library.or_else(|| self.peers.get().and_then(|peers| peers.failure()))
    }

    /// Makes the watching thread watch the work that is on the stream now. It must not be called while the stream is
    /// recorded.
    pub(super) fn mark(&self, op: Op, stream: &CudaStream) -> Result<()> {
        lock(&self.marks).add(op, Instant::now(), |event| event.record(stream)).w()
    }

    /// Why this rank's part of the group has failed, if it has.
    fn fault(&self) -> Option<String> {
        let Self { name, limit, .. } = self;
        if let Some(cause) = self.reported() {
            return Some(format!("{name} failed: {cause}"));
        }
        let late = self
            .context
            .bind_to_thread()
            .and_then(|()| lock(&self.marks).overdue(Instant::now(), *limit, CudaEvent::try_is_complete));
        match late {
            Ok(None) => None,
            Ok(Some(op)) => Some(format!(
                "{op} on {name} did not end within {limit:?}: another rank stalled, died or called something else"
            )),
            Err(e) => Some(format!("{name} failed: the device reports {e}")),
        }
    }
}

/// The groups of one world in which this process takes part.
pub(super) struct World {
    failure: OnceLock<String>,
    groups: Mutex<Vec<Weak<Group>>>,
}

/// The worlds of this process, by the identity of their first group.
static WORLDS: Mutex<Vec<([u8; 128], Weak<World>)>> = Mutex::new(Vec::new());

impl World {
    /// The world with this identity, with a thread that watches it.
    pub(super) fn join(id: [u8; 128]) -> Result<Arc<Self>> {
        let mut worlds = lock(&WORLDS);
        worlds.retain(|(_, world)| world.strong_count() > 0);
        if let Some(world) = worlds.iter().find(|(i, _)| *i == id).and_then(|(_, world)| world.upgrade()) {
            return Ok(world);
        }
        let world = Arc::new(Self { failure: OnceLock::new(), groups: Mutex::default() });
        let watched = Arc::downgrade(&world);
        thread::Builder::new().name("nccl-watch".to_string()).spawn(move || watch(watched))?;
        worlds.push((id, Arc::downgrade(&world)));
        Ok(world)
    }

    /// Adds a group that fails with the world.
    pub(super) fn register(&self, group: &Arc<Group>) {
        {
            let mut groups = lock(&self.groups);
            groups.retain(|group| group.strong_count() > 0);
            groups.push(Arc::downgrade(group));
        }
        if self.failure().is_some() {
            abort(group.clone());
        }
    }

    /// The first failure.
    pub(super) fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    /// Fails every group, unless one has failed before.
    pub(super) fn fail(&self, cause: String) {
        if self.failure.set(cause).is_ok() {
            self.groups().into_iter().for_each(abort);
        }
    }

    /// Ends every group in this process without informing the other ranks.
    pub(super) fn leave(&self) {
        if self.failure.set("this rank has left".to_string()).is_ok() {
            self.groups().iter().for_each(|group| group.handle.leave());
        }
    }

    fn groups(&self) -> Vec<Arc<Group>> {
        lock(&self.groups).iter().filter_map(Weak::upgrade).collect()
    }
}

/// Aborts the group on a separate thread. Aborting waits until recorded graphs are dropped, and the thread that fails a
/// world must not wait for that.
fn abort(group: Arc<Group>) {
    if let Some(peers) = group.peers.get() {
        peers.stop();
    }
    let here = group.clone();
    if thread::Builder::new().name("nccl-abort".to_string()).spawn(move || group.handle.abort()).is_err() {
        here.handle.abort();
    }
}

/// Looks at the groups of a world until it ends or fails.
fn watch(world: Weak<World>) {
    loop {
        thread::sleep(PERIOD);
        let Some(world) = world.upgrade() else { return };
        if world.failure().is_some() {
            return;
        }
        if let Some(cause) = world.groups().iter().find_map(|group| group.fault()) {
            // A rank that fails the world itself reports a better cause than a connection that broke because of it.
            world.fail(cause);
        }
    }
}
