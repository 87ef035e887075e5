//! Reads what a launcher's environment says about this process, as plain data.
//!
//! | launcher | rank, size, local rank | address of rank 0 |
//! |---|---|---|
//! | torchrun, Kubernetes jobs | `RANK`, `WORLD_SIZE`, `LOCAL_RANK` | `MASTER_ADDR`, `MASTER_PORT` |
//! | mpirun (Open MPI) | `OMPI_COMM_WORLD_{RANK,SIZE,LOCAL_RANK}` | `MASTER_ADDR`; one host: 127.0.0.1 |
//! | srun (Slurm) | `SLURM_{PROCID,STEP_NUM_TASKS or NTASKS,LOCALID}` | `MASTER_ADDR`; else the step's first node |
//!
//! Under torchrun the ranks meet at the port after `MASTER_PORT` (before it, if that is the last),
//! which is taken by torchrun's own store (`TORCHELASTIC_USE_AGENT_STORE`).
//!
//! The first row that is present wins, because launchers nest in that order. srun starts mpirun's daemons, and either
//! may start one torchrun per host. Each leaves its variables in the environment of the next one. A row that is only
//! partly present is an error; nothing is guessed.

use crate::env::Env;
use crate::error::{LaunchError, refuse};
use crate::hostlist::first_host;
use crate::launcher::Launcher;

/// Port of the master when mpirun gives none (torch's default).
pub const DEFAULT_MASTER_PORT: u16 = 29500;

/// A process that a launcher started as one rank of a world.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Launch {
    /// The launcher that started it.
    pub launcher: Launcher,
    /// Its rank in the world.
    pub rank: usize,
    /// Ranks in the world.
    pub world_size: usize,
    /// Its rank among the ranks of its host: the device to use.
    pub local_rank: usize,
    /// Number of ranks on its host, if the launcher says it.
    pub local_world_size: Option<usize>,
    /// Host of rank 0.
    pub master_addr: String,
    /// Port of rank 0.
    pub master_port: u16,
}

/// The launch that an environment describes, or `None` if no launcher started this process. `lookup` returns a
/// variable's value, so `|name| std::env::var(name).ok()` reads the real one.
///
/// ```
/// use moe_comm::launch_from_env;
/// let rank = [("RANK", "3"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "1")];
/// let env = [&rank[..], &[("MASTER_ADDR", "host0"), ("MASTER_PORT", "29500")]].concat();
/// let launch = launch_from_env(|name| env.iter().find(|(n, _)| *n == name).map(|(_, v)| v.to_string()))?;
/// assert_eq!(launch.map(|l| (l.rank, l.world_size, l.local_rank)), Some((3, 4, 1)));
/// # Ok::<(), moe_comm::LaunchError>(())
/// ```
pub fn launch_from_env(lookup: impl Fn(&str) -> Option<String>) -> Result<Option<Launch>, LaunchError> {
    let env = Env(&lookup);
    if env.any(&["RANK", "LOCAL_RANK"]) {
        return torchrun(&env).map(Some);
    }
    if env.any(&["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"]) {
        return open_mpi(&env).map(Some);
    }
    if env.get("SLURM_PROCID").is_some()
        && let Some(launch) = slurm(&env)?
    {
        return Ok(Some(launch));
    }
    // There is no rank variable at all, but other variables of a launcher are left: ignoring them silently would hide a
    // mistake.
    match env.any(&["WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]) {
        true => torchrun(&env).map(Some),
        false => Ok(None),
    }
}

const TORCHRUN: [&str; 5] = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"];

fn torchrun(env: &Env) -> Result<Launch, LaunchError> {
    env.complete(
        Launcher::Torchrun,
        &TORCHRUN,
        "set all of them (LOCAL_RANK is 0 where each host runs one rank), or unset all of them",
    )?;
    let names = ["RANK", "WORLD_SIZE", "LOCAL_RANK"];
    let mut launch = checked(env, Launcher::Torchrun, names, Some("LOCAL_WORLD_SIZE"), (None, None))?;
    // torchrun keeps a store of its own at the port of rank 0, for ranks that use torch.
    if env.get("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|used| used.eq_ignore_ascii_case("true")) {
        launch.master_port = launch.master_port.checked_add(1).unwrap_or(launch.master_port - 1);
    }
    Ok(launch)
}

fn open_mpi(env: &Env) -> Result<Launch, LaunchError> {
    let names = ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"];
    let local_size = "OMPI_COMM_WORLD_LOCAL_SIZE";
    env.complete(Launcher::OpenMpi, &names, "start the ranks with Open MPI's mpirun")?;
    let one_host = env.optional_number(local_size)? == Some(env.number(names[1])?);
    let host = one_host.then(|| "127.0.0.1".to_string());
    checked(env, Launcher::OpenMpi, names, Some(local_size), (host, Some(DEFAULT_MASTER_PORT)))
}

/// Returns `None` in a batch script of one task and in an interactive allocation: srun did not start these, although
/// some of its variables are set there.
fn slurm(env: &Env) -> Result<Option<Launch>, LaunchError> {
    const STEP: [&str; 4] = ["SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"];
    let rank = env.number("SLURM_PROCID")?;
    if !env.any(&STEP) && env.get("MASTER_ADDR").is_none() && rank == 0 {
        let tasks = env.optional_number("SLURM_NTASKS")?.unwrap_or(1);
        if tasks > 1 {
            refuse!(
                LaunchError::Contradiction,
                "SLURM_NTASKS is {tasks}, but this process is not a task of a Slurm step; start the ranks with srun, \
                 or ask for one task (--ntasks=1) and let this process start its own ranks"
            )
        }
        return Ok(None);
    }
    // An interactive step inherits the allocation's SLURM_NTASKS, so the step's own count comes first.
    let size =
        if env.get("SLURM_STEP_NUM_TASKS").is_some() { "SLURM_STEP_NUM_TASKS" } else { "SLURM_NTASKS" };
    let names = ["SLURM_PROCID", size, "SLURM_LOCALID"];
    env.complete(Launcher::Slurm, &names, "start the ranks with srun")?;
    let nodes = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"];
    let host = nodes.iter().find_map(|name| env.get(name)).and_then(|list| first_host(&list));
    checked(env, Launcher::Slurm, names, None, (host, slurm_port(env)?)).map(Some)
}

/// A port that every rank of a step computes in the same way, and that differs between jobs on a shared node: it
/// depends on job and step, and is below the usual ephemeral range.
fn slurm_port(env: &Env) -> Result<Option<u16>, LaunchError> {
    let job = match env.optional_number("SLURM_JOB_ID")? {
        Some(job) => Some(job),
        None => env.optional_number("SLURM_JOBID")?,
    };
    let step = env.optional_number("SLURM_STEP_ID")?.unwrap_or(0);
    Ok(job.map(|job| 20_000 + ((job % 10_000 * 31 + step % 10_000) % 10_000) as u16))
}

/// The launch that a launcher's variables describe. The names are of the rank, the number of ranks, the rank on its
/// host and, if there is such a variable, the number of ranks on the host. The defaults are the address and port of
/// rank 0.
fn checked(
    env: &Env,
    launcher: Launcher,
    [n_rank, n_size, n_local]: [&str; 3],
    n_local_size: Option<&str>,
    (default_addr, default_port): (Option<String>, Option<u16>),
) -> Result<Launch, LaunchError> {
    let rank = env.number(n_rank)?;
    let size = env.number(n_size)?;
    let local = env.number(n_local)?;
    let local_size = n_local_size.map(|name| env.optional_number(name)).transpose()?.flatten();
    let relate = |holds: bool, name: &str, value: usize, other_name: &str, other: usize, expected: &str| {
        if !holds {
            refuse!(
                LaunchError::Contradiction,
                "the launcher's environment contradicts itself: {name} is {value}, but {other_name} is {other}; \
                 expected {expected}"
            )
        }
        Ok(())
    };
    relate(rank < size, n_rank, rank, n_size, size, "a rank below the number of ranks")?;
    // A host numbers its ranks in ascending order, so a rank's place on its host never exceeds it.
    relate(local <= rank, n_local, local, n_rank, rank, "a local rank of at most the rank")?;
    if let (Some(n_local_size), Some(local_size)) = (n_local_size, local_size) {
        let expected = "a local rank below the number of local ranks";
        relate(local < local_size, n_local, local, n_local_size, local_size, expected)?;
        let expected = "at most all ranks on one host";
        relate(local_size <= size, n_local_size, local_size, n_size, size, expected)?;
    }
    if let Some(world) = env.optional_number("WORLD_SIZE")? {
        relate(world == size, "WORLD_SIZE", world, n_size, size, "equal numbers of ranks")?;
    }
    let missing = |missing: &str| LaunchError::Incomplete {
        launcher,
        present: n_rank.to_string(),
        missing: missing.to_string(),
        remedy: "set it to the host and port of rank 0 for every rank".to_string(),
    };
    let master_addr = env.address("MASTER_ADDR")?.or(default_addr).ok_or_else(|| missing("MASTER_ADDR"))?;
    let master_port = env.port("MASTER_PORT")?.or(default_port).ok_or_else(|| missing("MASTER_PORT"))?;
    Ok(Launch {
        launcher,
        rank,
        world_size: size,
        local_rank: local,
        local_world_size: local_size,
        master_addr,
        master_port,
    })
}
