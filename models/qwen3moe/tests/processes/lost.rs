//! A batch goes on without the replicas that are killed or stopped, and every line is answered once, as by one rank.
//! If replicas share experts, the ranks that are left load the model again.

use std::fs;
use std::process::Child;
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::faults::{Batch, SOON, processes, signal, wait_until};
use super::{MOVING, answers, stderr};

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

/// Experts that move as often as they can, with as many redundant ones as the ranks need at first: all have the same
/// number of slots.
fn balancing(redundant: &str) -> Vec<&str> {
    [&["--num-redundant-experts", redundant], &MOVING[7..]].concat()
}

/// Replicas that share experts, by one of the backends.
fn sharing<'a>(dp: &'a str, backend: &'a str) -> Vec<&'a str> {
    vec!["--dp", dp, "--enable-expert-parallel", "--moe-ep-backend", backend, "--log=warn"]
}

/// What happens to a rank.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fate {
    Killed,
    /// Its process is stopped. That counts after the time limit, here ten seconds.
    Stopped,
}

/// Ends ranks one after the other, each when a number of records is written. After each the run goes on with as many
/// replicas as said.
fn lose_ranks(
    geometry: &[&str],
    fate: Fate,
    (lines, max_tokens): (usize, usize),
    lost: &[(usize, usize, &str)],
) {
    let want = answers_of_one_rank(lines, max_tokens);
    let batch = Batch::new(lines, max_tokens);
    let (signal, limit, how) = match fate {
        Fate::Killed => ("-KILL", "300", "died"),
        Fate::Stopped => ("-STOP", "10", "stalled"),
    };
    let run = batch.spawn(geometry, limit);
    for &(rank, records, _) in lost {
        wait_for_records(&batch, records);
        signal_rank(&batch, signal, rank);
    }
    let said = ends_with(&batch, run, &want);
    let losses = losses(&said);
    assert_eq!(losses.len(), lost.len(), "{geometry:?} {fate:?}: {said}");
    for (&(rank, _, left), line) in lost.iter().zip(&losses) {
        assert!(line.contains(&format!("rank {rank} {how}")), "{geometry:?}: {line}");
        assert!(
            line.contains(&format!("goes on with {left} replicas, which loaded the lost experts in")),
            "{line}"
        );
        assert!(line.contains("begin again") || line.contains("begins again"), "{line}");
    }
    eprintln!("{geometry:?} {fate:?}: {losses:?}");
}

#[test]
fn the_experts_of_a_killed_rank_are_loaded_by_the_others() {
    lose_ranks(&sharing("3", "allgather_reducescatter"), Fate::Killed, (60, 60), &[(1, 6, "2 of 3")]);
    lose_ranks(&sharing("4", "deepep"), Fate::Killed, (60, 60), &[(3, 6, "3 of 4"), (1, 24, "2 of 4")]);
}

/// A single rank is left, without ranks to share experts with.
#[test]
fn the_last_rank_loads_all_experts() {
    lose_ranks(&sharing("2", "deepep"), Fate::Killed, (40, 60), &[(1, 6, "1 of 2")]);
}

/// The second rank is lost while the others form the world again, load the model, or start its engine.
#[test]
fn another_rank_is_lost_before_the_run_has_gone_on() {
    let want = answers_of_one_rank(40, 60);
    for pause in [0, 10, 40, 80, 160] {
        let batch = Batch::new(40, 60);
        let run = batch.spawn(&sharing("4", "deepep"), "300");
        wait_for_records(&batch, 6);
        signal_rank(&batch, "-KILL", 3);
        sleep(Duration::from_millis(pause));
        signal_rank(&batch, "-KILL", 1);
        let said = ends_with(&batch, run, &want);
        let losses = losses(&said);
        let last = losses.last().copied().unwrap_or_default();
        assert!(last.contains("goes on with 2 of 4 replicas"), "after {pause} ms: {said}");
        for rank in [1, 3] {
            let told = losses.iter().filter(|line| line.contains(&format!("rank {rank} died"))).count();
            assert_eq!(told, 1, "after {pause} ms: {said}");
        }
        eprintln!("after {pause} ms: {losses:?}");
    }
}

#[test]
fn the_experts_of_a_stopped_rank_are_loaded_by_the_others() {
    lose_ranks(&sharing("3", "deepep"), Fate::Stopped, (60, 60), &[(2, 6, "2 of 3")]);
}

/// The first replica is left alone, and experts still move between its ranks.
#[test]
fn a_rank_is_lost_while_experts_move() {
    let geometry = [&["--tp", "2"], &sharing("2", "auto")[..], &balancing("4")].concat();
    lose_ranks(&geometry, Fate::Killed, (24, 60), &[(3, 6, "1 of 2")]);
    let geometry = [sharing("3", "deepep"), balancing("2")].concat();
    lose_ranks(&geometry, Fate::Killed, (40, 60), &[(1, 6, "2 of 3")]);
}

#[test]
#[ignore = "minutes"]
fn batches_of_500_go_on_without_a_rank_whose_experts_all_need() {
    for fate in [Fate::Killed, Fate::Stopped] {
        for backend in ["allgather_reducescatter", "deepep"] {
            for (dp, left, redundant) in [("3", "2 of 3", "2"), ("4", "3 of 4", "4")] {
                for more in [Vec::new(), balancing(redundant)] {
                    let geometry = [sharing(dp, backend), more].concat();
                    lose_ranks(&geometry, fate, (500, 40), &[(2, 150, left)]);
                }
            }
        }
    }
}
