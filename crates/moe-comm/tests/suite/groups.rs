//! Groups that are split from a world: members, order, collectives inside, and common failure.

use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use moe_comm::candle::Result;
use moe_comm::{
    Collectives, Communicator, Exec, ParallelConfig, ParallelGroups, ReduceOp, SelfComm, SocketComm,
    ThreadComm, run_ranks_with,
};
use proptest::prelude::*;

use crate::support::{World, over_both, run, text, view, view_mut};

/// The world ranks of a group, in its order.
fn members(comm: &dyn Communicator, rank: usize, ex: &mut Exec) -> Result<Vec<u32>> {
    let mut all = vec![0u32; comm.world_size()];
    comm.all_gather(view(&[rank as u32], 1, 1), view_mut(&mut all, comm.world_size(), 1), ex)?;
    Ok(all)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn split_groups_by_colour_and_orders_by_key(
        ranks in prop::collection::vec((0..3usize, 0..3usize), 1..=6),
    ) {
        split_groups::<ThreadComm>(&ranks);
        split_groups::<SocketComm>(&ranks);
    }
}

fn split_groups<C: World>(ranks: &[(usize, usize)]) {
    let results = run::<C, _>(ranks.len(), |rank, comm| {
        let mut ex = Exec::cpu();
        let (color, key) = ranks[rank];
        let group = comm.split(color, key, &mut ex)?;
        let members = members(&*group, rank, &mut ex)?;
        assert_eq!(members[group.rank()], rank as u32);
        // The parent still works, and so does a group of the group.
        comm.barrier(&mut ex)?;
        let alone = group.split(rank, 0, &mut ex)?;
        assert_eq!((alone.rank(), alone.world_size()), (0, 1));
        Ok(members)
    });
    for (rank, members) in results.into_iter().enumerate() {
        let mut expected: Vec<usize> = (0..ranks.len()).filter(|&r| ranks[r].0 == ranks[rank].0).collect();
        expected.sort_by_key(|&r| (ranks[r].1, r));
        let expected: Vec<u32> = expected.into_iter().map(|r| r as u32).collect();
        assert_eq!(members.unwrap(), expected);
    }
}

/// The groups of a geometry: a tensor-parallel group holds one copy of the model, a data-parallel group the same slice
/// of it.
fn groups_of_a_geometry<C: World>() {
    for (tp, dp, ep) in [(1, 1, true), (2, 1, false), (2, 2, true), (2, 3, false), (1, 4, true), (3, 2, true)]
    {
        let config = ParallelConfig { tp, dp, enable_expert_parallel: ep, ..Default::default() };
        let results = run::<C, _>(tp * dp, |rank, comm| {
            let mut ex = Exec::cpu();
            let geometry = config.geometry(rank)?;
            let groups = ParallelGroups::new(&geometry, Arc::new(comm), &mut ex)?;
            let neighbours: Vec<usize> = (0..tp).map(|t| geometry.dp_rank * tp + t).collect();
            let strided: Vec<usize> = (0..dp).map(|d| d * tp + geometry.tp_rank).collect();
            let experts: Vec<usize> = if ep { (0..tp * dp).collect() } else { vec![rank] };
            for (group, expected, own) in [
                (&groups.tp, neighbours, geometry.tp_rank),
                (&groups.dp, strided, geometry.dp_rank),
                (&groups.ep, experts, geometry.ep_rank),
            ] {
                assert_eq!(group.rank(), own);
                let members: Vec<usize> =
                    members(&**group, rank, &mut ex)?.into_iter().map(|r| r as usize).collect();
                assert_eq!(members, expected);
            }
            groups.world.barrier(&mut ex)
        });
        results.into_iter().for_each(|r| r.unwrap());
    }
    let single = ParallelGroups::single();
    assert_eq!((single.tp.world_size(), single.ep.rank()), (1, 0));
    let wrong = ParallelConfig { tp: 2, ..Default::default() }.geometry(1).unwrap();
    let error = ParallelGroups::new(&wrong, Arc::new(SelfComm::new()), &mut Exec::cpu()).unwrap_err();
    assert!(error.to_string().contains("rank 1 of 2, but the communicator is of rank 0 of 1"), "{error}");
}

/// Groups run at the same time without waiting for each other.
fn groups_are_independent<C: World>() {
    let results = run::<C, _>(4, |rank, comm| {
        let mut ex = Exec::cpu();
        let group = comm.split(rank % 2, 0, &mut ex)?;
        for i in 0..(if rank % 2 == 0 { 500 } else { 3 }) {
            let mut x = [i + rank as i64];
            group.all_reduce(view_mut(&mut x, 1, 1), ReduceOp::Sum, &mut ex)?;
            assert_eq!(x[0], 2 * i + if rank % 2 == 0 { 2 } else { 4 });
        }
        comm.barrier(&mut ex)
    });
    results.into_iter().for_each(|r| r.unwrap());
}

/// Ranks 0 and 1 form one group, ranks 2 and 3 another. Rank 3 fails in its group, and every rank gets the error.
fn a_failure_in_a_group_fails_the_world<C: World>() {
    let start = Instant::now();
    let split = Barrier::new(4);
    let results = run_ranks_with(C::world_with_timeout(4, Duration::from_secs(60)), |rank, comm| {
        let mut ex = Exec::cpu();
        let group = comm.split(rank / 2, 0, &mut ex)?;
        split.wait();
        match rank {
            3 => panic!("lost"),
            2 => group.barrier(&mut ex),
            // This rank waits for its own group only, and then in the parent.
            _ => group.barrier(&mut ex).and_then(|()| comm.barrier(&mut ex)),
        }
    });
    assert!(start.elapsed() < Duration::from_secs(5));
    let errors: Vec<String> = results.into_iter().map(|r| text(r.unwrap_err())).collect();
    assert_eq!(errors[2], "barrier on rank 0 (world rank 2) of 2: rank 3 panicked: lost");
    for error in [&errors[0], &errors[1]] {
        assert!(error.ends_with(": rank 3 panicked: lost"), "{error}");
    }
}

fn a_failure_of_the_world_fails_its_groups<C: World>() {
    let healthy = Barrier::new(4);
    let results = run::<C, _>(4, |rank, comm| {
        let mut ex = Exec::cpu();
        let group = comm.split(rank / 2, 0, &mut ex)?;
        let inner = group.split(0, 1 - rank % 2, &mut ex)?;
        comm.barrier(&mut ex)?;
        healthy.wait();
        if rank == 1 {
            comm.abort("enough");
        } else {
            // Ranks 2 and 3 do not wait for rank 1, so they may get through a few rounds.
            while inner.barrier(&mut ex).is_ok() {
                std::thread::yield_now();
            }
        }
        let error = text(inner.check().unwrap_err());
        assert!(group.barrier(&mut ex).is_err() && comm.check().is_err());
        Ok(error)
    });
    let errors: Vec<String> = results.into_iter().map(|r| r.unwrap()).collect();
    assert_eq!(errors[0], "rank 1 (world rank 0) of 2: rank 1 aborted: enough");
    assert_eq!(errors[3], "rank 0 (world rank 3) of 2: rank 1 aborted: enough");
}

/// Errors inside a group name the ranks of the group and of the world.
fn group_faults_name_world_ranks<C: World>() {
    let split = Barrier::new(3);
    let results = run::<C, _>(3, |rank, comm| {
        let mut ex = Exec::cpu();
        let group = comm.split(usize::from(rank > 0), 0, &mut ex)?;
        split.wait();
        if rank == 2 {
            drop(group);
            // This rank stays alive, so that it only leaves the group.
            while comm.check().is_ok() {
                std::thread::sleep(Duration::from_millis(5));
            }
            return Ok(());
        }
        group.barrier(&mut ex)
    });
    results[0].as_ref().unwrap();
    let error = text(results[1].as_ref().unwrap_err());
    let cause = "rank 1 (world rank 2) left (dropped the communicator) while others waited for barrier";
    assert_eq!(error, format!("barrier on rank 0 (world rank 1) of 2: {cause}"));
}

/// Dropping a group does not mean leaving the world.
fn dropped_groups_leave_the_world_alone<C: World>() {
    let results = run::<C, _>(3, |rank, comm| {
        let mut ex = Exec::cpu();
        for _ in 0..50 {
            comm.split(rank % 2, rank, &mut ex)?.barrier(&mut ex)?;
        }
        comm.barrier(&mut ex)
    });
    results.into_iter().for_each(|r| r.unwrap());
}

#[test]
fn a_world_of_one_aborts_with_its_groups() {
    let comm = SelfComm::new();
    let mut ex = Exec::cpu();
    let group = comm.split(7, 7, &mut ex).unwrap();
    group.barrier(&mut ex).unwrap();
    group.abort("stop");
    assert_eq!(text(comm.check().unwrap_err()), "rank 0 of 1: rank 0 aborted: stop");
    let error = text(comm.barrier(&mut ex).unwrap_err());
    assert_eq!(error, "barrier on rank 0 of 1: rank 0 aborted: stop");
}

over_both! {
    groups_of_a_geometry
    groups_are_independent
    a_failure_in_a_group_fails_the_world
    a_failure_of_the_world_fails_its_groups
    group_faults_name_world_ranks
    dropped_groups_leave_the_world_alone
}
