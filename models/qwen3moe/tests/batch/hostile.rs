//! A batch in which one line in ten is hostile, killed twice. Every line is answered once, the other lines get the same
//! answers as without hostile lines, and memory does not grow.
//!
//! The short form is part of every test run. The long form must be requested by name; it has 100,000 lines unless
//! `HOSTILE_LINES` is set: `cargo test --release -p model-qwen3moe --test batch -- --ignored --nocapture hostile`.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::net::{Shutdown, TcpStream};
use std::path::Path;
use std::process::{Child, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::hostile_lines::hostile;
use super::{Folder, completion, essence};

/// One line out of this number is hostile.
const ONE_IN: usize = 10;
/// How often a run is sampled.
const LOOK: Duration = Duration::from_millis(20);

#[test]
fn hostile_lines_harm_no_other() {
    let soaked = soak(1500);
    println!("{soaked:?}");
}

#[test]
#[ignore = "minutes"]
fn hostile_soak() {
    let lines = std::env::var("HOSTILE_LINES").map_or(100_000, |lines| lines.parse().unwrap());
    let soaked = soak(lines);
    println!("{soaked:?}");
    // The first quarter is the warm-up.
    let early = soaked.resident[2].max(soaked.resident[3]);
    let late = soaked.resident[6].max(soaked.resident[7]);
    assert!(late <= early + early / 10 + (16 << 20), "memory grew: {soaked:?}");
}

/// The results of a soak test.
#[derive(Debug)]
#[allow(dead_code)] // printed
struct Soaked {
    lines: usize,
    /// Number of records by status.
    statuses: BTreeMap<u64, usize>,
    /// Memory of the last run in bytes: the maximum in each eighth of its time.
    resident: [u64; 8],
    /// The maximum memory of all runs in bytes.
    peak: u64,
    seconds: f64,
}

fn soak(lines: usize) -> Soaked {
    let start = Instant::now();
    let is_hostile = |number: usize| number % ONE_IN == 3;
    let clean = Folder::new(&[]);
    write_lines(&clean, (1..=lines).filter(|&number| !is_hostile(number)).map(normal));
    clean.succeeds(&[]);
    let attacked = Folder::new(&[]);
    let all = (1..=lines).map(|number| if is_hostile(number) { hostile(number) } else { normal(number) });
    write_lines(&attacked, all);

    let mut peak = killed(&attacked, &[], lines / 3);
    // Answers do not depend on the number of ranks.
    let ranks = ["--dp", "2", "--distributed-executor-backend", "mp"];
    peak = peak.max(killed(&attacked, &ranks, lines / 3));
    let (resident, last_peak) = finished(&attacked);

    let answered = by_number(&attacked.records());
    assert_eq!(answered.len(), lines, "lines without a record");
    let mut statuses = BTreeMap::new();
    for (number, record) in &answered {
        let status = record["response"]["status_code"].as_u64().unwrap();
        assert!(status < 500, "line {number}: {record}");
        *statuses.entry(status).or_default() += 1;
    }
    let undisturbed: BTreeMap<String, Value> =
        clean.records().iter().map(|record| (record["custom_id"].to_string(), essence(record))).collect();
    for number in (1..=lines).filter(|&number| !is_hostile(number)) {
        let record = &answered[&number];
        let name = record["custom_id"].to_string();
        assert_eq!(
            essence(record),
            undisturbed[&name],
            "line {number} differs from a run without hostile lines"
        );
        assert_eq!(record["response"]["status_code"], 200, "line {number}: {record}");
    }
    let seconds = start.elapsed().as_secs_f64();
    Soaked { lines, statuses, resident, peak: peak.max(last_peak), seconds }
}

/// A line that is answered with status 200.
fn normal(number: usize) -> Vec<u8> {
    let id = format!("normal-{number}");
    let prompt = format!("ROMEO {number}:");
    let body = match number % 6 {
        0 => json!({"prompt": prompt, "max_tokens": 6, "temperature": 0}),
        1 => json!({"prompt": prompt, "max_tokens": 4, "n": 2, "logprobs": 2}),
        2 => json!({"prompt": prompt, "max_tokens": 12, "stop": ["\n", "e"]}),
        3 => json!({"prompt": prompt, "max_tokens": 12, "guided_regex": "[a-z]{2,4}[0-9]"}),
        4 => json!({"prompt": prompt, "max_tokens": 24, "guided_json": {
            "type": "object", "properties": {"a": {"enum": [number, "x"]}}, "required": ["a"],
            "additionalProperties": false,
        }}),
        _ => json!({"prompt": [1, 2, number % 500], "max_tokens": 5, "bad_words": ["the"]}),
    };
    completion(&id, body).to_string().into_bytes()
}

fn write_lines(folder: &Folder, lines: impl Iterator<Item = Vec<u8>>) {
    let file = fs::File::create(folder.path("in.jsonl")).unwrap();
    let mut file = std::io::BufWriter::new(file);
    for line in lines {
        file.write_all(&line).unwrap();
        file.write_all(b"\n").unwrap();
    }
    file.flush().unwrap();
}

/// Runs until `more` additional records are written, then kills the run. Returns the maximum of its memory.
fn killed(folder: &Folder, flags: &[&str], more: usize) -> u64 {
    let output = folder.path("out.jsonl");
    let wanted = complete_lines(&output) + more;
    let mut run = start(folder, flags);
    let mut peak = 0;
    while complete_lines(&output) < wanted {
        if let Some(status) = run.try_wait().unwrap() {
            panic!("the run ended by itself: {status}\n{}", log(folder));
        }
        strangers(run.id());
        peak = peak.max(resident_bytes(run.id()));
        sleep(LOOK);
    }
    run.kill().unwrap();
    run.wait().unwrap();
    peak
}

/// Runs to the end. Returns the maximum memory in each eighth of the time, and the overall maximum.
fn finished(folder: &Folder) -> ([u64; 8], u64) {
    let mut run = start(folder, &[]);
    let mut samples = Vec::new();
    let status = loop {
        if let Some(status) = run.try_wait().unwrap() {
            break status;
        }
        samples.push(resident_bytes(run.id()));
        sleep(LOOK);
    };
    assert!(status.success(), "{status}\n{}", log(folder));
    let most = |samples: &[u64]| samples.iter().copied().max().unwrap_or(0);
    let eighth = |i: usize| most(&samples[i * samples.len() / 8..(i + 1) * samples.len() / 8]);
    (std::array::from_fn(eighth), most(&samples))
}

fn start(folder: &Folder, flags: &[&str]) -> Child {
    let mut command = folder.command("in.jsonl", "out.jsonl");
    let log = fs::File::create(folder.path("log")).unwrap();
    command.args(flags).stdout(Stdio::null()).stderr(log).spawn().unwrap()
}

fn log(folder: &Folder) -> String {
    fs::read_to_string(folder.path("log")).unwrap()
}

/// The records by the number of their line; no line may be answered twice.
fn by_number(records: &[Value]) -> BTreeMap<usize, Value> {
    let mut map = BTreeMap::new();
    for record in records {
        let id = record["id"].as_str().unwrap();
        let number = id.rsplit('-').next().unwrap().parse().unwrap();
        assert!(map.insert(number, record.clone()).is_none(), "line {number} is answered twice");
    }
    map
}

fn complete_lines(path: &Path) -> usize {
    let text = fs::read(path).unwrap_or_default();
    text.iter().filter(|&&byte| byte == b'\n').count()
}

/// Connects to every port on which the process listens, sends garbage or nothing, and cuts the connection.
fn strangers(pid: u32) {
    for port in listening_ports(pid) {
        let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) else { continue };
        let _ = stream.write_all(&[port as u8; 35][..usize::from(port % 36)]);
        let _ = stream.shutdown(Shutdown::Both);
    }
}

/// The TCP ports on which a process listens, by its sockets' inodes.
fn listening_ports(pid: u32) -> Vec<u16> {
    const LISTENING: &str = "0A";
    let Ok(files) = fs::read_dir(format!("/proc/{pid}/fd")) else { return Vec::new() };
    let links = files.filter_map(|file| fs::read_link(file.ok()?.path()).ok());
    let sockets: Vec<String> = links.map(|link| link.to_string_lossy().into_owned()).collect();
    let table = fs::read_to_string("/proc/net/tcp").unwrap_or_default();
    let port_of = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let is_ours = sockets.contains(&format!("socket:[{}]", fields.get(9)?));
        let is_listening = fields.get(3) == Some(&LISTENING);
        let port = u16::from_str_radix(fields.get(1)?.rsplit(':').next()?, 16).ok()?;
        (is_ours && is_listening).then_some(port)
    };
    table.lines().filter_map(port_of).collect()
}

/// The current memory of a process.
fn resident_bytes(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or("0 kB");
    let kib: u64 = line.trim().trim_end_matches("kB").trim().parse().unwrap();
    kib << 10
}
