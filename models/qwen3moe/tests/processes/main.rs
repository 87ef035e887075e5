//! One process per rank gives the same results as one rank, however the processes are started.
#![allow(clippy::unwrap_used)] // helpers of tests are not tests in clippy's eyes

#[cfg(target_os = "linux")]
mod faults;
mod flips;
mod launchers;
#[cfg(target_os = "linux")]
mod lost;
mod runs;
#[cfg(target_os = "linux")]
mod stopped;

use std::net::{Ipv4Addr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use serde_json::{Value, json};

/// Two groups of two ranks whose experts move as often as they can, about one in a step.
const MOVING: [&str; 19] = [
    "--tp",
    "2",
    "--dp",
    "2",
    "--enable-expert-parallel",
    "--num-redundant-experts",
    "4",
    "--enable-eplb",
    "--eplb-window",
    "4",
    "--eplb-interval",
    "1",
    "--eplb-plan-steps",
    "2",
    "--eplb-min-gain",
    "0",
    "--eplb-bytes-per-step",
    "128KiB",
    "--eplb-any-cost",
];

/// The program, without the environment variables of the tests' own launcher.
fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_model-qwen3moe"));
    let launchers = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID"];
    for name in launchers.into_iter().chain(["MOE_WORLD_SECRET"]) {
        command.env_remove(name);
    }
    command.env("RUST_BACKTRACE", "0").env("MOE_RENDEZVOUS_TIMEOUT", "60");
    command
}

const MP: [&str; 2] = ["--distributed-executor-backend", "mp"];

fn run(args: &[&str]) -> Output {
    program().args(args).output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The output of a run that succeeds.
#[track_caller]
fn succeeds(args: &[&str]) -> Output {
    let output = run(args);
    assert!(output.status.success(), "{args:?}\n{}", stderr(&output));
    output
}

/// Starts the ranks of a world as torchrun does, each with its own flags. They know a secret.
fn launch(flags: &[Vec<&str>]) -> Vec<Child> {
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
    let world_size = flags.len().to_string();
    let mut children = Vec::new();
    for (rank, flags) in flags.iter().enumerate() {
        let rank = rank.to_string();
        let env = [
            ("RANK", rank.as_str()),
            ("LOCAL_RANK", &rank),
            ("WORLD_SIZE", &world_size),
            ("LOCAL_WORLD_SIZE", &world_size),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MOE_WORLD_SECRET", "of these tests alone"),
        ];
        let mut command = program();
        command.args(flags).envs(env).env("MASTER_PORT", port.to_string());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        children.push(command.spawn().unwrap());
    }
    children
}

fn outputs(children: Vec<Child>) -> Vec<Output> {
    children.into_iter().map(|child| child.wait_with_output().unwrap()).collect()
}

/// A batch of completions of different lengths.
fn write_batch(path: &Path, lines: usize, max_tokens: impl Fn(usize) -> usize) {
    let line = |i: usize| {
        let body = json!({
            "prompt": format!("Line {i}:"), "max_tokens": max_tokens(i), "n": 1 + i % 2, "seed": i,
            "logprobs": 2, "ignore_eos": true,
        });
        json!({"custom_id": i.to_string(), "method": "POST", "url": "/v1/completions", "body": body})
    };
    std::fs::write(path, (0..lines).map(|i| line(i).to_string() + "\n").collect::<String>()).unwrap();
}

/// What a batch answered, by custom_id.
fn answers(path: &Path) -> Vec<(String, Value)> {
    let text = std::fs::read_to_string(path).unwrap();
    let record = |line: &str| {
        let record: Value = serde_json::from_str(line).unwrap();
        (record["custom_id"].as_str().unwrap().to_string(), record["response"]["body"]["choices"].clone())
    };
    let mut records: Vec<_> = text.lines().map(record).collect();
    records.sort_by_key(|(id, _)| id.parse::<usize>().unwrap());
    records
}
