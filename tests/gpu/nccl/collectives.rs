//! Compares every collective with in-process CPU ranks: random shapes, dtypes and counts, many in a row.

use candle_core::{Device, Result};
use moe_comm::{Collectives, Communicator, run_ranks};
use moe_kernels::{Buffer, Exec};

use super::rounds::{Round, bits};
use super::{LIMIT, run_nccl_ranks, worlds};
use crate::common::Rng;

/// Runs `play(communicator, device of the data, context)` on CPU ranks and on GPUs, and passes the results of both
/// ranks to `check`.
fn on_both(
    n: usize,
    place: impl Fn(&Exec) -> Device + Sync,
    play: impl Fn(&dyn Communicator, &Device, &mut Exec) -> Result<Vec<Buffer>> + Sync,
) -> (Vec<Vec<Buffer>>, Vec<Vec<Buffer>>) {
    let expected = run_ranks(n, |_, comm| play(&comm, &Device::Cpu, &mut Exec::cpu()));
    let got = run_nccl_ranks(n, LIMIT, |comm, ex| {
        let device = place(ex);
        play(comm, &device, ex).unwrap()
    });
    (expected.into_iter().map(|rank| rank.unwrap()).collect(), got)
}

/// Consecutive seeds, so that every collective occurs equally often.
fn seeds(rng: &mut Rng, count: u64) -> Vec<u64> {
    let first = rng.bits() >> 8;
    (first..first + count).collect()
}

fn collectives_agree(count: u64, place: impl Fn(&Exec) -> Device + Sync) {
    let mut rng = Rng::new();
    for n in worlds() {
        let rounds: Vec<Round> = seeds(&mut rng, count).into_iter().map(|seed| Round::new(seed, n)).collect();
        let (expected, got) = on_both(n, &place, |comm, device, ex| {
            rounds.iter().map(|round| round.play(comm, device, ex)).collect()
        });
        for (i, round) in rounds.iter().enumerate() {
            for rank in 0..n {
                round.check(n, &expected[rank][i], &got[rank][i]);
                if round.is_replicated() {
                    assert_eq!(
                        bits(&got[rank][i]),
                        bits(&got[0][i]),
                        "rank {rank} differs from rank 0: {round:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn collectives_agree_with_cpu_ranks() {
    collectives_agree(400, |ex| ex.device().clone());
}

#[test]
fn views_of_host_memory_take_part() {
    collectives_agree(40, |_| Device::Cpu);
}

/// Groups split from the world, with their ranks in reverse order, are used in turn with the world and with a group
/// split from a group.
#[test]
fn groups_work_next_to_the_world() {
    let mut rng = Rng::new();
    for n in worlds() {
        let seeds = seeds(&mut rng, 48);
        let (expected, got) = on_both(
            n,
            |ex| ex.device().clone(),
            |comm, device, ex| {
                let half = comm.split(comm.rank() % 2, n - comm.rank(), ex)?;
                let alone = half.split(half.rank(), 0, ex)?;
                assert_eq!((half.world_size(), alone.world_size()), ((n + 1 - comm.rank() % 2) / 2, 1));
                assert_eq!(half.rank(), half.world_size() - 1 - comm.rank() / 2);
                let groups: [&dyn Communicator; 3] = [&*half, comm, &*alone];
                let play = |(i, &seed): (usize, &u64)| {
                    let group = groups[i % 3];
                    Round::new(seed, group.world_size()).play(group, device, ex)
                };
                seeds.iter().enumerate().map(play).collect()
            },
        );
        for (i, &seed) in seeds.iter().enumerate() {
            for rank in 0..n {
                let size = [(n + 1 - rank % 2) / 2, n, 1][i % 3];
                Round::new(seed, size).check(size, &expected[rank][i], &got[rank][i]);
            }
        }
    }
}

/// No rank leaves a barrier before every rank has reached it.
#[test]
fn a_barrier_waits_for_every_rank() {
    use std::sync::atomic::{AtomicUsize, Ordering};
    for n in worlds() {
        let arrived = AtomicUsize::new(0);
        run_nccl_ranks(n, LIMIT, |comm, ex| {
            for round in 1..=20 {
                std::thread::sleep(std::time::Duration::from_millis((comm.rank() * round % 5) as u64));
                arrived.fetch_add(1, Ordering::SeqCst);
                comm.barrier(ex).unwrap();
                assert!(arrived.load(Ordering::SeqCst) >= n * round, "round {round}");
            }
        });
    }
}
