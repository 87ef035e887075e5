//! Events that may happen during a run: kills, a full disk, Ctrl-C.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use serde_json::{Value, json};

#[cfg(unix)]
use super::broken::begun;
use super::nan::copy_with_nan;
use super::{Folder, by_name, completion, ended};

/// Requests whose tokens reach an expert with NaN fail, each with its advice. The others have the same answers as
/// without that expert.
#[test]
fn weights_that_are_not_finite_fail_the_requests_that_meet_them() {
    // Long prompts reach that expert, and leave values that are not finite in their blocks.
    let prompt = |i: usize| vec![i * 20 + 1; if i.is_multiple_of(3) { 15 } else { 1 }];
    let lines: Vec<Value> = (0..96)
        .map(|i| completion(&format!("{i}"), json!({"prompt": prompt(i), "max_tokens": 2, "temperature": 0})))
        .collect();
    let folder = Folder::new(&lines);
    folder.succeeds(&[]);
    let sound = by_name(&folder.records());
    copy_with_nan(&folder.path("model"));
    // There are few blocks, so that requests reuse the blocks of failed ones.
    let flags = [
        "--model",
        "model",
        "--any-model",
        "--max-num-seqs",
        "8",
        "--kv-cache-memory",
        "288KiB",
        "--max-model-len",
        "17",
    ];
    for more in [&[][..], &["--tp", "2"], &["--dp", "2", "--enable-expert-parallel"]] {
        folder.succeeds(&[&flags, more, &["--overwrite"]].concat());
        let got = by_name(&folder.records());
        let failed: Vec<_> = got.iter().filter(|(_, answer)| answer[0] != 200).collect();
        assert!((10..90).contains(&failed.len()), "{} of {}", failed.len(), got.len());
        for (name, answer) in failed {
            let message = answer[3]["error"]["message"].as_str().unwrap();
            assert_eq!(answer[0], 500, "{name}: {answer}");
            assert!(message.contains("NaN") && message.contains("not finite"), "{name}: {message}");
        }
        for (name, answer) in got.iter().filter(|(_, answer)| answer[0] == 200) {
            assert_eq!(answer[1][0]["text"], sound[name][1][0]["text"], "{name} {more:?}");
        }
    }
}

/// A named pipe is read once, like a file of unknown length.
#[cfg(unix)]
#[test]
fn a_named_pipe_is_an_input() {
    let line = completion("a", json!({"prompt": "x", "max_tokens": 2}));
    let folder = Folder::new(&[]);
    assert!(Command::new("mkfifo").arg(folder.path("pipe")).status().unwrap().success());
    let mut run = folder.command("pipe", "out.jsonl").stderr(Stdio::null()).spawn().unwrap();
    fs::write(folder.path("pipe"), format!("{line}\n")).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    while run.try_wait().unwrap().is_none() {
        if Instant::now() > deadline {
            run.kill().unwrap();
            panic!("the run waits for a second writer");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(folder.records().len(), 1);
}

/// 200 lines, some of them wrong.
pub fn two_hundred_lines() -> Vec<Value> {
    let line = |i: usize| {
        let prompt = format!("Line {i}: ");
        let body = json!({"prompt": prompt, "max_tokens": 1 + i % 24, "n": 1 + i % 2, "ignore_eos": true});
        completion(&format!("request {i}"), body)
    };
    let mut lines: Vec<Value> = (0..200).map(line).collect();
    lines[20] = completion("bad", json!({"prompt": "x", "temperature": "hot"}));
    lines[40] = lines[39].clone(); // a repeated custom_id
    lines
}

/// Kills ten runs at random moments, and cuts the last lines of some. `journal` is the file to which they append, which
/// has `whole` bytes in the end.
#[cfg(unix)]
pub fn kill_ten_runs(run: impl Fn() -> Command, journal: &Path, whole: u64) {
    let seed = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_nanos() as u64;
    println!("seed {seed}");
    let mut state = seed;
    let mut random = |bound: u64| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) % bound
    };
    let size = || fs::metadata(journal).map_or(0, |metadata| metadata.len());
    let mut while_running = 0;
    for kill in 1..=10 {
        // The kill happens in the next eighth of the work, whatever the speed of the machine.
        let until = size() + random(whole / 8);
        let mut run = run().stderr(Stdio::null()).spawn().unwrap();
        while size() < until && run.try_wait().unwrap().is_none() {
            std::thread::sleep(Duration::from_micros(random(1000)));
        }
        while_running += u32::from(run.try_wait().unwrap().is_none());
        run.kill().unwrap(); // SIGKILL
        run.wait().unwrap();
        let written = fs::read(journal).unwrap_or_default();
        println!("kill {kill}: {} bytes are written", written.len());
        if written.ends_with(b"\n") && random(2) == 0 {
            // A kill rarely cuts a line, so the test cuts one itself.
            let cut = written.len() - 1 - random(20) as usize;
            fs::write(journal, &written[..cut]).unwrap();
        }
    }
    assert!(while_running >= 3, "only {while_running} kills met a running program");
}

/// After ten kills at random moments nothing is lost, duplicated or changed.
#[cfg(unix)]
#[test]
fn killed_runs_continue() {
    let mut lines = two_hundred_lines();
    lines[60] = json!("no request");
    let undisturbed = Folder::new(&lines);
    let flags = ["--max-num-seqs", "8"];
    undisturbed.succeeds(&flags);
    let want = by_name(&undisturbed.records());
    assert_eq!(want.len(), 200);

    let disturbed = Folder::new(&lines);
    let run = || {
        let mut command = disturbed.command("in.jsonl", "out.jsonl");
        command.args(flags);
        command
    };
    let whole = fs::metadata(undisturbed.path("out.jsonl")).unwrap().len();
    kill_ten_runs(run, &disturbed.path("out.jsonl"), whole);
    disturbed.succeeds(&flags);
    assert_eq!(by_name(&disturbed.records()), want);
    let before = fs::read(disturbed.path("out.jsonl")).unwrap();
    disturbed.ends(0, &flags, &["200 done before"]);
    assert_eq!(fs::read(disturbed.path("out.jsonl")).unwrap(), before, "nothing is left to do");
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_stops_the_run_with_a_clear_error() {
    let folder = Folder::new(&[completion("a", json!({"prompt": "x", "max_tokens": 2}))]);
    let output = folder.command("in.jsonl", "/dev/full").output().unwrap();
    ended(&output, 1, &["/dev/full", "No space left"]);
}

/// A limit on the size of files simulates a disk that fills up while records are written.
#[cfg(target_os = "linux")]
#[test]
fn what_is_written_before_the_disk_is_full_is_intact() {
    let lines: Vec<Value> =
        (0..20).map(|i| completion(&format!("{i}"), json!({"prompt": "x", "max_tokens": 2}))).collect();
    let folder = Folder::new(&lines);
    let direct = folder.command("in.jsonl", "out.jsonl");
    let mut limited = Command::new("bash");
    limited.args(["-c", "trap '' XFSZ; ulimit -f 4; exec \"$@\"", "-"]);
    limited.arg(direct.get_program()).args(direct.get_args()).current_dir(folder.path(""));
    let limited = limited.output().unwrap();
    ended(&limited, 1, &["records are intact"]);
    let before = folder.records();
    assert!((1..20).contains(&before.len()), "{} records", before.len());
    folder.succeeds(&[]);
    assert_eq!(folder.records()[..before.len()], before);
    assert_eq!(by_name(&folder.records()).len(), 20);
}

#[cfg(target_os = "linux")]
#[test]
fn an_interrupted_run_says_how_to_continue() {
    let signals = ["-INT", "-TERM", "-HUP"];
    signals.into_iter().filter(|&signal| signal != "-HUP" || !ignores_hangups()).for_each(interrupted_by);
}

/// Whether this process ignores SIGHUP, as under `nohup`. If so, the programs that it starts ignore it too.
fn ignores_hangups() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
    u64::from_str_radix(ignored.trim(), 16).unwrap() & 1 == 1
}

#[cfg(unix)]
fn interrupted_by(signal: &str) {
    let lines: Vec<Value> = (0..64)
        .map(|i| completion(&format!("{i}"), json!({"prompt": "x", "max_tokens": 200, "ignore_eos": true})))
        .collect();
    let folder = Folder::new(&lines);
    let run = begun(&folder, &mut folder.command("in.jsonl", "out.jsonl"));
    assert!(Command::new("kill").args([signal, &run.id().to_string()]).status().unwrap().success());
    let output = run.wait_with_output().unwrap();
    ended(&output, 130, &["run the same command again"]);
    let count = folder.records().len();
    assert!((1..64).contains(&count), "{count} whole records");
}
