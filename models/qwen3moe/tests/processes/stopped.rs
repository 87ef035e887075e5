//! Ranks whose process is stopped, and Ctrl-C while a rank is missing, is loading, or hangs.

use std::net::{Ipv4Addr, TcpListener};
use std::process::Stdio;
use std::time::{Duration, Instant};

use super::faults::{Batch, SOON, processes, signal, wait_until};
use super::{MP, program, stderr};

/// Replicas do not wait for each other in steps, and the first one has requests of its own. Only a batch goes on
/// without one that is stopped.
#[test]
fn a_replica_that_is_stopped_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let heat = dir.path().join("heat.jsonl");
    let flags =
        ["--dp", "2", "--prompt", "x", "--num-sequences", "16", "--max-new-tokens", "2000", "--ignore-eos"];
    let mut command = program();
    command.args(flags).args(MP).args(["--log", "warn"]).arg("--expert-heat").arg(&heat);
    command.env("MOE_COLLECTIVE_TIMEOUT", "2").stdout(Stdio::null()).stderr(Stdio::piped());
    let run = command.spawn().unwrap();
    wait_until("nothing is computed", || std::fs::metadata(&heat).is_ok_and(|m| m.len() > 0));
    signal("-STOP", &processes(dir.path())[&1].to_string());
    let start = Instant::now();
    let output = run.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stderr(&output).contains("rank 1 stalled"), "{}", stderr(&output));
    assert!(start.elapsed() < Duration::from_secs(15), "{:?}", start.elapsed());
    wait_until("a process is left", || processes(dir.path()).is_empty());
}

/// The other ranks wait for messages of rank 0. A rank that has no message to send may take any time.
#[test]
fn a_stopped_rank_0_ends_the_others() {
    for geometry in [&["--dp", "2", "--log=warn"], &["--tp", "2", "--log=warn"]] {
        let batch = Batch::new(400, 400);
        let mut run = batch.spawn(geometry, "2");
        let ids = processes(batch.dir.path());
        signal("-STOP", &ids[&0].to_string());
        let ended = |id: u32| {
            // Its parent is stopped, and cannot reap it.
            let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
            stat.is_empty() || stat.contains(") Z ")
        };
        let start = Instant::now();
        wait_until("rank 1 runs on", || ended(ids[&1]));
        assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
        run.kill().unwrap();
        let output = run.wait_with_output().unwrap();
        assert!(stderr(&output).contains("rank 0 stalled"), "{geometry:?}: {}", stderr(&output));
    }
}

/// A step that waits for a hung rank does not end by itself or by the first Ctrl-C; the program does.
#[test]
fn ctrl_c_ends_a_batch_that_waits_for_a_hung_rank() {
    let batch = Batch::new(64, 200);
    let run = batch.spawn(&["--tp", "2", "--log=warn"], "300");
    let ids = processes(batch.dir.path());
    signal("-STOP", &ids[&1].to_string());
    std::thread::sleep(Duration::from_millis(300));
    let start = Instant::now();
    signal("-INT", &ids[&0].to_string());
    let output = run.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
    assert!(start.elapsed() < Duration::from_secs(15), "{:?}", start.elapsed());
    // A stopped process ends when it is continued or killed.
    signal("-KILL", &ids[&1].to_string());
    wait_until("a process is left", || processes(batch.dir.path()).is_empty());
}

/// While ranks are missing, Ctrl-C ends each waiting rank: rank 0 with any command, and any other rank.
#[test]
fn ctrl_c_ends_a_rank_that_waits_for_others() {
    let batch = Batch::new(4, 4);
    let input = batch.dir.path().join("in.jsonl");
    let output = batch.dir.path().join("none.jsonl");
    let files = ["batch", "--input", input.to_str().unwrap(), "--output", output.to_str().unwrap()];
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let taken = listener.local_addr().unwrap().port();
    let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
    // Rank 1 waits for an answer of rank 0, or for its port.
    for (rank, port, args) in
        [("0", free, &files[..]), ("0", free, &["--prompt", "x"]), ("1", taken, &files), ("1", free, &files)]
    {
        let mut command = program();
        let env = [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")];
        command.args(args).args(["--tp", "2"]).envs(env).env("MASTER_PORT", port.to_string());
        let mut run = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(700));
        assert!(run.try_wait().unwrap().is_none(), "rank {rank} waits");
        let start = Instant::now();
        signal("-INT", &run.id().to_string());
        let status = run.wait().unwrap();
        assert!(!status.success(), "{status}");
        assert!(start.elapsed() < Duration::from_secs(3), "rank {rank}: {:?}", start.elapsed());
    }
}
