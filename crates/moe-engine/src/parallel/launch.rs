//! Decides where the ranks of this run are placed: on threads of this process, in processes that this process starts,
//! or in processes that a launcher started.

use moe_comm::{Launch, launch_from_env};

use crate::device::DeviceChoice;
use crate::error::{Result, usage};
use crate::run_config::{ExecutorBackend, RunConfig};

/// Where the ranks are.
#[derive(Debug, PartialEq)]
#[non_exhaustive]
pub enum Placement {
    /// All ranks are threads of this process.
    Threads,
    /// This process starts the processes of the other ranks.
    Start,
    /// A launcher started this process and the processes of the other ranks.
    Launched(Launch),
}

/// Returns where the settings and the environment place the ranks. Every GPU belongs to a process of its own.
///
/// # Errors
/// These are mistakes in the call: the launcher's environment is incomplete or names another number of ranks, or one
/// process would have several GPUs.
pub fn placement(config: &RunConfig) -> Result<Placement> {
    config.check()?;
    placement_in(config, |name| std::env::var(name).ok())
}

fn placement_in(config: &RunConfig, lookup: impl Fn(&str) -> Option<String>) -> Result<Placement> {
    let parallel = &config.parallel;
    let backend = config.executor;
    let several = parallel.world_size()? > 1;
    let several_gpus = several && config.device != DeviceChoice::Cpu;
    if backend == ExecutorBackend::Threads {
        if several_gpus {
            return Err(usage(
                "`executor` threads: ranks on GPUs are a process each; use mp, a launcher, or auto",
            ));
        }
        return Ok(Placement::Threads);
    }
    let launch = launch_from_env(lookup)
        .map_err(|e| usage(format!("{e}; `executor` threads does not look at the environment")))?;
    match (launch, backend) {
        (None, ExecutorBackend::ExternalLauncher) => Err(usage(
            "`executor` external_launcher: no launcher started this process; start it with \
             torchrun, srun or mpirun, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT",
        )),
        (Some(launch), _) if launch.world_size > 1 || backend == ExecutorBackend::ExternalLauncher => {
            parallel.for_launch(&launch).map_err(|e| usage(e.to_string()))?;
            Ok(if launch.world_size == 1 { Placement::Threads } else { Placement::Launched(launch) })
        }
        // A launcher started this process alone, so all ranks are created by this process.
        (_, ExecutorBackend::Mp) if several => Ok(Placement::Start),
        _ if several_gpus => Ok(Placement::Start),
        _ => Ok(Placement::Threads),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moe_comm::ParallelConfig;

    const ENV: [(&str, &str); 5] = [
        ("RANK", "1"),
        ("WORLD_SIZE", "2"),
        ("LOCAL_RANK", "1"),
        ("MASTER_ADDR", "localhost"),
        ("MASTER_PORT", "29500"),
    ];

    use DeviceChoice::{Cpu, Cuda};
    use ExecutorBackend::{Auto, ExternalLauncher, Mp, Threads};

    fn place(tp: usize, executor: ExecutorBackend, env: &[(&str, &str)]) -> Result<Placement> {
        on(Cpu, tp, executor, env)
    }

    fn on(
        device: DeviceChoice,
        tp: usize,
        executor: ExecutorBackend,
        env: &[(&str, &str)],
    ) -> Result<Placement> {
        let parallel = ParallelConfig { tp, ..ParallelConfig::default() };
        let config = RunConfig { device, parallel, executor, ..RunConfig::default() };
        placement_in(&config, |name| env.iter().find(|(n, _)| *n == name).map(|(_, v)| v.to_string()))
    }

    #[test]
    fn ranks_on_gpus_are_processes() {
        assert_eq!(on(Cuda(None), 1, Auto, &[]).unwrap(), Placement::Threads);
        assert_eq!(on(Cuda(None), 2, Auto, &[]).unwrap(), Placement::Start);
        let launched = on(Cuda(None), 2, Auto, &ENV).unwrap();
        assert!(matches!(launched, Placement::Launched(launch) if launch.local_rank == 1));
        let error = on(Cuda(None), 2, Threads, &[]).unwrap_err();
        assert!(error.to_string().contains("a process each"), "{error}");
    }

    #[test]
    fn settings_and_environments() {
        for (tp, executor) in [(1, Auto), (2, Auto), (1, Mp)] {
            assert_eq!(place(tp, executor, &[]).unwrap(), Placement::Threads, "{tp} {executor:?}");
        }
        assert_eq!(place(2, Mp, &[]).unwrap(), Placement::Start);
        for executor in [Auto, Mp, ExternalLauncher] {
            let place = place(2, executor, &ENV).unwrap();
            assert!(matches!(place, Placement::Launched(launch) if launch.rank == 1), "{executor:?}");
        }
        assert_eq!(place(2, Threads, &ENV).unwrap(), Placement::Threads);
        let one = [("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ENV[3], ENV[4]];
        for (tp, executor) in [(1, Auto), (2, Auto)] {
            assert_eq!(place(tp, executor, &one).unwrap(), Placement::Threads, "{tp} {executor:?}");
        }
        assert_eq!(place(1, ExternalLauncher, &one).unwrap(), Placement::Threads);
        assert_eq!(place(2, Mp, &one).unwrap(), Placement::Start);
        for (tp, executor, env, part) in [
            (3, Auto, &ENV[..], "3"),
            (2, ExternalLauncher, &one, "1"),
            (2, Auto, &ENV[..2], "`executor` threads"),
            (1, Auto, &ENV, "2"),
            (2, Auto, &ENV[..2], "LOCAL_RANK"),
            (2, ExternalLauncher, &[], "no launcher started this process"),
        ] {
            let error = place(tp, executor, env).unwrap_err().to_string();
            assert!(error.contains(part), "{tp} {executor:?}: {error}");
        }
    }
}
