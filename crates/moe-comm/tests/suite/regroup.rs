//! Worlds that go on without a rank that all others need: collectives that wait for it end, and the ranks that are left
//! form a new generation.

use std::time::{Duration, Instant};

use moe_comm::candle::{Result, bail};
use moe_comm::{Collectives, Communicator, Exec, ReduceOp, SocketComm};

/// What the ranks tell rank 0.
type Facts = [(usize, Vec<u8>)];

use crate::support::{World, text, view_mut};

/// Ranks in replicas of `replica` ranks that regroup.
fn world(ranks: usize, replica: usize, timeout: Duration) -> Vec<SocketComm> {
    let world = SocketComm::world_with_timeout(ranks, timeout);
    world.iter().for_each(|comm| comm.survive_by_regrouping(replica));
    world
}

fn sum(comm: &dyn Communicator) -> Result<f32> {
    let mut sum = [1f32];
    comm.all_reduce(view_mut(&mut sum, 1, 1), ReduceOp::Sum, &mut Exec::cpu())?;
    Ok(sum[0])
}

/// Adds up ones until that fails.
fn until_it_fails(comm: &SocketComm) -> String {
    loop {
        if let Err(e) = sum(comm) {
            return text(e);
        }
    }
}

fn any(_: &Facts) -> Result<()> {
    Ok(())
}

const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(5);

#[test]
fn the_ranks_that_are_left_form_a_new_generation() {
    let start = Instant::now();
    let results = moe_comm::run_ranks_with(world(4, 1, LONG), |rank, comm| {
        if rank == 2 {
            (0..100).try_for_each(|_| sum(&comm).map(drop))?;
            comm.abort("out of memory");
            return Ok(Vec::new());
        }
        let old = comm.messages();
        // No rank takes these messages in this generation, and the next one must not see them.
        old.send((rank + 1) % 4, b"old")?;
        let error = until_it_fails(&comm);
        assert!(error.contains("rank 2 aborted: out of memory"), "{error}");
        assert!(comm.why_ended().unwrap().contains("out of memory"));
        assert!(old.recv(2).is_err() && old.send(0, b"x").is_err() && comm.check().is_err());
        let check = |facts: &Facts| {
            assert_eq!(facts, &[(0, vec![0]), (1, vec![1]), (3, vec![3])]);
            Ok(())
        };
        let next = comm.regroup(&[rank as u8], check)?;
        assert_eq!((next.members(), next.world_size()), (&[0, 1, 3][..], 3));
        // Another rank may hear of the new generation before the reason reaches it.
        let why = comm.why_lost(2);
        assert!(
            why.as_deref() == Some("rank 2 aborted: out of memory") || why.is_some() && rank > 0,
            "{why:?}"
        );
        let halves = next.split(next.rank() / 2, 0, &mut Exec::cpu())?;
        next.messages().send((next.rank() + 1) % 3, &[rank as u8])?;
        let said = next.messages().recv((next.rank() + 2) % 3)?.unwrap();
        assert_eq!(said, [[3, 0, 1][next.rank()]]);
        // The old communicators change nothing.
        comm.abort("too late");
        drop(comm);
        Ok(vec![sum(&next)?, sum(halves.as_ref())?])
    });
    let results: Vec<_> = results.into_iter().map(|result| result.ok()).collect();
    let want = [Some(vec![3., 2.]), Some(vec![3., 2.]), results[2].clone(), Some(vec![3., 1.])];
    assert_eq!(results, want);
    assert!(start.elapsed() < LONG / 2, "{:?}", start.elapsed());
}

#[test]
fn a_rank_that_takes_part_in_nothing_is_left_out() {
    let results = moe_comm::run_ranks_with(world(3, 1, SHORT), |rank, comm| {
        if rank == 1 {
            // It does nothing until the others have gone on without it.
            while comm.check().is_ok() || comm.why_ended().is_some() {
                std::thread::sleep(POLL);
            }
            return sum(&comm);
        }
        let error = until_it_fails(&comm);
        assert!(error.contains("rank 1 stalled"), "{error}");
        let next = comm.regroup(&[], any)?;
        assert!(comm.why_lost(1).unwrap().contains("rank 1 stalled") || rank > 0);
        sum(&next)
    });
    assert_eq!([0, 2].map(|rank| *results[rank].as_ref().unwrap()), [2., 2.]);
    assert!(text(results.into_iter().nth(1).unwrap().unwrap_err()).contains("stalled"));
}

#[test]
fn ranks_may_be_lost_one_after_the_other() {
    let results = moe_comm::run_ranks_with(world(6, 2, LONG), |rank, comm| {
        if rank == 5 {
            comm.abort("first");
            return Ok(0.);
        }
        until_it_fails(&comm);
        if rank == 3 {
            // The others wait for it to regroup.
            comm.fail_world("second");
            return Ok(0.);
        }
        let next = comm.regroup(&[], any)?;
        sum(&next)
    });
    // The other rank of a replica ends with it.
    for (rank, result) in results.into_iter().enumerate() {
        match rank {
            0 | 1 => assert_eq!(result.unwrap(), 2.),
            2 => assert!(text(result.unwrap_err()).contains("second")),
            4 => assert!(text(result.unwrap_err()).contains("first")),
            _ => {}
        }
    }
}

#[test]
fn without_a_loss_or_with_a_refusal_nothing_goes_on() {
    let results = moe_comm::run_ranks_with(world(2, 1, SHORT), |rank, comm| {
        if rank == 0 {
            until_it_fails(&comm);
        }
        // Rank 1 is late, and is there again when the others regroup.
        while comm.check().is_ok() {
            std::thread::sleep(POLL);
        }
        comm.regroup(&[], any).inspect_err(|e| comm.fail_world(&text(e)))
    });
    for result in results {
        let error = text(result.unwrap_err());
        assert!(error.contains("rank 1 stalled") && error.contains("no rank is lost"), "{error}");
    }
    let results = moe_comm::run_ranks_with(world(3, 1, LONG), |rank, comm| {
        if rank == 2 {
            comm.abort("out of memory");
            return Ok(());
        }
        until_it_fails(&comm);
        let refuse = |_: &Facts| bail!("too little memory");
        comm.regroup(&[], refuse).inspect_err(|e| comm.fail_world(&text(e))).map(drop)
    });
    for result in results.into_iter().take(2) {
        assert!(text(result.unwrap_err()).contains("too little memory"));
    }
}

/// Without the first replica nothing goes on, also while the others regroup.
#[test]
fn the_first_replica_ends_all() {
    let results = moe_comm::run_ranks_with(world(3, 1, LONG), |rank, comm| {
        if rank == 2 {
            comm.abort("out of ink");
            return Ok(());
        }
        until_it_fails(&comm);
        if rank == 0 {
            comm.fail_world("out of paper");
            return Ok(());
        }
        comm.regroup(&[], any).map(drop)
    });
    let error = text(results.into_iter().nth(1).unwrap().unwrap_err());
    assert!(error.contains("rank 0 aborted: out of paper"), "{error}");
}
