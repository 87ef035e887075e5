//! A batch whose replicas share nothing goes on without the ones that are killed or stopped: every line is answered
//! once, as one rank answers it.

use std::fs;
use std::process::Child;
use std::time::Instant;

use serde_json::Value;

use super::faults::{Batch, SOON, processes, signal, wait_until};
use super::{answers, stderr};

/// The lines of standard error that say that a replica is lost.
fn losses(stderr: &str) -> Vec<&str> {
    stderr.lines().filter(|line| line.contains("The run goes on with")).collect()
}

/// What one rank answers to a batch of this size.
fn answers_of_one_rank(lines: usize, max_tokens: usize) -> Vec<(String, Value)> {
    let batch = Batch::new(lines, max_tokens);
    batch.rerun();
    answers(&batch.output())
}

fn signal_rank(batch: &Batch, name: &str, rank: usize) {
    signal(name, &processes(batch.dir.path())[&rank].to_string());
}

fn wait_for_records(batch: &Batch, records: usize) {
    let written = || fs::read_to_string(batch.output()).unwrap_or_default().lines().count();
    wait_until("no more records are written", || written() >= records);
}

/// Waits for the end of a run that lost replicas, and returns what it said on standard error.
fn ends_with(batch: &Batch, run: Child, want: &[(String, Value)]) -> String {
    let output = run.wait_with_output().unwrap();
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert_eq!(answers(&batch.output()), want, "{said}");
    wait_until("a process is left", || processes(batch.dir.path()).is_empty());
    said
}

/// Kills ranks 1 and 2 of three in turn, each while it has sequences.
fn kill_two_of_three(lines: usize, max_tokens: usize, first: usize, second: usize) {
    let want = answers_of_one_rank(lines, max_tokens);
    let batch = Batch::new(lines, max_tokens);
    let run = batch.spawn(&["--dp", "3", "--log=warn"], "300");
    wait_for_records(&batch, first);
    signal_rank(&batch, "-KILL", 1);
    wait_for_records(&batch, second);
    signal_rank(&batch, "-KILL", 2);
    let said = ends_with(&batch, run, &want);
    let losses = losses(&said);
    assert_eq!(losses.len(), 2, "{said}");
    for (rank, left, line) in [(1, 2, losses[0]), (2, 1, losses[1])] {
        assert!(line.contains(&format!("rank {rank} died: its connection closed")), "{line}");
        assert!(line.contains(&format!("goes on with {left} of 3 replicas")), "{line}");
        assert!(line.contains("begin again there"), "{line}");
    }
}

#[test]
fn a_batch_goes_on_without_killed_replicas() {
    kill_two_of_three(60, 100, 6, 24);
}

#[test]
#[ignore = "minutes"]
fn a_batch_of_500_goes_on_without_killed_replicas() {
    kill_two_of_three(500, 120, 100, 250);
}

/// If one rank of a replica dies, the others end and the first replica does all of the work.
#[test]
fn a_replica_ends_with_each_of_its_ranks() {
    let want = answers_of_one_rank(24, 100);
    for rank in [2, 3] {
        let batch = Batch::new(24, 100);
        let run = batch.spawn(&["--tp", "2", "--dp", "2", "--log=warn"], "300");
        signal_rank(&batch, "-KILL", rank);
        let said = ends_with(&batch, run, &want);
        let losses = losses(&said);
        assert!(losses.len() == 1 && losses[0].contains("goes on with 1 of 2 replicas"), "{said}");
        // The end of the other rank may be noticed first.
        assert!(["rank 2 died", "rank 3 died"].iter().any(|died| losses[0].contains(died)), "{said}");
    }
}

/// A stopped process keeps its connections. It counts as lost after the time limit, and does not outlive the run.
#[test]
fn a_batch_goes_on_without_a_stopped_replica() {
    let want = answers_of_one_rank(40, 100);
    let batch = Batch::new(40, 100);
    let run = batch.spawn(&["--dp", "2", "--log=warn"], "2");
    signal_rank(&batch, "-STOP", 1);
    let start = Instant::now();
    let said = ends_with(&batch, run, &want);
    let losses = losses(&said);
    assert!(losses.len() == 1 && losses[0].contains("rank 1 stalled"), "{said}");
    assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
}
