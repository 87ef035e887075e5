//! How processes find each other: worlds that form, and everything that prevents one from forming. Each process is a
//! thread here; they share nothing but the ports.

use std::io::Write;
use std::net::{Ipv4Addr, TcpListener};
use std::time::{Duration, Instant};

use moe_comm::candle::{Result, bail};
use moe_comm::{
    Collectives, Communicator, Exec, Join, Launch, ReduceOp, SocketComm, SocketTimeouts, WorldSecret,
    all_gather_bytes, broadcast_bytes,
};

use crate::foreign::{free_port, launch};
use crate::support::{text, view_mut};

/// The secret of the worlds in these tests, unless a test sets another.
pub const SECRET: &str = "known to these tests";

pub struct Rank {
    pub launch: Launch,
    pub settings: Vec<(&'static str, &'static str)>,
    pub secret: Option<&'static str>,
    pub limit: Duration,
}

impl Rank {
    pub fn new(rank: usize, world_size: usize, port: u16) -> Self {
        let launch = launch(rank, world_size, "127.0.0.1", port);
        let settings = vec![("--tp", "2"), ("version", "1")];
        let limit = Duration::from_secs(20);
        Self { launch, settings, secret: Some(SECRET), limit }
    }

    pub fn join(&self) -> Result<SocketComm> {
        let secret = WorldSecret::from_env(|_| self.secret.map(str::to_string))?;
        let settings = self.settings.iter().map(|(n, v)| (n.to_string(), v.to_string())).collect();
        let timeouts = SocketTimeouts { rendezvous: self.limit, ..SocketTimeouts::default() };
        SocketComm::connect(Join { timeouts, secret, ..Join::new(&self.launch, settings) })
    }
}

/// Joins all ranks, each on its own thread that starts a little later, and adds up their numbers.
pub fn join_all(ranks: &[Rank]) -> Vec<Result<f32>> {
    std::thread::scope(|scope| {
        let start = |(i, rank): (usize, &'_ Rank)| -> Result<f32> {
            std::thread::sleep(Duration::from_millis(20 * i as u64));
            let comm = rank.join()?;
            let mut sum = [comm.rank() as f32 + 1.];
            comm.all_reduce(view_mut(&mut sum, 1, 1), ReduceOp::Sum, &mut Exec::cpu())?;
            Ok(sum[0])
        };
        let threads: Vec<_> = ranks.iter().enumerate().map(|rank| scope.spawn(move || start(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

pub fn errors(results: Vec<Result<f32>>) -> Vec<String> {
    results.into_iter().map(|result| text(result.unwrap_err())).collect()
}

#[test]
fn ranks_find_each_other_in_any_order() {
    for n in [1, 2, 5] {
        let port = free_port();
        let mut ranks: Vec<Rank> = (0..n).map(|rank| Rank::new(rank, n, port)).collect();
        ranks.reverse();
        for sum in join_all(&ranks) {
            assert_eq!(sum.unwrap(), (n * (n + 1) / 2) as f32);
        }
    }
}

/// The master may be all interfaces, or a name instead of an address.
#[test]
fn the_master_may_be_a_name() {
    let port = free_port();
    let named = |rank| Rank { launch: launch(rank, 2, "localhost", port), ..Rank::new(rank, 2, port) };
    join_all(&[named(0), named(1)]).into_iter().for_each(|sum| assert_eq!(sum.unwrap(), 3.));
    if TcpListener::bind("[::1]:0").is_ok() {
        let named = |rank| Rank { launch: launch(rank, 3, "::1", port), ..Rank::new(rank, 3, port) };
        join_all(&[named(0), named(1), named(2)]).into_iter().for_each(|sum| assert_eq!(sum.unwrap(), 6.));
    }
}

#[test]
fn another_setting_is_named_on_all_ranks() {
    let port = free_port();
    let mut ranks: Vec<Rank> = (0..3).map(|rank| Rank::new(rank, 3, port)).collect();
    ranks[2].settings[0].1 = "4";
    let start = Instant::now();
    for (rank, error) in errors(join_all(&ranks)).iter().enumerate() {
        let place = format!("rank {rank} cannot form the world: ");
        let cause = "rank 2 has --tp 4, but rank 0 has 2; start all ranks with the same settings";
        assert!(error.starts_with(&place) && error.ends_with(cause), "{error}");
    }
    assert!(start.elapsed() < Duration::from_secs(10));
}

#[test]
fn worlds_of_other_sizes_and_ranks_that_are_there_twice() {
    let port = free_port();
    let error = errors(join_all(&[Rank::new(0, 3, port), Rank::new(1, 2, port)]));
    for error in error {
        assert!(error.contains("rank 1 is of a world of 2 ranks, rank 0 of one of 3"), "{error}");
    }
    let port = free_port();
    let error = errors(join_all(&[Rank::new(0, 3, port), Rank::new(1, 3, port), Rank::new(1, 3, port)]));
    for error in error {
        assert!(error.contains("two processes are rank 1"), "{error}");
    }
}

#[test]
fn ranks_that_never_appear_end_the_wait() {
    let port = free_port();
    let limit = Duration::from_millis(700);
    let start = Instant::now();
    let ranks = [0, 2].map(|rank| Rank { limit, ..Rank::new(rank, 4, port) });
    for error in errors(join_all(&ranks)) {
        assert!(
            error.contains("ranks 1 and 3 did not appear within 700ms (MOE_RENDEZVOUS_TIMEOUT)"),
            "{error}"
        );
    }
    let alone = Rank { limit, ..Rank::new(1, 2, free_port()) };
    let error = errors(join_all(&[alone])).remove(0);
    let cause = "rank 1 cannot form the world: cannot reach rank 0 at 127.0.0.1:";
    assert!(error.starts_with(cause) && error.contains("within 700ms"), "{error}");
    assert!(start.elapsed() < Duration::from_secs(10));
}

#[test]
fn a_master_that_is_something_else() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"220 mail.example.org ESMTP\r\n").unwrap();
        stream
    });
    let error = errors(join_all(&[Rank::new(1, 2, port)])).remove(0);
    assert!(error.contains("is no rank of this program: it does not speak"), "{error}");
    drop(server.join().unwrap());
    // A port in use is an error of rank 0 itself.
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let error = errors(join_all(&[Rank::new(0, 2, taken.local_addr().unwrap().port())])).remove(0);
    assert!(error.contains("(MASTER_PORT)") && error.contains("choose another one"), "{error}");
}

/// The process that started the ranks is the first to know that one has ended.
#[test]
fn waiting_ends_when_it_makes_no_sense() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let launch = launch(0, 2, "127.0.0.1", listener.local_addr().unwrap().port());
    let start = Instant::now();
    let alive = || match start.elapsed() > Duration::from_millis(100) {
        true => bail!("rank 1 ended (exit status: 1)"),
        false => Ok(()),
    };
    let join = Join { listener: Some(listener), alive: &alive, ..Join::new(&launch, Vec::new()) };
    let error = text(SocketComm::connect(join).unwrap_err());
    assert_eq!(error, "rank 0 cannot form the world: rank 1 ended (exit status: 1)");
    assert!(start.elapsed() < Duration::from_secs(5));
}

#[test]
fn blobs_reach_every_rank() {
    let blobs = [b"".to_vec(), vec![7; 100_000], b"id".to_vec()];
    let results = crate::support::run::<SocketComm, _>(3, |rank, comm| {
        let id = broadcast_bytes(&comm, 2, &blobs[rank])?;
        Ok((id, all_gather_bytes(&comm, &blobs[rank], &mut Exec::cpu())?))
    });
    for result in results {
        let (id, all) = result.unwrap();
        assert!(id == b"id" && all == blobs);
    }
    let results = crate::support::run::<SocketComm, _>(2, |rank, comm| {
        let blob = if rank == 1 { vec![0; (64 << 20) + 1] } else { Vec::new() };
        broadcast_bytes(&comm, 1, &blob).map(drop)
    });
    for result in results {
        let error = text(result.unwrap_err());
        assert!(error.contains("a blob of 67108865 bytes"), "{error}");
    }
}

#[test]
fn limits_come_from_the_environment() {
    let read = |value: &'static str| {
        SocketTimeouts::from_env(|name| (name == "MOE_COLLECTIVE_TIMEOUT").then(|| value.to_string()))
    };
    let seconds = Duration::from_secs;
    let both = |collective| SocketTimeouts { rendezvous: seconds(300), collective };
    assert_eq!((read("20"), read("")), (Ok(both(seconds(20))), Ok(both(seconds(300)))));
    for bad in ["0", "-1", "soon"] {
        let error = read(bad).unwrap_err().to_string();
        assert!(error.contains("MOE_COLLECTIVE_TIMEOUT") && error.contains(bad), "{error}");
    }
}
