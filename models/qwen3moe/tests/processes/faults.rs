//! Ranks without which nothing goes on: when one is killed, all others soon end, name the killed rank, and leave no
//! process running. What goes on is in `lost`.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::{MOVING, MP, answers, program, stderr, succeeds, write_batch};

/// The longest time from a rank's death to the end of all others.
pub const SOON: Duration = Duration::from_secs(30);

const GEOMETRY: [&str; 6] = ["--tp", "2", "--dp", "2", "--enable-expert-parallel", "--log=warn"];
/// Groups that do not wait for each other in steps.
const REPLICAS: [&str; 5] = ["--tp", "2", "--dp", "2", "--log=warn"];

/// The processes of a run by rank, found by the folder that their command lines name.
pub fn processes(folder: &Path) -> BTreeMap<usize, u32> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Some(id) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        let read = |name: &str| fs::read(entry.path().join(name)).unwrap_or_default();
        let words = String::from_utf8_lossy(&read("cmdline")).into_owned();
        let environment = String::from_utf8_lossy(&read("environ")).into_owned();
        if words.contains(folder.to_str().unwrap()) && !environment.is_empty() {
            let rank = environment.split('\0').find_map(|pair| pair.strip_prefix("RANK="));
            found.insert(rank.map_or(0, |rank| rank.parse().unwrap()), id);
        }
    }
    found
}

pub fn signal(name: &str, target: &str) {
    assert!(Command::new("kill").args([name, "--", target]).status().unwrap().success());
}

pub fn wait_until(what: &str, done: impl Fn() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < 2 * SOON, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub struct Batch {
    pub dir: tempfile::TempDir,
    args: Vec<String>,
}

impl Batch {
    pub fn new(lines: usize, max_tokens: usize) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
        write_batch(&dir.path().join("in.jsonl"), lines, |i| if i < 4 { 2 } else { max_tokens });
        let args =
            ["batch", "--input", &path("in.jsonl"), "--output", &path("out.jsonl"), "--max-num-seqs", "4"];
        Self { args: args.map(str::to_string).to_vec(), dir }
    }

    pub fn output(&self) -> PathBuf {
        self.dir.path().join("out.jsonl")
    }

    /// Starts the run, and waits until a record is written and all ranks are running.
    fn start(&self, geometry: &[&str]) -> Child {
        let run = self.spawn(geometry, "300");
        assert_eq!(processes(self.dir.path()).into_keys().collect::<Vec<_>>(), [0, 1, 2, 3]);
        run
    }

    /// Starts the run with a time limit (seconds) for a collective, and waits until a record is written.
    pub fn spawn(&self, geometry: &[&str], limit: &str) -> Child {
        let mut command = program();
        command.args(&self.args).args(geometry).args(MP).stdin(Stdio::null()).stderr(Stdio::piped());
        // A terminal sends Ctrl-C to a whole process group.
        let run = command.env("MOE_COLLECTIVE_TIMEOUT", limit).process_group(0).spawn().unwrap();
        wait_until("no record is written", || fs::metadata(self.output()).is_ok_and(|m| m.len() > 0));
        run
    }

    pub fn rerun(&self) {
        succeeds(&self.args.iter().map(String::as_str).collect::<Vec<_>>());
    }
}

/// Without the first replica nothing goes on.
#[test]
fn a_rank_of_the_first_replica_that_is_killed_ends_all_and_a_rerun_completes() {
    kill_each_rank(&REPLICAS, 0..2, 200);
    kill_each_rank(&GEOMETRY, 0..2, 60);
}

/// Without data parallelism nothing goes on, either.
#[test]
fn a_rank_that_is_killed_ends_all_and_a_rerun_completes() {
    kill_each_rank(&["--tp", "4", "--enable-expert-parallel", "--log=warn"], 0..4, 60);
}

/// Experts are being moved between ranks in nearly every step.
#[test]
fn a_rank_that_is_killed_while_experts_move_ends_all_and_a_rerun_completes() {
    kill_each_rank(&MOVING, 0..2, 60);
}

fn kill_each_rank(geometry: &[&str], ranks: Range<usize>, max_tokens: usize) {
    let whole = Batch::new(16, max_tokens);
    whole.rerun();
    let want = answers(&whole.output());
    for rank in ranks {
        let batch = Batch::new(16, max_tokens);
        let run = batch.start(geometry);
        let start = Instant::now();
        let ids = processes(batch.dir.path());
        signal("-KILL", &ids[&rank].to_string());
        let output = run.wait_with_output().unwrap();
        assert!(!output.status.success(), "rank {rank}");
        // Every remaining rank names the killed one.
        let named =
            stderr(&output).lines().filter(|line| line.contains(&format!("rank {rank} died"))).count();
        assert!(named >= 1, "rank {rank}:\n{}", stderr(&output));
        if rank > 0 {
            assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
        }
        wait_until("a process is left", || processes(batch.dir.path()).is_empty());
        assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
        let done = answers(&batch.output());
        // The death of a rank leaves its lines unanswered.
        assert!(!done.is_empty() && done.len() < 16, "{} records", done.len());
        assert!(done.iter().all(|record| want.contains(record)), "{done:?}");
        batch.rerun();
        assert_eq!(answers(&batch.output()), want, "rank {rank}");
    }
}

#[test]
fn ctrl_c_ends_a_batch_and_all_its_ranks() {
    for geometry in [&GEOMETRY[..], &REPLICAS] {
        let batch = Batch::new(64, 200);
        let run = batch.start(geometry);
        signal("-INT", &format!("-{}", run.id()));
        let output = run.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
        assert!(stderr(&output).contains("run the same command again"), "{}", stderr(&output));
        assert!(!stderr(&output).contains("error"), "{}", stderr(&output));
        wait_until("a process is left", || processes(batch.dir.path()).is_empty());
    }
}

/// A rank that hangs is detected by the time limit.
#[test]
fn a_rank_that_is_stopped_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let heat = dir.path().join("heat.jsonl");
    let flags = ["--tp", "2", "--prompt", "x", "--max-new-tokens", "2000", "--ignore-eos", "--log", "warn"];
    let mut command = program();
    command.args(flags).args(MP).arg("--expert-heat").arg(&heat).env("MOE_COLLECTIVE_TIMEOUT", "1");
    let run = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    wait_until("nothing is computed", || fs::metadata(&heat).is_ok_and(|m| m.len() > 0));
    let ids = processes(dir.path());
    signal("-STOP", &ids[&1].to_string());
    let start = Instant::now();
    let output = run.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stderr(&output).contains("rank 1 stalled"), "{}", stderr(&output));
    wait_until("a process is left", || processes(dir.path()).is_empty());
    assert!(start.elapsed() < SOON);
}
