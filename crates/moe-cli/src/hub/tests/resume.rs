//! Tests of connections that break, become silent or restart, and of programs that are killed.

use std::fs;
use std::time::Duration;

use super::server::{Act, Request};
use super::{Case, fixture};

const WEIGHTS: &str = "model.safetensors";

/// Returns the ranges that were requested from the storage, in order.
fn ranges(seen: &[Request]) -> Vec<&str> {
    let bodies = seen.iter().filter(|r| r.method == "GET" && r.path.starts_with("/storage/"));
    bodies.map(|r| r.range.as_deref().unwrap_or("all")).collect()
}

fn is_whole(case: &Case) {
    let dir = case.get("org/tiny").unwrap();
    assert_eq!(fs::read(dir.join(WEIGHTS)).unwrap(), fs::read(fixture("text").join(WEIGHTS)).unwrap());
    assert!(!case.partial(WEIGHTS).exists());
}

#[test]
fn a_broken_connection_is_continued_where_it_broke() {
    let case = Case::new("text");
    case.server.spoil("GET", "/storage/", 1, Act::Cut(1000));
    case.server.spoil("GET", "/storage/", 1, Act::Cut(70_000));
    case.server.spoil("GET", "/storage/", 1, Act::Status(503, "", ""));
    is_whole(&case);
    assert_eq!(ranges(&case.server.seen()), ["all", "bytes=1000-", "bytes=71000-", "bytes=71000-"]);
}

#[test]
fn a_later_run_continues_what_an_earlier_one_began() {
    let case = Case::new("text");
    case.server.spoil("GET", "/storage/", 1, Act::Cut(5000));
    case.server.spoil("GET", "/storage/", 100, Act::Cut(0));
    let error = case.error("org/tiny");
    assert!(error.contains("after 5000 of 133480 bytes") && error.contains("is kept"), "{error}");
    assert_eq!(ranges(&case.server.seen()).len(), 6, "five tries that get no further are enough");
    assert_eq!(fs::metadata(case.partial(WEIGHTS)).unwrap().len(), 5000);
    assert!(!case.folder().join("refs").exists(), "half a snapshot is no revision");
    case.server.heal();
    is_whole(&case);
    assert_eq!(ranges(&case.server.seen()), ["bytes=5000-"]);
}

#[test]
fn a_silent_server_is_given_up() {
    let mut case = Case::new("text");
    case.settings.timeout = Duration::from_millis(1500);
    case.server.spoil("GET", "/storage/", 1, Act::Stall(40_000));
    is_whole(&case);
    assert!(ranges(&case.server.seen()).contains(&"bytes=40000-"));
}

#[test]
fn a_server_without_ranges_sends_the_file_again() {
    let case = Case::new("text");
    case.server.spoil("GET", "/storage/", 1, Act::Cut(30_000));
    case.server.spoil("GET", "/storage/", 1, Act::IgnoreRange);
    is_whole(&case);
    assert_eq!(ranges(&case.server.seen()), ["all", "bytes=30000-"]);
}

/// A download that finds the bytes `left` from an earlier attempt requests these ranges, and completes the file.
fn goes_on(left: &[u8], expected: &[&str]) {
    let case = Case::new("text");
    fs::create_dir_all(case.folder().join("blobs")).unwrap();
    fs::write(case.partial(WEIGHTS), left).unwrap();
    is_whole(&case);
    assert_eq!(ranges(&case.server.seen()), expected);
}

#[test]
fn what_a_killed_program_left_is_used_or_replaced() {
    let weights = fs::read(fixture("text").join(WEIGHTS)).unwrap();
    // In the first case the program was killed before the last step, so nothing is requested. In the second the part is
    // longer than the file, so it belongs to another file.
    for (left, expected) in [(weights.clone(), vec![]), ([&weights[..], b"x"].concat(), vec!["all"])] {
        goes_on(&left, &expected);
    }
}

#[test]
fn a_range_that_is_refused_starts_over() {
    let case = Case::new("text");
    fs::create_dir_all(case.folder().join("blobs")).unwrap();
    fs::write(case.partial(WEIGHTS), b"abc").unwrap();
    case.server.spoil("GET", "/storage/", 1, Act::Status(416, "", ""));
    is_whole(&case);
    assert_eq!(ranges(&case.server.seen()), ["bytes=3-", "all"]);
}

/// After a power failure a file may have its full length with zeros at its end.
#[test]
fn what_has_another_hash_is_downloaded_again() {
    let weights = fs::read(fixture("text").join(WEIGHTS)).unwrap();
    let lost = |len: usize| [&weights[..len - 1000], &[0; 1000]].concat();
    for (left, expected) in [(lost(weights.len()), vec!["all"]), (lost(50_000), vec!["bytes=50000-", "all"])]
    {
        goes_on(&left, &expected);
    }
}

#[test]
fn a_flipped_byte_of_a_fresh_file_is_downloaded_again() {
    let case = Case::new("text");
    case.server.spoil("GET", "/storage/", 1, Act::Flip(70_000));
    is_whole(&case);
    assert_eq!(ranges(&case.server.seen()), ["all", "all"]);
}

#[test]
fn so_is_one_of_a_transfer_that_was_resumed_in_the_same_process() {
    let case = Case::new("text");
    case.server.spoil("GET", "/storage/", 1, Act::Cut(60_000));
    case.server.spoil("GET", "/storage/", 1, Act::Flip(10_000));
    is_whole(&case);
    assert_eq!(ranges(&case.server.seen()), ["all", "bytes=60000-", "all"]);
}

#[test]
fn so_is_one_of_a_small_file() {
    let case = Case::new("text");
    case.server.spoil("GET", "/cached/", 1, Act::Flip(5));
    is_whole(&case);
    case.server.put("config.json", b"another file");
    fs::remove_file(case.folder().join("snapshots").join(super::server::COMMIT).join("config.json")).unwrap();
    case.server.spoil("GET", "/cached/", 2, Act::Flip(0));
    let error = case.error("org/tiny");
    assert!(error.contains("config.json") && error.contains("expected SHA-1"), "{error}");
}

#[test]
fn bytes_that_are_wrong_twice_are_an_error() {
    let case = Case::new("text");
    fs::create_dir_all(case.folder().join("blobs")).unwrap();
    fs::write(case.partial(WEIGHTS), b"abc").unwrap();
    case.server.spoil("GET", "/storage/", 2, Act::Zeros);
    let error = case.error("org/tiny");
    assert_eq!(ranges(&case.server.seen()), ["bytes=3-", "all"]);
    let hash = case.server.etag(WEIGHTS);
    for part in [WEIGHTS, &format!("expected SHA-256 {hash}, got"), "HF_ENDPOINT", "run again"] {
        assert!(error.contains(part), "{part} in {error}");
    }
    assert!(!case.folder().join("blobs").join(hash).exists() && !error.contains('\n'), "{error}");
    // No part of it stays on disk.
    assert!(!case.partial(WEIGHTS).exists());
    is_whole(&case);
    assert_eq!(ranges(&case.server.seen()), ["all"]);
}
