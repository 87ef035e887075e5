//! Bits that flip between two ranks cause an error that names a rank, and never a different result.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use moe_comm::candle::Result;
use moe_comm::{Collectives, Communicator, Exec, Join, ReduceOp, SocketComm, SocketTimeouts, View, ViewMut};

use crate::foreign::launch;
use crate::support::{Stream, text, view_mut};

/// Passes bytes on, flips a bit of the byte at `flip`, and returns the number of bytes.
fn pass(mut from: TcpStream, mut to: TcpStream, flip: Option<(usize, u8)>) -> usize {
    let mut bytes = vec![0; 1 << 16];
    let mut passed = 0;
    while let Ok(n @ 1..) = from.read(&mut bytes) {
        if let Some((at, bit)) = flip.filter(|(at, _)| (passed..passed + n).contains(at)) {
            bytes[at - passed] ^= 1 << bit;
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

/// The results of a rank after collectives of several kinds and sizes, and messages in both directions.
fn work(comm: &SocketComm) -> Result<Vec<u64>> {
    let ex = &mut Exec::cpu();
    let other = 1 - comm.rank();
    let mut seen = Vec::new();
    for n in [1usize, 40, 3_000, 20_000] {
        let mut sums: Vec<f32> = (0..n).map(|i| (i + comm.rank()) as f32).collect();
        comm.all_reduce(view_mut(&mut sums, n, 1), ReduceOp::Sum, ex)?;
        let mut all = vec![0u32; 2 * n];
        let own = vec![comm.rank() as u32 + 7; n];
        comm.all_gather(View::new(&own, &[n])?, ViewMut::new(&mut all, &[2 * n])?, ex)?;
        let messages = comm.messages();
        messages.send(other, &vec![n as u8; n])?;
        let message = messages.recv(other)?.unwrap_or_default();
        seen.extend(sums.iter().map(|sum| u64::from(sum.to_bits())));
        seen.extend(all.into_iter().map(u64::from).chain(message.into_iter().map(u64::from)));
    }
    Ok(seen)
}

/// The results of two ranks with a proxy between them, and how many bytes passed the proxy in each direction.
fn run(flips: [Option<(usize, u8)>; 2]) -> (Vec<Result<Vec<u64>>>, [usize; 2]) {
    let [proxy, master] = [0, 1].map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap());
    let port = |listener: &TcpListener| listener.local_addr().unwrap().port();
    let proxied = port(&proxy);
    let direct = port(&master);
    let timeouts = SocketTimeouts { rendezvous: Duration::from_secs(4), collective: Duration::from_secs(4) };
    let rank = |rank: usize, port: u16, listener: Option<TcpListener>| {
        let launch = launch(rank, 2, "127.0.0.1", port);
        let comm = SocketComm::connect(Join { timeouts, listener, ..Join::new(&launch, Vec::new()) })?;
        work(&comm)
    };
    std::thread::scope(|scope| {
        let between = scope.spawn(move || {
            let (guest, _) = proxy.accept().unwrap();
            let host = TcpStream::connect((Ipv4Addr::LOCALHOST, direct)).unwrap();
            let guest_2 = guest.try_clone().unwrap();
            let host_2 = host.try_clone().unwrap();
            let there = std::thread::spawn(move || pass(guest, host, flips[0]));
            let back = pass(host_2, guest_2, flips[1]);
            [there.join().unwrap(), back]
        });
        let ranks =
            [scope.spawn(move || rank(0, direct, Some(master))), scope.spawn(move || rank(1, proxied, None))];
        let results = ranks.map(|thread| thread.join().unwrap());
        (Vec::from(results), between.join().unwrap())
    })
}

#[test]
fn a_flipped_bit_is_an_error_that_names_a_rank_and_never_another_result() {
    let (right, passed) = run([None, None]);
    let right: Vec<Vec<u64>> = right.into_iter().map(|result| result.unwrap()).collect();
    let mut random = Stream(5);
    let mut cases: Vec<[Option<(usize, u8)>; 2]> = Vec::new();
    for case in 0..120 {
        let way = case % 2;
        let bit = (random.next() % 8) as u8;
        // Half of the flips are in the first bytes: the handshake and small frames.
        let range = if case % 4 < 2 { 3_000 } else { passed[way] };
        let mut flips = [None, None];
        flips[way] = Some(((random.next() % range as u64) as usize, bit));
        cases.push(flips);
    }
    let start = Instant::now();
    let mut failed = 0;
    for some in cases.chunks(24) {
        let results: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = some.iter().map(|flips| scope.spawn(|| run(*flips).0)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        for (flips, results) in some.iter().zip(results) {
            for (rank, result) in results.into_iter().enumerate() {
                match result {
                    Ok(seen) => assert!(seen == right[rank], "{flips:?}: another result on rank {rank}"),
                    Err(e) => {
                        let error = text(e);
                        assert!(error.contains("rank 0") || error.contains("rank 1"), "{flips:?}: {error}");
                        failed += 1;
                    }
                }
            }
        }
    }
    assert!(failed > 150, "{failed} of 240 ranks have noticed it");
    assert!(start.elapsed() < Duration::from_secs(90), "{:?}", start.elapsed());
}
