//! Ranks that a launcher starts.

use std::io::Write;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use super::{launch, outputs, program, stderr, succeeds};

const FLAGS: [&str; 6] = ["--prompt", "ROMEO:", "--max-new-tokens", "6", "--log", "warn"];

#[test]
fn ranks_of_a_launcher_are_those_of_one_program() {
    let geometry = ["--tp", "2", "--dp", "2", "--enable-expert-parallel"];
    let flags = [&FLAGS[..], &geometry].concat();
    let want = succeeds(&FLAGS).stdout;
    let ranks = outputs(launch(&vec![flags; 4]));
    for (rank, output) in ranks.iter().enumerate() {
        assert!(output.status.success(), "rank {rank}: {}", stderr(output));
        assert_eq!(stderr(output), "", "rank {rank}");
        assert_eq!(output.stdout, if rank == 0 { want.clone() } else { Vec::new() }, "rank {rank}");
    }
}

#[test]
fn ranks_with_other_flags_end_all_with_their_name() {
    let flags = |dtype, geometry: [&'static str; 2]| [&FLAGS[..], &["--dtype", dtype], &geometry].concat();
    let tp = ["--tp", "2"];
    for (ranks, cause) in [
        ([flags("f32", tp), flags("bf16", tp)], "rank 1 has --dtype bf16, but rank 0 has f32"),
        ([flags("f32", tp), flags("f32", ["--dp", "2"])], "rank 1 has --tp 1, but rank 0 has 2"),
        (
            [flags("f32", tp), [&flags("f32", tp)[..], &["--cpu-isa", "scalar"]].concat()],
            "rank 1 has --cpu-isa scalar, but rank 0 has",
        ),
    ] {
        for output in outputs(launch(&ranks)) {
            assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
            assert!(stderr(&output).contains(cause), "{}", stderr(&output));
        }
    }
    // A wrong world size is found before a rank waits for another.
    let start = Instant::now();
    for output in outputs(launch(&vec![flags("f32", ["--tp", "4"]); 2])) {
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        assert!(stderr(&output).contains('4') && stderr(&output).contains('2'), "{}", stderr(&output));
    }
    assert!(start.elapsed() < Duration::from_secs(20));
}

/// Rank 1 of two, without rank 0.
fn alone(port: u16) -> std::process::Output {
    let mut command = program();
    let env = [("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1"), ("MASTER_ADDR", "127.0.0.1")];
    command.args(FLAGS).args(["--tp", "2"]).envs(env).env("MASTER_PORT", port.to_string());
    command.env("MOE_RENDEZVOUS_TIMEOUT", "1").output().unwrap()
}

#[test]
fn a_master_that_is_missing_or_something_else() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
        stream
    });
    let output = alone(port);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stderr(&output).contains("is no rank of this program"), "{}", stderr(&output));
    drop(server.join().unwrap());
    let start = Instant::now();
    let output = alone(port);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let cause = "rank 1 cannot form the world: cannot reach rank 0 at 127.0.0.1";
    assert!(stderr(&output).contains(cause) && stderr(&output).contains("within 1s"), "{}", stderr(&output));
    assert!(start.elapsed() < Duration::from_secs(20));
    let incomplete = program().args(FLAGS).env("RANK", "0").output().unwrap();
    assert_eq!(incomplete.status.code(), Some(2));
    assert!(stderr(&incomplete).contains("the environment of torchrun"), "{}", stderr(&incomplete));
}

/// A stranger at the port neither joins nor disturbs.
#[test]
fn a_stranger_at_the_port() {
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
    let start = |rank: usize| {
        let mut command = program();
        let rank = rank.to_string();
        let env = [
            ("RANK", rank.as_str()),
            ("LOCAL_RANK", &rank),
            ("WORLD_SIZE", "2"),
            ("MASTER_ADDR", "localhost"),
        ];
        command.args(FLAGS).args(["--dp", "2"]).envs(env).env("MASTER_PORT", port.to_string());
        command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap()
    };
    let first = start(0);
    let mut stranger = loop {
        match TcpStream::connect((Ipv4Addr::LOCALHOST, port)) {
            Ok(stream) => break stream,
            Err(_) => std::thread::sleep(Duration::from_millis(10)),
        }
    };
    stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let silent = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
    for output in outputs(vec![first, start(1)]) {
        assert!(output.status.success(), "{}", stderr(&output));
    }
    drop(silent);
}
