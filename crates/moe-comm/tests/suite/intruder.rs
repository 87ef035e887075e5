//! A rank that joins correctly and then misbehaves: it dies, is stopped, or sends what no rank sends. The others notice
//! it soon, even those to which it never wrote.

use std::io::Write;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use moe_comm::candle::Result;
use moe_comm::{Collectives, Communicator, Exec, Join, SocketComm, SocketTimeouts};

use crate::foreign::{Answer, Ask, ask, connect, frame, free_port, launch, link_key, world_key};
use crate::support::text;

/// Joins a world of three as its last rank. Returns its connections to ranks 0 and 1.
fn join(port: u16) -> [TcpStream; 2] {
    let mut master = connect(port);
    let key = world_key("");
    let listens = master.local_addr().unwrap();
    let request = Ask::Join { rank: 2, world_size: 3, listens, settings: Vec::new() };
    let Ok(Answer::Welcome { world, addresses }) = ask(&mut master, &key, &request) else {
        panic!("no welcome")
    };
    let mut other = TcpStream::connect(addresses[0]).unwrap();
    let linked = ask(&mut other, &link_key(&key, &world), &Ask::Link { rank: 2 });
    assert!(matches!(linked, Ok(Answer::Linked)), "{linked:?}");
    [master, other]
}

/// The call of ranks 0 and 1 while rank 2 misbehaves.
type Waits = fn(&SocketComm) -> Result<()>;

/// The errors of ranks 0 and 1, which wait for rank 2 while it runs `what`.
fn errors_of(waits: Waits, what: impl FnOnce([TcpStream; 2]) -> Vec<TcpStream> + Send) -> Vec<String> {
    let port = free_port();
    let start = Instant::now();
    let rank = |rank: usize| {
        let launch = launch(rank, 3, "127.0.0.1", port);
        let timeouts = SocketTimeouts { collective: Duration::from_secs(2), ..SocketTimeouts::default() };
        let comm = SocketComm::connect(Join { timeouts, ..Join::new(&launch, Vec::new()) }).unwrap();
        let error = text(waits(&comm).unwrap_err());
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

/// [`errors_of`] for ranks in a collective.
fn errors(what: impl FnOnce([TcpStream; 2]) -> Vec<TcpStream> + Send) -> Vec<String> {
    errors_of(|comm| comm.barrier(&mut Exec::cpu()), what)
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

/// A stopped process keeps its connections and sends nothing, as rank 2 does here. The others notice it after the limit
/// of a collective, both if they wait for its messages and if they check for them between other work.
#[test]
fn a_rank_that_is_stopped_is_named_by_those_that_wait_for_its_messages() {
    let waits: [Waits; 2] = [
        |comm| comm.messages().recv(2).map(drop),
        |comm| loop {
            comm.messages().try_recv_any(&[2])?;
            std::thread::sleep(Duration::from_millis(10));
        },
    ];
    for wait in waits {
        let start = Instant::now();
        for error in errors_of(wait, Vec::from) {
            assert!(error.contains("rank 2 stalled: it has given no sign of life for 2s"), "{error}");
        }
        assert!(start.elapsed() >= Duration::from_millis(1900), "{:?}", start.elapsed());
    }
}

/// A barrier in a group that has no other member. The bytes: kind, group, op, fields that a barrier does not have, no
/// counts.
const BARRIER: [u8; 10] = [0, 9, 5, 0, 0, 0, 0, 0, 0, 0];

#[test]
fn a_rank_that_sends_garbage_is_named() {
    let altered = |at: usize| {
        let mut bytes = frame(0, &[2, 0], 5, b"hello");
        bytes[at] ^= 1;
        bytes
    };
    let barriers = (0..3).flat_map(|number| frame(number, &BARRIER, 0, b""));
    for bytes in [
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n".to_vec(),
        frame(0, &[99], 0, b""),
        // An invalid head, too much data, data in a frame that has none.
        frame(0, &[0xff; 3], 0, b""),
        frame(0, &[2, 0], u64::MAX, b""),
        frame(0, &[4], 1, b"x"),
        // These are more rounds than a rank can be ahead.
        barriers.collect(),
        // A flipped bit in a length, in a checksum, in the head, in the data.
        altered(0),
        altered(11),
        altered(20),
        altered(24),
        altered(29),
        // The same frame twice.
        frame(0, &[2, 0], 0, b"").repeat(2),
    ] {
        // The bytes go only to rank 1; rank 0 learns of the failure from rank 1.
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

/// A frame that never ends delays no rank: the end of the connection counts.
#[test]
fn a_rank_that_dies_within_a_frame_is_named() {
    for error in errors(|[first, mut second]| {
        second.write_all(&frame(0, &[2, 0], 1 << 20, b"four")).unwrap();
        drop(second);
        vec![first]
    }) {
        assert!(error.contains("rank 2 died"), "{error}");
    }
}

/// The last message of a member is printed without control characters.
#[test]
fn the_last_words_of_a_rank_are_shown_without_control_characters() {
    let words = "rank 2 aborted: \u{1b}[2J\u{7}gone\r\n";
    let head = [&[3, words.len() as u8], words.as_bytes()].concat();
    for error in errors(move |[mut first, second]| {
        first.write_all(&frame(0, &head, 0, b"")).unwrap();
        vec![first, second]
    }) {
        assert!(error.contains("rank 2 aborted:  [2J gone") && !error.contains(char::is_control), "{error}");
    }
}
