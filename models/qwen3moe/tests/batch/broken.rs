//! A terminal, a reader or a disk that goes away during a run.
#![cfg(unix)]

use std::fs::{self, File};
use std::io::{Read, pipe};
use std::process::{Output, Stdio};

use serde_json::json;

use super::{Folder, completion, stderr};

fn folder(lines: usize) -> Folder {
    let line = |i| completion(&format!("{i}"), json!({"prompt": "x", "max_tokens": 8, "seed": i}));
    Folder::new(&(0..lines).map(line).collect::<Vec<_>>())
}

/// What says how far a run is must not end it.
#[test]
fn a_batch_goes_on_when_stderr_is_full_or_gone() {
    let flags = ["--progress-interval", "0.001", "--stats", "--explain-backends"];
    let answered = |stderr: Stdio| {
        let folder = folder(100);
        let status = folder.command("in.jsonl", "out.jsonl").args(flags).stderr(stderr).status().unwrap();
        assert_eq!((status.code(), folder.records().len()), (Some(0), 100));
    };
    answered(File::options().write(true).open("/dev/full").unwrap().into());
    let (reader, writer) = pipe().unwrap();
    drop(reader);
    answered(writer.into());
}

/// Both streams in one pipe, as of `2>&1 | head -n 1`.
#[test]
fn a_reader_that_leaves_costs_no_record() {
    let folder = folder(60);
    let (mut reader, writer) = pipe().unwrap();
    let mut command = folder.command("in.jsonl", "out.jsonl");
    command.args(["--progress-interval", "0.001"]).stdout(writer.try_clone().unwrap()).stderr(writer);
    let mut run = command.spawn().unwrap();
    drop(command);
    reader.read_exact(&mut [0; 16]).unwrap();
    drop(reader);
    assert_eq!((run.wait().unwrap().code(), folder.records().len()), (Some(0), 60));
}

/// Answers that are lost are no success.
#[test]
fn a_stdout_that_takes_nothing_is_an_error() {
    let full = || File::options().write(true).open("/dev/full").unwrap();
    let folder = folder(3);
    let run = |args: &[&str]| -> Output {
        let mut command = folder.command("in.jsonl", "-");
        command.args(args).stdout(full()).output().unwrap()
    };
    let output = run(&[]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("cannot write to stdout"), "{}", stderr(&output));
    assert!(fs::metadata(folder.path("out.jsonl")).is_err());
}
