//! Tests that concern only ranks of several processes: connections that break or carry garbage, messages, and the end
//! of the world.

use std::time::{Duration, Instant};

use moe_comm::candle::Result;
use moe_comm::{Collectives, Communicator, Exec, Messages, News, ReduceOp, SocketComm, View, ViewMut};

use crate::support::{World, run, text, view_mut};

/// All ranks send more than any socket buffers, to all others at once.
#[test]
fn large_payloads_cross_without_a_deadlock() {
    let len = 3 << 20;
    let results = run::<SocketComm, _>(3, |rank, comm| {
        let ex = &mut Exec::cpu();
        let input = vec![rank as f32; 3 * len];
        let mut out = vec![0f32; 3 * len];
        comm.all_to_all(View::new(&input, &[3, len])?, ViewMut::new(&mut out, &[3, len])?, ex)?;
        let expected = |i: usize| (i / len) as f32;
        Ok((0..3 * len).all(|i| out[i] == expected(i)))
    });
    assert!(results.into_iter().all(|ok| ok.unwrap()));
}

#[test]
fn messages_keep_their_order_and_wait_without_limit() {
    let world = SocketComm::world_with_timeout(3, Duration::from_millis(300));
    let results = moe_comm::run_ranks_with(world, |rank, comm| {
        let messages = comm.messages();
        match rank {
            0 => {
                // This is longer than the limit of a collective.
                std::thread::sleep(Duration::from_millis(700));
                for i in 0..100u32 {
                    messages.send(1, &i.to_le_bytes())?;
                }
                messages.send(2, &vec![9; 5 << 20])?;
                assert_eq!(messages.recv(2)?.unwrap(), b"thanks");
            }
            1 => {
                for i in 0..100u32 {
                    assert_eq!(messages.recv(0)?.unwrap(), i.to_le_bytes());
                }
            }
            _ => {
                assert_eq!(messages.recv(0)?.unwrap(), vec![9; 5 << 20]);
                messages.send(0, b"thanks")?;
            }
        }
        comm.barrier(&mut Exec::cpu())
    });
    results.into_iter().for_each(|result| result.unwrap());
}

/// Waits for a message of rank 0 on another rank, while rank 0 runs `rank_0`.
fn wait_while(rank_0: impl FnOnce(SocketComm) + Send) -> Vec<Result<Option<Vec<u8>>>> {
    let mut world = SocketComm::world_with_timeout(3, Duration::from_secs(60));
    let others = world.split_off(1);
    let first = world.remove(0);
    let start = Instant::now();
    let results = std::thread::scope(|scope| {
        let wait = |comm: SocketComm| move || comm.messages().recv(0);
        let waiting: Vec<_> = others.into_iter().map(|comm| scope.spawn(wait(comm))).collect();
        std::thread::sleep(Duration::from_millis(30));
        scope.spawn(|| rank_0(first));
        waiting.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(start.elapsed() < Duration::from_secs(5));
    results
}

#[test]
fn a_goodbye_ends_the_wait_for_messages() {
    for result in wait_while(|comm| {
        comm.messages().send(1, b"last").unwrap();
        drop(comm);
    })
    .into_iter()
    .skip(1)
    {
        assert_eq!(result.unwrap(), None);
    }
    // A message that was sent before the failure is still received.
    let results = wait_while(|comm| comm.messages().send(1, b"last").unwrap());
    assert_eq!(results.into_iter().next().unwrap().unwrap().unwrap(), b"last");
}

/// A message of one rank is received although others have sent none; the same holds for a rank that leaves.
#[test]
fn messages_of_any_rank_are_heard() {
    let mut world = SocketComm::world(3);
    let third = world.pop().unwrap();
    let second = world.pop().unwrap();
    let first = world.pop().unwrap();
    let messages = first.messages();
    assert_eq!(messages.try_recv_any(&[1, 2]).unwrap(), None);
    third.messages().send(0, b"one").unwrap();
    assert_eq!(messages.recv_any(&[1, 2]).unwrap(), (2, News::Message(b"one".to_vec())));
    second.messages().send(0, b"two").unwrap();
    drop(second);
    assert_eq!(messages.recv_any(&[1, 2]).unwrap(), (1, News::Message(b"two".to_vec())));
    assert_eq!(messages.recv_any(&[1, 2]).unwrap(), (1, News::Left));
    assert_eq!(messages.try_recv_any(&[2]).unwrap(), None);
    third.abort("tired");
    let error = text(messages.recv_any(&[2]).unwrap_err());
    assert_eq!(error, "rank 0 of 3: rank 2 aborted: tired");
    assert!(messages.try_recv_any(&[2]).is_err());
}

#[test]
fn an_abort_ends_the_wait_for_messages() {
    for (rank, result) in wait_while(|comm| comm.abort("no more")).into_iter().enumerate() {
        let error = text(result.unwrap_err());
        assert_eq!(error, format!("rank {} of 3: rank 0 aborted: no more", rank + 1));
    }
}

/// A watch reports how the world ends. A world that was left normally has not failed.
#[test]
fn a_watch_sees_the_end() {
    let mut world = SocketComm::world(2);
    let second = world.pop().unwrap();
    let first = world.pop().unwrap();
    let watches = [first.watcher(), second.watcher()];
    let messages: Messages = second.messages();
    drop(second);
    messages.send(0, b"the last handle keeps the connection").unwrap();
    assert!(first.messages().recv(1).unwrap().is_some());
    drop(messages);
    assert_eq!(first.messages().recv(1).unwrap(), None);
    assert_eq!(watches[1].wait(), None);
    first.check().unwrap();
    first.abort("bored");
    assert_eq!(watches[0].wait().unwrap(), "rank 0 of 2: rank 0 aborted: bored");
}

/// Ranks wait in different groups, and all of them learn of a failure in one group.
#[test]
fn an_abort_reaches_every_group() {
    let start = Instant::now();
    let results = run::<SocketComm, _>(5, |rank, comm| {
        let ex = &mut Exec::cpu();
        let group = comm.split(rank / 2, 0, ex)?;
        if rank == 4 {
            std::thread::sleep(Duration::from_millis(50));
            group.abort("out of paper");
        }
        loop {
            group.all_reduce(view_mut(&mut [1f32; 1000], 1000, 1), ReduceOp::Sum, ex)?;
        }
    });
    assert!(start.elapsed() < Duration::from_secs(5));
    for result in results {
        let result: Result<()> = result;
        let error = text(result.unwrap_err());
        assert!(error.ends_with(": rank 0 (world rank 4) aborted: out of paper"), "{error}");
    }
}

/// Three replicas of two ranks that survive each other.
fn replicas(timeout: Duration) -> Vec<SocketComm> {
    let world = SocketComm::world_with_timeout(6, timeout);
    world.iter().for_each(|comm| comm.survive_replicas(2));
    world
}

/// The sum of one from each rank of a replica, on one rank of it.
fn meet(group: &dyn Communicator) -> Result<f32> {
    let mut sum = [1f32];
    group.all_reduce(view_mut(&mut sum, 1, 1), ReduceOp::Sum, &mut Exec::cpu())?;
    Ok(sum[0])
}

/// One rank of the second replica fails. Its replica ends, and the others go on and learn why, after all that it said.
#[test]
fn a_lost_replica_leaves_the_others_alone() {
    let world = replicas(Duration::from_secs(60));
    let results = moe_comm::run_ranks_with(world, |rank, comm| {
        let group = comm.split(rank / 2, 0, &mut Exec::cpu())?;
        let messages = comm.messages();
        if rank == 2 {
            // The split has ended on all ranks.
            std::thread::sleep(Duration::from_millis(100));
            messages.send(0, b"last words")?;
            // The other rank of the replica reports the loss, too, and its connection may be faster.
            messages.recv(0)?;
            comm.abort("out of memory");
        }
        if rank == 0 {
            assert_eq!(messages.recv_any(&[2, 4])?, (2, News::Message(b"last words".to_vec())));
            messages.send(2, b"heard")?;
            let News::Lost(why) = messages.recv_any(&[2, 4])?.1 else { panic!("rank 2 is not lost") };
            assert_eq!(why, "rank 2 aborted: out of memory");
            assert!(messages.some_are_lost() && messages.is_lost(3) && !messages.is_lost(4));
            // What is sent to a lost rank goes nowhere, and its partner is lost as well.
            messages.send(3, b"are you there?")?;
            assert!(text(messages.recv(3).unwrap_err()).contains("out of memory"));
            messages.send(4, b"go on")?;
            assert_eq!(messages.recv_any(&[4])?, (4, News::Message(b"done".to_vec())));
        }
        if rank == 4 {
            messages.recv(0)?;
        }
        let sum = (0..200).map(|_| meet(group.as_ref())).collect::<Result<Vec<_>>>()?;
        if rank == 4 {
            messages.send(0, b"done")?;
        }
        Ok(sum[199])
    });
    for (rank, result) in results.into_iter().enumerate() {
        match result {
            Ok(sum) => assert!(rank / 2 != 1 && sum == 2.0, "rank {rank}"),
            Err(e) => {
                assert_eq!(rank / 2, 1, "rank {rank}: {}", text(e));
            }
        }
    }
}

/// No rank survives the first replica.
#[test]
fn the_first_replica_ends_all() {
    let world = replicas(Duration::from_secs(60));
    let results = moe_comm::run_ranks_with(world, |rank, comm| {
        let group = comm.split(rank / 2, 0, &mut Exec::cpu())?;
        if rank == 1 {
            comm.abort("out of paper");
        }
        loop {
            meet(group.as_ref())?;
        }
    });
    for result in results {
        let result: Result<()> = result;
        assert!(text(result.unwrap_err()).contains("rank 1 aborted: out of paper"));
    }
}

/// A collective with a rank that is lost fails soon, and does not wait for its time limit.
#[test]
fn a_collective_with_a_lost_rank_fails() {
    let world = replicas(Duration::from_secs(60));
    let start = Instant::now();
    let results = moe_comm::run_ranks_with(world, |rank, comm| {
        if rank == 5 {
            comm.abort("out of ink");
            return Ok(());
        }
        comm.barrier(&mut Exec::cpu())
    });
    assert!(results[..5].iter().all(|result| result.is_err()));
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
}
