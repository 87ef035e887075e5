//! Launcher environments, as a table.

use moe_comm::{Launch, LaunchError, Launcher, ParallelConfig, launch_from_env};

/// The launch of an environment written as "NAME=value NAME=value".
fn launch(env: &str) -> Result<Option<Launch>, LaunchError> {
    let env: Vec<(&str, &str)> = env.split(' ').filter_map(|pair| pair.split_once('=')).collect();
    launch_from_env(|name| env.iter().find(|(n, _)| *n == name).map(|(_, v)| v.to_string()))
}

const TORCHRUN: &str =
    "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=host0 MASTER_PORT=29400";
const OMPI: &str = "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1";
const SLURM: &str = "SLURM_JOB_ID=12345 SLURM_STEP_ID=0 SLURM_PROCID=3 SLURM_STEP_NUM_TASKS=4 SLURM_LOCALID=1 \
                     SLURM_STEP_NODELIST=gpu[07-08] SLURM_JOB_NODELIST=gpu[01-16]";

#[test]
fn launches() {
    // launcher, rank, size, local rank, local size, address, port
    let table = [
        (TORCHRUN.to_string(), (Launcher::Torchrun, 5, 8, 1, Some(4), "host0", 29400)),
        (
            // torchrun's store uses the port.
            format!("{TORCHRUN} TORCHELASTIC_USE_AGENT_STORE=True"),
            (Launcher::Torchrun, 5, 8, 1, Some(4), "host0", 29401),
        ),
        (
            TORCHRUN.replace("29400", "65535 TORCHELASTIC_USE_AGENT_STORE=True"),
            (Launcher::Torchrun, 5, 8, 1, Some(4), "host0", 65534),
        ),
        (
            format!("{TORCHRUN} TORCHELASTIC_USE_AGENT_STORE=False"),
            (Launcher::Torchrun, 5, 8, 1, Some(4), "host0", 29400),
        ),
        (
            // A Kubernetes job with one rank per pod.
            "RANK=1 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=moe-0.moe MASTER_PORT=23456".to_string(),
            (Launcher::Torchrun, 1, 2, 0, None, "moe-0.moe", 23456),
        ),
        (
            format!("{OMPI} OMPI_COMM_WORLD_LOCAL_SIZE=4"),
            (Launcher::OpenMpi, 3, 4, 1, Some(4), "127.0.0.1", 29500),
        ),
        (
            format!("{OMPI} OMPI_COMM_WORLD_LOCAL_SIZE=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=1"),
            (Launcher::OpenMpi, 3, 4, 1, Some(2), "10.0.0.1", 1),
        ),
        (SLURM.to_string(), (Launcher::Slurm, 3, 4, 1, None, "gpu07", 22695)),
        (
            format!("{SLURM} MASTER_ADDR=fe80::1 MASTER_PORT=65535 WORLD_SIZE=4"),
            (Launcher::Slurm, 3, 4, 1, None, "fe80::1", 65535),
        ),
        (
            // Variables set by hand, or an old Slurm without the step's variables.
            "SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_LOCALID=0 MASTER_ADDR=a MASTER_PORT=9".to_string(),
            (Launcher::Slurm, 0, 2, 0, None, "a", 9),
        ),
        (
            // An interactive step of one task in an allocation of eight.
            "SLURM_JOB_ID=1 SLURM_STEP_ID=4294967290 SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_STEP_NUM_TASKS=1 SLURM_LOCALID=0 SLURM_NODELIST=n1"
                .to_string(),
            (Launcher::Slurm, 0, 1, 0, None, "n1", 27321),
        ),
        // Launchers nest, and the innermost counts.
        (format!("{TORCHRUN} {SLURM} {OMPI}"), (Launcher::Torchrun, 5, 8, 1, Some(4), "host0", 29400)),
        (
            format!("{OMPI} OMPI_COMM_WORLD_LOCAL_SIZE=4 SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_LOCALID=0"),
            (Launcher::OpenMpi, 3, 4, 1, Some(4), "127.0.0.1", 29500),
        ),
    ];
    for (env, expected) in table {
        let got = launch(&env).unwrap_or_else(|e| panic!("{env}: {e}")).unwrap();
        let place = (got.launcher, got.rank, got.world_size, got.local_rank, got.local_world_size);
        assert_eq!(
            (place.0, place.1, place.2, place.3, place.4, &*got.master_addr, got.master_port),
            expected,
            "{env}"
        );
    }
}

#[test]
fn no_launcher() {
    for env in [
        "",
        "HOME=/root",
        "RANK= WORLD_SIZE= MASTER_ADDR=",
        // A batch script of one task, and the shell of an allocation: srun started neither.
        "SLURM_JOB_ID=7 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=1 SLURM_JOB_NODELIST=n1",
        "SLURM_JOB_ID=7 SLURM_PROCID=0 SLURM_LOCALID=0",
        "SLURM_JOB_ID=7 SLURM_NTASKS=8 SLURM_JOB_NODELIST=n1",
    ] {
        assert_eq!(launch(env), Ok(None), "{env}");
    }
}

#[test]
fn environments_that_are_refused() {
    let remedy = "set all of them (LOCAL_RANK is 0 where each host runs one rank), or unset all of them";
    let master = "set it to the host and port of rank 0 for every rank";
    let partial = |launcher: &str, present: &str, missing: &str, remedy: &str| {
        format!(
            "the environment of {launcher} is incomplete: {present} is set, but {missing} is not; {remedy}"
        )
    };
    let torchrun = "torchrun or a Kubernetes job";
    let table = [
        ("RANK=0", partial(torchrun, "RANK", "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT", remedy)),
        (
            "RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1",
            partial(torchrun, "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT", "LOCAL_RANK", remedy),
        ),
        ("MASTER_ADDR=a", partial(torchrun, "MASTER_ADDR", "RANK, WORLD_SIZE, LOCAL_RANK, MASTER_PORT", remedy)),
        ("WORLD_SIZE=2", partial(torchrun, "WORLD_SIZE", "RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT", remedy)),
        (
            "OMPI_COMM_WORLD_SIZE=2",
            partial(
                "mpirun",
                "OMPI_COMM_WORLD_SIZE",
                "OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_LOCAL_RANK",
                "start the ranks with Open MPI's mpirun",
            ),
        ),
        (
            "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2",
            partial("mpirun", "OMPI_COMM_WORLD_RANK", "MASTER_ADDR", master),
        ),
        (
            "SLURM_PROCID=1 SLURM_STEP_ID=0 SLURM_NTASKS=2",
            partial("srun", "SLURM_PROCID, SLURM_NTASKS", "SLURM_LOCALID", "start the ranks with srun"),
        ),
        (
            "SLURM_PROCID=1 SLURM_STEP_ID=0 SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_JOB_ID=1",
            partial("srun", "SLURM_PROCID", "MASTER_ADDR", master),
        ),
        (
            "SLURM_PROCID=1 SLURM_STEP_ID=0 SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_NODELIST=a",
            partial("srun", "SLURM_PROCID", "MASTER_PORT", master),
        ),
        (
            "SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_LOCALID=0 SLURM_JOB_ID=1",
            "SLURM_NTASKS is 4, but this process is not a task of a Slurm step; start the ranks with srun, or ask for \
             one task (--ntasks=1) and let this process start its own ranks"
                .to_string(),
        ),
        (
            "RANK=x WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=a MASTER_PORT=1",
            "the environment variable RANK is \"x\"; expected a whole number of at least 0".to_string(),
        ),
        (
            "RANK=0 WORLD_SIZE=-2 LOCAL_RANK=0 MASTER_ADDR=a MASTER_PORT=1",
            "the environment variable WORLD_SIZE is \"-2\"; expected a whole number of at least 0".to_string(),
        ),
        (
            "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=a MASTER_PORT=0",
            "the environment variable MASTER_PORT is \"0\"; expected a port between 1 and 65535".to_string(),
        ),
        (
            "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=a MASTER_PORT=70000",
            "the environment variable MASTER_PORT is \"70000\"; expected a port between 1 and 65535".to_string(),
        ),
        (
            "RANK=2 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=a MASTER_PORT=1",
            "the launcher's environment contradicts itself: RANK is 2, but WORLD_SIZE is 2; expected a rank below the \
             number of ranks"
                .to_string(),
        ),
        (
            "RANK=0 WORLD_SIZE=0 LOCAL_RANK=0 MASTER_ADDR=a MASTER_PORT=1",
            "the launcher's environment contradicts itself: RANK is 0, but WORLD_SIZE is 0; expected a rank below the \
             number of ranks"
                .to_string(),
        ),
        (
            "RANK=0 WORLD_SIZE=2 LOCAL_RANK=1 MASTER_ADDR=a MASTER_PORT=1",
            "the launcher's environment contradicts itself: LOCAL_RANK is 1, but RANK is 0; expected a local rank of \
             at most the rank"
                .to_string(),
        ),
        (
            "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=1 MASTER_ADDR=a MASTER_PORT=1",
            "the launcher's environment contradicts itself: LOCAL_RANK is 1, but LOCAL_WORLD_SIZE is 1; expected a \
             local rank below the number of local ranks"
                .to_string(),
        ),
        (
            "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=a MASTER_PORT=1",
            "the launcher's environment contradicts itself: LOCAL_WORLD_SIZE is 4, but WORLD_SIZE is 2; expected at \
             most all ranks on one host"
                .to_string(),
        ),
        (
            "SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=4 SLURM_LOCALID=1 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1",
            "the launcher's environment contradicts itself: WORLD_SIZE is 2, but SLURM_STEP_NUM_TASKS is 4; expected \
             equal numbers of ranks"
                .to_string(),
        ),
    ];
    for (env, expected) in table {
        assert_eq!(launch(env).map_err(|e| e.to_string()), Err(expected), "{env}");
    }
    let blank = launch_from_env(|name| match name {
        "MASTER_ADDR" => Some("two hosts".to_string()),
        _ => Some("1".to_string()),
    });
    assert!(blank.is_err());
}

#[test]
fn a_launch_must_be_as_large_as_the_settings() {
    let launched = launch(TORCHRUN).unwrap().unwrap();
    let config = ParallelConfig { tp: 4, dp: 2, ..Default::default() };
    let geometry = config.for_launch(&launched).unwrap();
    assert_eq!((geometry.rank, geometry.dp_rank, geometry.tp_rank), (5, 1, 1));
    let error = ParallelConfig { dp: 1, ..config }.for_launch(&launched).unwrap_err().to_string();
    assert_eq!(error, "dp 1 x tp 4 needs 4 ranks, but 8 were started; change dp, tp or the launcher");
}
