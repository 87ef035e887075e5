//! A terminal, a reader or a disk that fails or disappears during a run.
#![cfg(unix)]

use std::fs::{self, File};
use std::io::{Read, Write, pipe};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;

use super::{Folder, completion, ended, stderr};

fn folder(lines: usize) -> Folder {
    let line = |i| completion(&format!("{i}"), json!({"prompt": "x", "max_tokens": 8, "seed": i}));
    Folder::new(&(0..lines).map(line).collect::<Vec<_>>())
}

/// The progress messages must not end the run if they cannot be written.
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

/// stdout and stderr go into one pipe, as with `2>&1 | head -n 1`.
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

/// If answers are lost, the run is not a success.
#[test]
fn a_stdout_that_takes_nothing_is_an_error() {
    let full = File::options().write(true).open("/dev/full").unwrap();
    let folder = folder(3);
    let output = folder.command("in.jsonl", "-").stdout(full).output().unwrap();
    ended(&output, 1, &["cannot write to stdout"]);
    assert!(fs::metadata(folder.path("out.jsonl")).is_err());
}

/// A run that has written a record and is far from its end.
pub fn begun(folder: &Folder, command: &mut Command) -> Child {
    let run = command.args(["--max-num-seqs", "2"]).stderr(Stdio::piped()).spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    while fs::metadata(folder.path("out.jsonl")).map_or(0, |m| m.len()) == 0 {
        assert!(Instant::now() < deadline, "no record is written");
        std::thread::sleep(Duration::from_millis(5));
    }
    run
}

#[test]
fn an_output_that_is_deleted_or_cut_ends_the_run() {
    for cut in [false, true] {
        let folder = folder(2000);
        let run = begun(&folder, &mut folder.command("in.jsonl", "out.jsonl"));
        match cut {
            false => fs::remove_file(folder.path("out.jsonl")).unwrap(),
            true => File::options().write(true).open(folder.path("out.jsonl")).unwrap().set_len(5).unwrap(),
        }
        let output = run.wait_with_output().unwrap();
        ended(&output, 1, &["out.jsonl: another program", "run the same command"]);
    }
}

/// `nohup` means that the run continues when the terminal closes.
#[test]
fn a_run_under_nohup_outlives_its_terminal() {
    let folder = folder(400);
    let direct = folder.command("in.jsonl", "out.jsonl");
    let mut command = Command::new("sh");
    command.args(["-c", "trap '' HUP; exec \"$@\"", "sh"]).arg(direct.get_program()).args(direct.get_args());
    let run = begun(&folder, command.current_dir(folder.path("")));
    assert!(Command::new("kill").args(["-HUP", &run.id().to_string()]).status().unwrap().success());
    let output = run.wait_with_output().unwrap();
    assert_eq!((output.status.code(), folder.records().len()), (Some(0), 400), "{}", stderr(&output));
}

#[test]
fn a_file_of_nothing_but_faults_is_a_failure_with_its_reasons() {
    let folder = folder(1);
    fs::write(folder.path("in.jsonl"), "no JSON\n".repeat(30) + "{\"custom_id\":\"a\",\"url\":\"/v9\"}\n")
        .unwrap();
    let reasons = ["31 with errors", "     30 as line 1: it is not JSON", "      1 as line 31: "];
    folder.ends(1, &[], &[&reasons[..], &["no line has an answer"]].concat());
    assert_eq!(folder.records().len(), 31);
    // Nor has it when run again.
    folder.ends(1, &[], &[]);
    let good = completion("b", json!({"prompt": "x", "max_tokens": 2}));
    fs::write(folder.path("in.jsonl"), format!("no JSON\n{good}\n")).unwrap();
    // One line is answered.
    folder.ends(0, &["--overwrite"], &["as line 1: it is not JSON"]);
}

#[test]
fn files_in_other_encodings_are_named_before_the_model_loads() {
    let folder = folder(4);
    let text = fs::read_to_string(folder.path("in.jsonl")).unwrap();
    for (mark, name) in [("\u{feff}", "UTF-16;"), ("", "UTF-16 without")] {
        let bytes: Vec<u8> = format!("{mark}{text}").encode_utf16().flat_map(u16::to_le_bytes).collect();
        fs::write(folder.path("in.jsonl"), bytes).unwrap();
        let text = folder.ends(2, &[], &[name, "iconv"]);
        assert!(!text.contains("running on"), "{text}");
    }
    assert!(!folder.path("out.jsonl").exists());
}

/// A compressed input is answered, even from stdin, and a rerun continues with it.
#[test]
fn compressed_inputs_are_read() {
    let folder = folder(20);
    let text = fs::read_to_string(folder.path("in.jsonl")).unwrap();
    let half: String = text.split_inclusive('\n').take(7).collect();
    fs::write(folder.path("half.jsonl"), half).unwrap();
    assert!(folder.command("half.jsonl", "out.jsonl").status().unwrap().success());
    let packed = Command::new("gzip").arg("-c").arg(folder.path("in.jsonl")).output().unwrap().stdout;
    fs::write(folder.path("in.gz"), &packed).unwrap();
    let output = folder.command("in.gz", "out.jsonl").output().unwrap();
    ended(&output, 0, &["13 requests, ", "7 done before"]);
    let mut run = folder.command("-", "stdin.jsonl").stdin(Stdio::piped()).spawn().unwrap();
    run.stdin.take().unwrap().write_all(&packed).unwrap();
    assert!(run.wait().unwrap().success());
    assert_eq!(super::records(&fs::read(folder.path("stdin.jsonl")).unwrap()).len(), 20);
    fs::write(folder.path("in.gz"), &packed[..packed.len() / 2]).unwrap();
    let output = folder.command("in.gz", "cut.jsonl").output().unwrap();
    ended(&output, 1, &["cannot read the input any further"]);
}
