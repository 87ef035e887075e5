//! Processes that are not ranks of the world get no place, are told why, and delay none of its members.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::foreign::{Answer, Ask, Key, ask, begin, connect, free_port, link_key, prefix, world_key};
use crate::rendezvous::{Rank, SECRET, errors, join_all};

/// A world of three whose last rank joins after `strangers` has run. All three ranks get their sum.
fn world_forms(rank: impl Fn(usize, u16) -> Rank + Sync, strangers: impl FnOnce(u16) + Send) {
    let port = free_port();
    let start = Instant::now();
    let ranks = [rank(0, port), rank(1, port)];
    std::thread::scope(|scope| {
        let first = scope.spawn(|| join_all(&ranks));
        strangers(port);
        let last = join_all(&[rank(2, port)]);
        for sum in first.join().unwrap().into_iter().chain(last) {
            assert_eq!(sum.unwrap(), 6.);
        }
    });
    assert!(start.elapsed() < Duration::from_secs(15), "{:?}", start.elapsed());
}

fn secret(rank: usize, port: u16) -> Rank {
    Rank::new(rank, 3, port)
}

fn open(rank: usize, port: u16) -> Rank {
    Rank { secret: None, ..Rank::new(rank, 3, port) }
}

fn member() -> Vec<(String, String)> {
    [("--tp", "2"), ("version", "1")].map(|(name, value)| (name.to_string(), value.to_string())).to_vec()
}

/// Why a process that asks for a place gets none.
fn refused(port: u16, key: &Key, rank: usize, world_size: usize, settings: Vec<(String, String)>) -> String {
    let mut stream = connect(port);
    let listens = stream.local_addr().unwrap();
    ask(&mut stream, key, &Ask::Join { rank, world_size, listens, settings }).unwrap_err()
}

/// A process of another program neither joins nor keeps the others from joining.
#[test]
fn other_programs_are_turned_away() {
    world_forms(secret, |port| {
        let silent = connect(port);
        let mut http = connect(port);
        http.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        let mut answer = Vec::new();
        // The host did not read everything that this process sent, so the connection may be reset after the answer.
        let _ = http.read_to_end(&mut answer);
        assert!(String::from_utf8_lossy(&answer).contains("does not speak this program's protocol"));
        // The hello of a newer version of this program, and a hello with a wrong length.
        for (at, word) in [(8, 9u8), (19, 0x7f)] {
            let mut hello = prefix(8);
            hello[at] = word;
            let mut other = connect(port);
            other.write_all(&hello).unwrap();
            answer.clear();
            let _ = other.read_to_end(&mut answer);
            let said = String::from_utf8_lossy(&answer);
            let expected = if at == 8 { "version 9 of the protocol" } else { "bytes, at most" };
            assert!(said.contains(expected), "{said}");
        }
        drop(silent);
    });
}

/// Copied settings prove nothing, and neither does the key of another world.
#[test]
fn a_process_without_the_secret_gets_no_seat() {
    world_forms(secret, |port| {
        for key in [world_key(""), world_key("known to another test")] {
            let why = refused(port, &key, 2, 3, member());
            assert!(why.contains("does not know the secret") && why.contains("MOE_WORLD_SECRET"), "{why}");
            assert!(!why.contains(SECRET));
            // A wrong world size ends nothing either.
            refused(port, &key, 2, 99, member());
        }
        // A real program with another secret or without one behaves like this.
        for secret in [None, Some("another secret of 30 characters")] {
            let error = errors(join_all(&[Rank { secret, ..Rank::new(2, 3, port) }])).remove(0);
            assert!(error.contains("says: it does not know the secret of this world"), "{error}");
        }
    });
    world_forms(open, |port| {
        let error = errors(join_all(&[Rank::new(2, 3, port)])).remove(0);
        assert!(error.contains("it has a secret and this world has none"), "{error}");
    });
}

/// A world without a secret cannot tell a rank left over from another job from a member that was started wrongly: it
/// refuses both.
#[test]
fn an_open_world_refuses_what_does_not_fit_and_waits_on() {
    world_forms(open, |port| {
        let key = world_key("");
        let settings = vec![("--tp".to_string(), "4\u{1b}[2J".to_string())];
        for (rank, world_size, settings, expected) in [
            (2, 2, member(), "of a world of 2 ranks, rank 0 of one of 3"),
            (7, 3, member(), "which rank 0 is or the world lacks"),
            (0, 3, member(), "which rank 0 is or the world lacks"),
            (usize::MAX, usize::MAX, member(), "of a world of"),
            (2, 3, settings, "rank 2 has --tp 4 [2J, but rank 0 has 2"),
            (2, 3, Vec::new(), "rank 2 has --tp none"),
        ] {
            let why = refused(port, &key, rank, world_size, settings);
            assert!(why.contains(expected), "{why}");
        }
        // Rank 0 does not answer a request for a link either.
        let why = ask(&mut connect(port), &key, &Ask::Link { rank: 2 }).unwrap_err();
        assert!(why.contains("a rank of another world"), "{why}");
    });
}

/// At its deadline rank 0 says which processes it has refused.
#[test]
fn refused_processes_explain_who_is_missing() {
    let port = free_port();
    let limit = Duration::from_secs(1);
    let stranger = std::thread::spawn(move || refused(port, &world_key(""), 1, 2, Vec::new()));
    let error = errors(join_all(&[Rank { limit, secret: None, ..Rank::new(0, 2, port) }])).remove(0);
    assert!(stranger.join().unwrap().contains("--tp none"));
    assert!(error.contains("rank 1 did not appear within 1s"), "{error}");
    assert!(error.contains("another connection was refused, from 127.0.0.1:"), "{error}");
    assert!(error.contains("rank 1 has --tp none, but rank 0 has 2"), "{error}");
}

/// A process that ended while it waited for the others can be started again.
#[test]
fn a_rank_may_come_again_after_it_has_ended() {
    let port = free_port();
    std::thread::scope(|scope| {
        let first = scope.spawn(move || join_all(&[Rank::new(0, 3, port)]));
        let mut stream = connect(port);
        let listens = stream.local_addr().unwrap();
        let request = Ask::Join { rank: 2, world_size: 3, listens, settings: member() };
        begin(&mut stream, &world_key(SECRET), &request).unwrap();
        std::thread::sleep(Duration::from_millis(100));
        drop(stream);
        let others = join_all(&[Rank::new(1, 3, port), Rank::new(2, 3, port)]);
        for sum in first.join().unwrap().into_iter().chain(others) {
            assert_eq!(sum.unwrap(), 6.);
        }
    });
}

/// Sends a byte on each connection now and then. A connection that was closed is opened again.
fn dribble(mut slow: Vec<TcpStream>, port: u16, done: &AtomicBool) {
    for byte in prefix(32).iter().cycle() {
        for stream in &mut slow {
            if stream.write_all(&[*byte]).is_err()
                && let Ok(again) = TcpStream::connect(("127.0.0.1", port))
            {
                *stream = again;
            }
        }
        if done.load(Ordering::SeqCst) {
            return;
        }
        std::thread::sleep(Duration::from_millis(300));
    }
}

/// More connections than may be in their handshake send a byte now and then; a member still gets its place.
#[test]
fn connections_that_dribble_hold_no_member_up() {
    let port = free_port();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let ranks = [Rank::new(0, 2, port)];
        let first = scope.spawn(move || join_all(&ranks));
        let slow: Vec<TcpStream> = (0..300).map(|_| connect(port)).collect();
        let done = &done;
        scope.spawn(move || dribble(slow, port, done));
        std::thread::sleep(Duration::from_millis(500));
        let start = Instant::now();
        let sum = join_all(&[Rank::new(1, 2, port)]).remove(0);
        assert_eq!(sum.unwrap(), 3.);
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
        assert_eq!(first.join().unwrap().remove(0).unwrap(), 3.);
        done.store(true, Ordering::SeqCst);
    });
}

/// One handshake has one time limit, however its bytes are spread.
#[test]
fn a_slow_hello_ends_in_time() {
    world_forms(secret, |port| {
        let mut slow = connect(port);
        let start = Instant::now();
        slow.set_read_timeout(Some(Duration::from_millis(400))).unwrap();
        let mut cut = false;
        for byte in prefix(32).iter().cycle() {
            cut = slow.write_all(&[*byte]).is_err() || slow.read(&mut [0; 99]).is_ok();
            if cut || start.elapsed() > Duration::from_secs(9) {
                break;
            }
        }
        assert!(cut && start.elapsed() > Duration::from_secs(4), "{:?}", start.elapsed());
    });
}

/// The connections between ranks 1.. ask for the proof, too.
#[test]
fn a_link_needs_the_proof() {
    let port = free_port();
    std::thread::scope(|scope| {
        let ranks = [0, 1].map(|rank| Rank::new(rank, 3, port));
        let world = scope.spawn(move || join_all(&ranks));
        let mut master = connect(port);
        let key = world_key(SECRET);
        let listens = master.local_addr().unwrap();
        let request = Ask::Join { rank: 2, world_size: 3, listens, settings: member() };
        let Ok(Answer::Welcome { world: id, addresses }) = ask(&mut master, &key, &request) else { panic!() };
        let link = |key: &Key, rank| {
            let mut stream = TcpStream::connect(addresses[0]).unwrap();
            ask(&mut stream, key, &Ask::Link { rank }).map(|_| stream)
        };
        for wrong in [world_key(""), key, link_key(&key, &[0; 32]), link_key(&world_key(""), &id)] {
            assert!(link(&wrong, 2).unwrap_err().contains("does not know the secret"));
        }
        assert!(link(&link_key(&key, &id), 1).unwrap_err().contains("no rank of this world"));
        drop((link(&link_key(&key, &id), 2).unwrap(), master));
        for error in errors(world.join().unwrap()) {
            assert!(error.contains("rank 2 died"), "{error}");
        }
    });
}
