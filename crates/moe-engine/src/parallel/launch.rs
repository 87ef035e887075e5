//! Where the ranks of this run are: on threads, in processes that this one starts, or in those of a
//! launcher.

use anyhow::Result;
use moe_comm::{Launch, launch_from_env};

use super::args::{ExecutorBackend, ParallelArgs};
use crate::cli::RunArgs;
use crate::device::DeviceFlag;
use crate::usage;

/// Where the ranks are.
#[derive(Debug, PartialEq)]
pub(crate) enum Placement {
    /// All in this process.
    Threads,
    /// This process starts the others.
    Start,
    /// This process is one of a launcher's.
    Launched(Launch),
}

/// Where the flags and the environment put the ranks. A GPU belongs to a process.
///
/// # Errors
/// A launcher's environment that is incomplete, or of another number of ranks; several GPUs in one
/// process: mistakes in the call.
pub(crate) fn placement(args: &RunArgs) -> Result<Placement> {
    let on_gpus = DeviceFlag::of(args)? != DeviceFlag::Cpu;
    placement_in(&args.parallel, on_gpus, |name| std::env::var(name).ok())
}

fn placement_in(
    args: &ParallelArgs,
    on_gpus: bool,
    lookup: impl Fn(&str) -> Option<String>,
) -> Result<Placement> {
    let (config, backend) = (args.config()?, args.distributed_executor_backend);
    let several_gpus = on_gpus && config.world_size()? > 1;
    if backend == ExecutorBackend::Threads {
        if several_gpus {
            return Err(usage(
                "--distributed-executor-backend threads: ranks on GPUs are a process each; use mp, a launcher, or auto",
            ));
        }
        return Ok(Placement::Threads);
    }
    let launch = launch_from_env(lookup).map_err(|e| {
        usage(format!("{e}; --distributed-executor-backend threads does not look at the environment"))
    })?;
    match (launch, backend) {
        (None, ExecutorBackend::ExternalLauncher) => Err(usage(
            "--distributed-executor-backend external_launcher: no launcher started this process; start it with \
             torchrun, srun or mpirun, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT",
        )),
        (Some(launch), _) if launch.world_size > 1 || backend == ExecutorBackend::ExternalLauncher => {
            config.for_launch(&launch).map_err(|e| usage(e.to_string()))?;
            Ok(if launch.world_size == 1 { Placement::Threads } else { Placement::Launched(launch) })
        }
        // A launcher's only process has nobody to meet: the ranks are its own.
        (_, ExecutorBackend::Mp) if config.world_size()? > 1 => Ok(Placement::Start),
        _ if several_gpus => Ok(Placement::Start),
        _ => Ok(Placement::Threads),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;
    use clap::Parser;

    const ENV: [(&str, &str); 5] = [
        ("RANK", "1"),
        ("WORLD_SIZE", "2"),
        ("LOCAL_RANK", "1"),
        ("MASTER_ADDR", "localhost"),
        ("MASTER_PORT", "29500"),
    ];

    fn place(flags: &str, env: &[(&str, &str)]) -> Result<Placement> {
        let cli = Cli::try_parse_from(["m"].into_iter().chain(flags.split_whitespace())).unwrap();
        let lookup = |name: &str| env.iter().find(|(n, _)| *n == name).map(|(_, v)| v.to_string());
        let run = &cli.generate.run;
        placement_in(&run.parallel, run.device != "cpu", lookup)
    }

    #[test]
    fn ranks_on_gpus_are_processes() {
        assert_eq!(place("--device cuda", &[]).unwrap(), Placement::Threads);
        assert_eq!(place("--device cuda --tp 2", &[]).unwrap(), Placement::Start);
        let launched = place("--device cuda --tp 2", &ENV).unwrap();
        assert!(matches!(launched, Placement::Launched(launch) if launch.local_rank == 1));
        let error = place("--device cuda --tp 2 --distributed-executor-backend threads", &[]).unwrap_err();
        assert!(error.to_string().contains("a process each"), "{error}");
    }

    #[test]
    fn flags_and_environments() {
        for flags in ["", "--tp 2", "--distributed-executor-backend mp"] {
            assert_eq!(place(flags, &[]).unwrap(), Placement::Threads, "{flags}");
        }
        assert_eq!(place("--dp 2 --distributed-executor-backend mp", &[]).unwrap(), Placement::Start);
        for backend in
            ["", "--distributed-executor-backend mp", "--distributed-executor-backend external_launcher"]
        {
            let place = place(&format!("--tp 2 {backend}"), &ENV).unwrap();
            assert!(matches!(place, Placement::Launched(launch) if launch.rank == 1), "{backend}");
        }
        let threads = "--tp 2 --distributed-executor-backend threads";
        assert_eq!(place(threads, &ENV).unwrap(), Placement::Threads);
        let one = [("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ENV[3], ENV[4]];
        for flags in ["", "--tp 2", "--distributed-executor-backend external_launcher"] {
            assert_eq!(place(flags, &one).unwrap(), Placement::Threads, "{flags}");
        }
        assert_eq!(place("--tp 2 --distributed-executor-backend mp", &one).unwrap(), Placement::Start);
        for (flags, env, part) in [
            ("--tp 3", &ENV[..], "3"),
            ("--tp 2 --distributed-executor-backend external_launcher", &one, "1"),
            ("--tp 2", &ENV[..2], "--distributed-executor-backend threads"),
            ("", &ENV, "2"),
            ("--tp 2", &ENV[..2], "LOCAL_RANK"),
            (
                "--tp 2 --distributed-executor-backend external_launcher",
                &[],
                "no launcher started this process",
            ),
        ] {
            let error = place(flags, env).unwrap_err().to_string();
            assert!(error.contains(part), "{flags}: {error}");
        }
    }
}
