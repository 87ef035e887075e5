//! A rank that joins as it should and then does not: it dies, or sends what no rank sends. The others
//! learn it at once, also those that it never wrote to.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use moe_comm::{Communicator, Exec, Join, SocketComm, launch_from_env};
use serde::{Deserialize, Serialize};

use crate::support::text;

/// What the handshake says, as the intruder knows it.
#[derive(Serialize)]
enum Hello {
    Join { rank: usize, world_size: usize, listens: SocketAddr, settings: Vec<(String, String)> },
    Link { rank: usize, secret: u64 },
}

#[derive(Deserialize)]
enum Answer {
    Welcome { secret: u64, addresses: Vec<SocketAddr> },
    Linked,
}

fn say(stream: &mut TcpStream, hello: &Hello) -> Answer {
    let body = postcard::to_stdvec(hello).unwrap();
    let mut bytes = b"moe-comm\x02\0\0\0".to_vec();
    bytes.extend(0x0102_0304u32.to_ne_bytes());
    bytes.extend((body.len() as u32).to_le_bytes());
    bytes.extend(body);
    stream.write_all(&bytes).unwrap();
    let mut prefix = [0; 20];
    stream.read_exact(&mut prefix).unwrap();
    let len = u32::from_le_bytes(prefix[16..].try_into().unwrap());
    let mut body = vec![0; len as usize];
    stream.read_exact(&mut body).unwrap();
    postcard::from_bytes(&body).unwrap()
}

/// Joins a world of three as its last rank; its connections to ranks 0 and 1.
fn join(port: u16) -> [TcpStream; 2] {
    let mut master = loop {
        match TcpStream::connect((Ipv4Addr::LOCALHOST, port)) {
            Ok(stream) => break stream,
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    let listens = master.local_addr().unwrap();
    let Answer::Welcome { secret, addresses } =
        say(&mut master, &Hello::Join { rank: 2, world_size: 3, listens, settings: Vec::new() })
    else {
        panic!("no welcome")
    };
    let mut other = TcpStream::connect(addresses[0]).unwrap();
    assert!(matches!(say(&mut other, &Hello::Link { rank: 2, secret }), Answer::Linked));
    [master, other]
}

/// The errors of ranks 0 and 1, which wait for rank 2 in a collective while it does `what`.
fn errors(what: impl FnOnce([TcpStream; 2]) -> Vec<TcpStream> + Send) -> Vec<String> {
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
    let start = Instant::now();
    let rank = |rank: usize| {
        let value = move |name: &str| match name {
            "RANK" | "LOCAL_RANK" => Some(rank.to_string()),
            "WORLD_SIZE" => Some("3".to_string()),
            "MASTER_ADDR" => Some("127.0.0.1".to_string()),
            "MASTER_PORT" => Some(port.to_string()),
            _ => None,
        };
        let launch = launch_from_env(value).unwrap().unwrap();
        let comm = SocketComm::connect(Join::new(&launch, Vec::new())).unwrap();
        let error = text(comm.barrier(&mut Exec::cpu()).unwrap_err());
        assert!(comm.check().is_err());
        error
    };
    let errors = std::thread::scope(|scope| {
        let intruder = scope.spawn(move || what(join(port)));
        let ranks = [0, 1].map(|r| scope.spawn(move || rank(r)));
        let errors = ranks.map(|thread| thread.join().unwrap()).to_vec();
        drop(intruder.join().unwrap());
        errors
    });
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    errors
}

#[test]
fn a_rank_that_dies_is_named() {
    for error in errors(|links| {
        drop(links);
        Vec::new()
    }) {
        assert!(error.contains("rank 2 died"), "{error}");
    }
}

/// Bytes of the head, bytes of the data, and what follows.
fn frame(head: u32, data: u64, rest: &[u8]) -> Vec<u8> {
    [&head.to_le_bytes()[..], &data.to_le_bytes(), rest].concat()
}

/// A barrier in a group that nobody else is in: kind, group, op, what a barrier has not, no counts.
const BARRIER: [u8; 10] = [0, 9, 5, 0, 0, 0, 0, 0, 0, 0];

#[test]
fn a_rank_that_sends_garbage_is_named() {
    for bytes in [
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n".to_vec(),
        frame(1, 0, &[9]),
        // A head and data that are too long, a head that is none, data where none belong.
        frame(u32::MAX, 0, &[]),
        frame(0, u64::MAX, &[]),
        frame(3, 0, &[0xff; 3]),
        frame(1, 1, &[4]),
        // More rounds than a rank can be ahead.
        frame(10, 0, &BARRIER).repeat(3),
    ] {
        // Only rank 1 is written to; rank 0 has it from there.
        let send = bytes.clone();
        let errors = errors(move |[first, mut second]| {
            second.write_all(&send).unwrap();
            vec![first, second]
        });
        for error in errors {
            assert!(error.contains("rank 2 broke the protocol"), "{bytes:?}: {error}");
        }
    }
}

/// A frame that never ends holds nobody up: the connection's end is what counts.
#[test]
fn a_rank_that_dies_within_a_frame_is_named() {
    for error in errors(|[first, mut second]| {
        second.write_all(&frame(10, 1 << 20, &BARRIER[..4])).unwrap();
        drop(second);
        vec![first]
    }) {
        assert!(error.contains("rank 2 died"), "{error}");
    }
}
