//! Bits that flip between the processes of two ranks cause an error that names a rank, and never a different text.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::process::{Child, Output, Stdio};
use std::time::Duration;

use super::{outputs, program, stderr};

const FLAGS: [&str; 10] = [
    "--tp",
    "2",
    "--prompt",
    "ROMEO:",
    "--max-new-tokens",
    "8",
    "--ignore-eos",
    "--log",
    "error",
    "--num-threads=2",
];

/// Passes bytes on, flips a bit of the byte at `flip`, and returns the number of bytes.
fn pass(mut from: TcpStream, mut to: TcpStream, flip: Option<usize>) -> usize {
    let mut bytes = vec![0; 1 << 16];
    let mut passed = 0;
    while let Ok(n @ 1..) = from.read(&mut bytes) {
        if let Some(at) = flip.filter(|at| (passed..passed + n).contains(at)) {
            bytes[at - passed] ^= 1 << (at % 8);
        }
        passed += n;
        if to.write_all(&bytes[..n]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
    let _ = from.shutdown(Shutdown::Read);
    passed
}

fn rank(rank: &str, port: u16) -> Child {
    let mut command = program();
    let env = [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")];
    command.args(FLAGS).envs(env).env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
    command.env("MOE_COLLECTIVE_TIMEOUT", "10").env("MOE_RENDEZVOUS_TIMEOUT", "8");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// The output of two ranks, and the number of bytes in each direction: from rank 1, then to it.
fn run(flips: [Option<usize>; 2]) -> (Vec<Output>, [usize; 2]) {
    let proxy = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let proxied = proxy.local_addr().unwrap().port();
    let direct = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
    let ranks = vec![rank("0", direct), rank("1", proxied)];
    let between = std::thread::spawn(move || {
        let (guest, _) = proxy.accept().unwrap();
        let host = loop {
            match TcpStream::connect((Ipv4Addr::LOCALHOST, direct)) {
                Ok(stream) => break stream,
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
        };
        let guest_2 = guest.try_clone().unwrap();
        let host_2 = host.try_clone().unwrap();
        let there = std::thread::spawn(move || pass(guest, host, flips[0]));
        let back = pass(host_2, guest_2, flips[1]);
        [there.join().unwrap(), back]
    });
    (outputs(ranks), between.join().unwrap())
}

#[test]
fn a_flipped_bit_never_changes_a_text() {
    let (right, passed) = run([None, None]);
    assert!(right.iter().all(|output| output.status.success()), "{}", stderr(&right[0]));
    let text = &right[0].stdout;
    assert!(text.len() > 5 && passed.iter().all(|&bytes| bytes > 1000), "{passed:?}");
    let mut failed = 0;
    for case in 0..24 {
        let way = case % 2;
        // The flips are spread over all data after the handshake, with a different bit each time.
        let at = 400 + (passed[way] - 600) * (case / 2) / 12 + case;
        let mut flips = [None, None];
        flips[way] = Some(at);
        let (outputs, _) = run(flips);
        for output in &outputs {
            let said = stderr(output);
            assert!(!said.contains("panicked"), "{flips:?}: {said}");
            assert!(
                output.status.success() || said.contains("rank 0") || said.contains("rank 1"),
                "{flips:?}: {said}"
            );
        }
        match outputs[0].status.success() {
            true => assert_eq!(outputs[0].stdout, *text, "{flips:?}"),
            // The output that was written before is the beginning of the right text.
            false => {
                failed += 1;
                let begun = &outputs[0].stdout;
                assert!(
                    text.starts_with(begun.trim_ascii_end()),
                    "{flips:?}: {:?}",
                    String::from_utf8_lossy(begun)
                );
            }
        }
    }
    assert!(failed > 20, "{failed} of 24 runs have noticed it");
}
