//! The processes of a run, one for each rank, from the point of view of one of them.
//!
//! Rank 0 is the driver. It ends the others by a message that tells them to stop, which is the only way for them to end
//! successfully. If a process ends in another way, or if the driver is dropped, all of them fail.

use std::net::{Ipv4Addr, TcpListener, ToSocketAddrs};
use std::ops::Range;
use std::process::{Child, Command, Stdio};
#[cfg(feature = "nccl")]
use std::sync::OnceLock;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use model_runtime::Exec;
use moe_comm::{
    Communicator, Join, Launch, Messages, ParallelConfig, SocketComm, SocketTimeouts, WORLD_SECRET,
    WorldSecret, launch_from_env,
};
use tracing::{info, warn};

use super::follow::Follower;
use super::followers::Followers;
use super::launch::{Placement, placement};
use super::load::{Replica, Source, load_rank};
#[cfg(feature = "nccl")]
use super::nccl::Devices;
use super::ranks::LocalRanks;
use crate::chat::this_program;
use crate::error::{Context, Result, bail};
use crate::run_config::RunConfig;
use crate::terminal::note_error;
use crate::{end_failed, usage};

/// The time that a process has to end by itself after the world has failed. In that time it may be computing, or
/// waiting for a person to type.
const GRACE: Duration = Duration::from_secs(10);

/// The message by which a rank tells rank 0 that it has loaded.
const LOADED: &[u8] = b"loaded";

/// The environment variable that names the process which started a rank.
const PARENT: &str = "MOE_PARENT_PID";

/// The ranks of this process.
pub(crate) enum Ranks {
    /// Data-parallel replicas, at least one.
    Replicas(Vec<Replica>),
    /// A rank that follows the first rank of its group, which is in another process.
    Follower(Box<Follower>),
}

/// The process of one rank, as a part of the run.
pub(crate) struct Processes {
    pub(super) world: Arc<SocketComm>,
    pub messages: Messages,
    /// The longest time that a collective may take.
    #[cfg_attr(not(feature = "nccl"), allow(dead_code))]
    limit: Duration,
    /// This rank's number among the ranks of its host. It is also the number of its GPU.
    pub local_rank: usize,
    /// Number of ranks on this host, if it is known.
    pub(super) local_world_size: Option<usize>,
    /// The ranks that this host had at first, or all ranks if that is not known.
    pub(super) host: Range<usize>,
    /// Number of replicas at first.
    pub replicas: usize,
    /// Number of ranks of a tensor-parallel group.
    tp: usize,
    /// This rank's GPU among the GPUs of the other ranks, if the ranks run on GPUs.
    #[cfg(feature = "nccl")]
    devices: OnceLock<Devices>,
    children: Children,
    finished: bool,
}

impl Processes {
    /// Forms the world. If no launcher has started the processes, it starts them first. Returns `None` if all ranks are
    /// in this process.
    ///
    /// # Errors
    /// Some ranks do not appear, or were started with other settings.
    pub fn start(config: &RunConfig, model: &str, ex: &Exec) -> Result<Option<Self>> {
        let env = |name: &str| std::env::var(name).ok();
        let timeouts = SocketTimeouts::from_env(env).map_err(|e| usage(e.to_string()))?;
        let (launch, listener, secret, children) = match placement(config)? {
            Placement::Threads => return Ok(None),
            Placement::Launched(launch) => {
                end_with_parent(false)?;
                let secret = WorldSecret::from_env(env).map_err(|e| usage(e.to_string()))?;
                if secret.is_none() {
                    warn_of_strangers(&launch);
                }
                (launch, None, secret, Children::default())
            }
            Placement::Start => {
                let world_size = config.parallel.world_size()?;
                config.device.check_visible(world_size)?;
                let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("cannot open a port")?;
                let port = listener.local_addr()?.port();
                // The secret is created anew for each run, so no other process of this host can take the place of a
                // rank.
                let secret = WorldSecret::random().context("cannot make a secret for the ranks")?;
                let children = Children::start(world_size, port, &secret)?;
                (local_launch(0, world_size, port)?, Some(listener), Some(secret), children)
            }
        };
        let alive = || children.check().map_err(candle_core::Error::msg);
        let agreed = config.agreed(model, ex);
        let join = Join { timeouts, listener, secret, alive: &alive, ..Join::new(&launch, agreed) };
        let comm = SocketComm::connect(join)?;
        if config.survives() {
            comm.survive_replicas(config.parallel.tp);
        }
        if config.regroups() {
            comm.survive_by_regrouping(config.parallel.tp);
        }
        end_with_world(&comm)?;
        end_with_parent(true)?;
        let Launch { rank, local_rank, local_world_size, .. } = launch;
        let first = rank.saturating_sub(local_rank);
        let host = local_world_size.map_or(0..launch.world_size, |ranks| first..first + ranks);
        Ok(Some(Self {
            messages: comm.messages(),
            world: Arc::new(comm),
            limit: timeouts.collective,
            local_rank,
            local_world_size,
            host,
            replicas: config.parallel.dp,
            tp: config.parallel.tp,
            #[cfg(feature = "nccl")]
            devices: OnceLock::new(),
            children,
            finished: false,
        }))
    }

    /// Returns the result of `begin`. If it fails, the other ranks receive the reason.
    pub fn explained<T>(&self, begin: impl FnOnce() -> Result<T>) -> Result<T> {
        begin().inspect_err(|e| self.world.abort(&format!("{e:#}")))
    }

    /// Joins the GPUs of all ranks, if the ranks run on GPUs.
    fn join_devices(&self, ex: &Exec) -> Result<Option<Arc<dyn Communicator>>> {
        #[cfg(feature = "nccl")]
        if ex.is_cuda() {
            let joined = self.explained(|| Devices::join(&self.world, self.limit, ex))?;
            return Ok(Some(self.devices.get_or_init(|| joined).communicator()));
        }
        let _ = ex;
        Ok(None)
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.world.world_size()
    }

    /// This process's rank in the world.
    pub fn rank(&self) -> usize {
        self.world.rank()
    }

    /// The largest number of ranks that may share this host's memory.
    pub fn local_world_size(&self) -> usize {
        self.local_world_size.unwrap_or(self.world.world_size())
    }

    /// Loads the rank of this process, and waits until all other ranks have loaded theirs.
    pub fn load(
        &self,
        source: &Source,
        parallel: &ParallelConfig,
        ex: &Exec,
    ) -> Result<(Ranks, serde_json::Value)> {
        // If a launcher such as srun does not say how many ranks share the host, it gives each rank cores of its own.
        let threads = (ex.num_threads() / self.local_world_size.unwrap_or(1)).max(1);
        let device = self.join_devices(ex)?;
        let (rank, ex, chosen) = load_rank(source, parallel, self.world.clone(), device, ex, threads)?;
        self.wait_for_all()?;
        let geometry = rank.geometry.clone();
        info!(
            tp = parallel.tp, dp = parallel.dp, ep = geometry.ep_size, backend = %geometry.backend,
            threads_per_rank = threads, "running on {} ranks, a process each", geometry.world_size
        );
        if geometry.tp_rank > 0 {
            return Ok((Ranks::Follower(Box::new(Follower::new(rank, ex))), chosen));
        }
        let followers = (geometry.rank + 1..geometry.rank + geometry.tp_size).collect();
        let followers = Followers::Processes(self.messages.clone(), followers);
        let world = rank.groups.world.clone();
        let model = Arc::new(LocalRanks::with_followers(rank, followers));
        Ok((Ranks::Replicas(vec![Replica { model, ex, world }]), chosen))
    }

    /// Waits for messages and not for a collective, because loading has no time limit.
    fn wait_for_all(&self) -> Result<()> {
        if self.world.rank() > 0 {
            return Ok(self.messages.send(0, LOADED)?);
        }
        for rank in 1..self.world.world_size() {
            let said =
                self.messages.recv(rank)?.with_context(|| format!("rank {rank} left while it loaded"))?;
            if said != LOADED {
                bail!("rank {rank} did not say that it has loaded, but {} other bytes", said.len());
            }
        }
        Ok(())
    }

    /// Returns the means to reach the engines of the data-parallel ranks in other processes: the messages, and the
    /// first ranks of their groups.
    pub fn leaders(&self, parallel: &ParallelConfig) -> (Messages, Vec<usize>) {
        (self.messages.clone(), (1..parallel.dp).map(|dp_rank| dp_rank * parallel.tp).collect())
    }

    /// Ends this process's part of the run. The driver tells all other ranks that the run is done. The first rank of
    /// another group tells its followers.
    ///
    /// # Errors
    /// A process failed, or does not end. Those that were lost before do not count.
    pub fn finish(mut self) -> Result<()> {
        let rank = self.world.rank();
        let told = match rank {
            0 => 1..self.world.world_size(),
            first if first % self.tp == 0 => first + 1..first + self.tp,
            _ => 0..0,
        };
        self.finished = true;
        let sent = told.into_iter().try_for_each(|rank| self.messages.send(rank, b""));
        if rank == 0 && self.may_regroup() {
            // A rank was lost after the last step. There is nothing left that another rank would have to do.
            self.world.fail_world("the run is done");
            return self.children.wait(|_| true);
        }
        sent?;
        #[cfg(feature = "nccl")]
        if let Some(devices) = self.devices.get() {
            devices.leave(&self.world)?;
        }
        if rank == 0 {
            self.children.wait(|rank| self.messages.is_lost(rank))?;
        }
        Ok(())
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        if !self.finished {
            self.world.fail_world("it ended before its work was done");
        }
    }
}

/// The environment of a rank that this program starts.
fn local_env(rank: usize, world_size: usize, port: u16) -> [(&'static str, String); 7] {
    let rank = rank.to_string();
    let size = world_size.to_string();
    [
        ("RANK", rank.clone()),
        ("LOCAL_RANK", rank),
        ("WORLD_SIZE", size.clone()),
        ("LOCAL_WORLD_SIZE", size),
        ("MASTER_ADDR", "127.0.0.1".to_string()),
        ("MASTER_PORT", port.to_string()),
        (PARENT, std::process::id().to_string()),
    ]
}

/// Returns whether rank 0 started this process as another rank. The same terminal then controls both.
pub fn started_by_rank_0() -> bool {
    std::env::var_os(PARENT).is_some()
}

/// Warns once, on rank 0, that ranks without a secret accept every process that can reach their host.
fn warn_of_strangers(launch: &Launch) {
    let Launch { rank, master_addr, master_port, .. } = launch;
    let local = (master_addr.trim_matches(['[', ']']), *master_port)
        .to_socket_addrs()
        .is_ok_and(|mut addresses| addresses.all(|address| address.ip().is_loopback()));
    if *rank == 0 && !local {
        warn!(
            "the ranks have no secret: a process that reaches {master_addr}:{master_port} and sends the same settings gets the place of a rank; set {WORLD_SECRET} to the same 16 characters or more for all ranks"
        );
    }
}

fn local_launch(rank: usize, world_size: usize, port: u16) -> Result<Launch> {
    let env = local_env(rank, world_size, port);
    let launch = launch_from_env(|name| env.iter().find(|(n, _)| *n == name).map(|(_, v)| v.clone()))?;
    launch.context("a rank's own environment describes no launch")
}

/// The processes that this one has started: ranks 1.. of the world.
#[derive(Default)]
struct Children(Mutex<Vec<(usize, Child)>>);

impl Children {
    fn start(world_size: usize, port: u16, secret: &WorldSecret) -> Result<Self> {
        let children = Self::default();
        for rank in 1..world_size {
            let mut command = Command::new(this_program()?);
            command.args(std::env::args_os().skip(1)).envs(local_env(rank, world_size, port));
            command.env(WORLD_SECRET, secret.reveal());
            // Standard input and output belong to the driver, so the started ranks do not get them.
            command.stdin(Stdio::null()).stdout(Stdio::null());
            let child =
                command.spawn().with_context(|| format!("cannot start the process of rank {rank}"))?;
            lock(&children.0).push((rank, child));
        }
        Ok(children)
    }

    /// Returns an error once one of the processes has ended.
    fn check(&self) -> Result<(), String> {
        for (rank, child) in lock(&self.0).iter_mut() {
            if let Ok(Some(status)) = child.try_wait() {
                return Err(format!("the process of rank {rank} ended ({status})"));
            }
        }
        Ok(())
    }

    /// Waits until all processes have ended successfully. It ends the ones that were lost, which may be stopped.
    fn wait(&self, is_lost: impl Fn(usize) -> bool) -> Result<()> {
        let deadline = Instant::now() + GRACE;
        for (rank, child) in lock(&self.0).iter_mut() {
            if is_lost(*rank) {
                // An error means that it has ended.
                let _ = child.kill();
                child.wait()?;
                continue;
            }
            loop {
                match child.try_wait()? {
                    Some(status) if status.success() => break,
                    Some(status) => bail!("the process of rank {rank} ended ({status})"),
                    None if Instant::now() > deadline => bail!("the process of rank {rank} does not end"),
                    None => std::thread::sleep(Duration::from_millis(2)),
                }
            }
        }
        Ok(())
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        // Processes that still run get a moment to print why they end.
        let deadline = Instant::now() + Duration::from_secs(2);
        for (_, child) in lock(&self.0).iter_mut() {
            while Instant::now() < deadline && matches!(child.try_wait(), Ok(None)) {
                std::thread::sleep(Duration::from_millis(5));
            }
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Ends this process some time after the world has failed, if the process has not ended by then.
fn end_with_world(comm: &SocketComm) -> Result<()> {
    let watch = comm.watcher();
    let end = move || {
        let Some(cause) = watch.wait() else { return };
        std::thread::sleep(GRACE);
        note_error(cause);
        end_failed(1);
    };
    std::thread::Builder::new().name("end".into()).spawn(end).context("cannot start a thread")?;
    Ok(())
}

/// Sets whether the system kills this process when the process that started it ends. This is on until this rank is
/// connected. From then on the rank detects by itself that rank 0 has died, and reports it.
#[cfg(target_os = "linux")]
fn end_with_parent(connected: bool) -> Result<()> {
    let Ok(parent) = std::env::var(PARENT) else { return Ok(()) };
    let signal = if connected { 0 } else { libc::SIGKILL as libc::c_ulong };
    // SAFETY: The call changes a setting of this process and touches no memory.
    if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, signal) } != 0 {
        return Err(std::io::Error::last_os_error()).context("cannot ask to end with the parent process");
    }
    // The parent may have ended before the call.
    if parent != std::os::unix::process::parent_id().to_string() {
        bail!("the process that started this rank has ended");
    }
    Ok(())
}

#[cfg(not(target_os = "linux"))]
fn end_with_parent(_connected: bool) -> Result<()> {
    Ok(())
}
