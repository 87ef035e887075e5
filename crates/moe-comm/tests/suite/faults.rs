//! Ranks that panic, leave, stall, abort or return an error in each collective. Every rank soon gets an error that
//! names the rank and the collective, and the group stays failed.

use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use moe_comm::candle::{Result, bail};
use moe_comm::{Collectives, Communicator, Exec, ReduceOp, View, ViewMut, run_ranks_with};

use crate::support::{World, over_both, run, text, view, view_mut};

type Collective = fn(&dyn Communicator, columns: usize) -> Result<()>;

/// Calls `call` with `sent` rows of `columns` ones, with memory for `received` rows, and with counts of two rows for
/// each rank.
fn moved(
    c: &dyn Communicator,
    columns: usize,
    (sent, received): (usize, usize),
    call: impl FnOnce(View, ViewMut, &[usize], &mut Exec) -> Result<()>,
) -> Result<()> {
    let input = vec![1f32; sent * columns];
    let mut out = vec![0f32; received * columns];
    let out = view_mut(&mut out, received, columns);
    call(view(&input, sent, columns), out, &vec![2; c.world_size()], &mut Exec::cpu())
}

/// The number of rows of all ranks.
fn all(c: &dyn Communicator) -> usize {
    2 * c.world_size()
}

/// Each collective on two rows of `columns` elements per rank, by its name in errors.
pub const COLLECTIVES: [(&str, Collective); 10] = [
    ("all_reduce", |c, n| {
        c.all_reduce(view_mut(&mut vec![1f32; 2 * n], 2, n), ReduceOp::Sum, &mut Exec::cpu())
    }),
    ("all_gather", |c, n| moved(c, n, (2, all(c)), |x, out, _, ex| c.all_gather(x, out, ex))),
    ("all_gather", |c, n| moved(c, n, (2, all(c)), |x, out, counts, ex| c.all_gather_v(x, counts, out, ex))),
    ("reduce_scatter", |c, n| {
        moved(c, n, (all(c), 2), |x, out, _, ex| c.reduce_scatter(x, out, ReduceOp::Max, ex))
    }),
    ("reduce_scatter", |c, n| {
        moved(c, n, (all(c), 2), |x, out, counts, ex| c.reduce_scatter_v(x, counts, out, ReduceOp::Sum, ex))
    }),
    ("all_to_all", |c, n| moved(c, n, (all(c), all(c)), |x, out, _, ex| c.all_to_all(x, out, ex))),
    ("all_to_all", |c, n| {
        moved(c, n, (all(c), all(c)), |x, out, counts, ex| c.all_to_all_v(x, counts, out, counts, ex))
    }),
    ("broadcast", |c, n| c.broadcast(view_mut(&mut vec![1f32; 2 * n], 2, n), 0, &mut Exec::cpu())),
    ("barrier", |c, _| c.barrier(&mut Exec::cpu())),
    ("split", |c, _| c.split(0, 0, &mut Exec::cpu()).map(|_| ())),
];

/// Far below the default timeout, so that the test fails if only the timeout finds the fault.
const SOON: Duration = Duration::from_secs(5);

/// Runs a world of 4 in which rank 2 calls `fault` while the others call the collective. Checks that the group stays
/// failed, and returns the errors of the other ranks' calls.
fn errors_of<C: World>(collective: Collective, fault: impl Fn(C) -> Result<()> + Sync) -> Vec<String> {
    let start = Instant::now();
    let world = C::world_with_timeout(4, Duration::from_secs(60));
    let healthy = Barrier::new(4);
    let results = run_ranks_with(world, |rank, comm| {
        // A healthy round comes first. Between processes a fault may arrive before the last posts of this round.
        comm.barrier(&mut Exec::cpu())?;
        healthy.wait();
        if rank == 2 {
            fault(comm)?;
            return Ok(String::new());
        }
        let error = text(collective(&comm, 3).unwrap_err());
        let cause = error.split_once(" of 4: ").unwrap().1;
        for (_, again) in COLLECTIVES {
            assert!(text(again(&comm, 1).unwrap_err()).ends_with(cause));
        }
        assert!(text(comm.check().unwrap_err()).ends_with(cause));
        Ok(error)
    });
    assert!(start.elapsed() < SOON, "took {:?}", start.elapsed());
    let others = results.into_iter().enumerate().filter(|(rank, _)| *rank != 2);
    others.map(|(_, error)| error.unwrap()).collect()
}

#[track_caller]
fn assert_all_say(errors: &[String], op: &str, cause: &str) {
    for (error, rank) in errors.iter().zip([0, 1, 3]) {
        assert_eq!(error, &format!("{op} on rank {rank} of 4: {cause}"));
    }
}

/// Two orders: either the fault comes first, or the other ranks are already waiting.
const DELAYS: [Duration; 2] = [Duration::ZERO, Duration::from_millis(15)];

fn a_rank_that_panics<C: World>() {
    for (op, collective) in COLLECTIVES {
        for delay in DELAYS {
            let errors = errors_of(collective, |_comm: C| {
                std::thread::sleep(delay);
                panic!("index 7 is out of bounds")
            });
            assert_all_say(&errors, op, "rank 2 panicked: index 7 is out of bounds");
        }
    }
}

fn a_rank_that_returns_an_error<C: World>() {
    for (op, collective) in COLLECTIVES {
        for delay in DELAYS {
            let fault = |_comm: C| {
                std::thread::sleep(delay);
                bail!("out of memory")
            };
            let start = Instant::now();
            let results = run::<C, _>(4, |rank, comm| match rank {
                2 => fault(comm),
                _ => collective(&comm, 3),
            });
            assert!(start.elapsed() < SOON);
            let mut errors: Vec<String> = results.into_iter().map(|r| text(r.unwrap_err())).collect();
            assert_eq!(errors.remove(2), "out of memory");
            assert_all_say(&errors, op, "rank 2 failed: out of memory");
        }
    }
}

fn a_rank_that_leaves<C: World>() {
    for (op, collective) in COLLECTIVES {
        for delay in DELAYS {
            let errors = errors_of(collective, |comm: C| {
                std::thread::sleep(delay);
                drop(comm);
                // The rank stays alive, so the others can only notice that it is absent.
                std::thread::sleep(Duration::from_millis(150));
                Ok(())
            });
            let cause = format!("rank 2 left (dropped the communicator) while others waited for {op}");
            assert_all_say(&errors, op, &cause);
        }
    }
}

fn a_rank_that_aborts<C: World>() {
    for (op, collective) in COLLECTIVES {
        for delay in DELAYS {
            let errors = errors_of(collective, |comm: C| {
                std::thread::sleep(delay);
                comm.abort("interrupted");
                comm.abort("only the first counts");
                assert!(collective(&comm, 3).is_err());
                Ok(())
            });
            assert_all_say(&errors, op, "rank 2 aborted: interrupted");
        }
    }
}

fn a_rank_that_stalls<C: World>() {
    // This is long enough for a busy machine to start the healthy ranks in time.
    let timeout = Duration::from_millis(300);
    for (op, collective) in COLLECTIVES {
        let start = Instant::now();
        let results = run_ranks_with(C::world_with_timeout(4, timeout), |rank, comm| {
            if rank == 2 {
                // Waits until the others have given up.
                while comm.check().is_ok() {
                    assert!(start.elapsed() < SOON);
                    std::thread::sleep(Duration::from_millis(5));
                }
            }
            let start = Instant::now();
            let error = text(collective(&comm, 3).unwrap_err());
            assert!(start.elapsed() < SOON);
            Ok(error)
        });
        for (rank, error) in results.into_iter().enumerate() {
            let cause = format!("rank 2 stalled: others waited for {op} for 300ms");
            assert_eq!(error.unwrap(), format!("{op} on rank {rank} of 4: {cause}"));
        }
    }
}

fn several_stalled_ranks_are_all_named<C: World>() {
    let results = run_ranks_with(C::world_with_timeout(4, Duration::from_millis(300)), |rank, comm| {
        if rank % 2 == 1 {
            while comm.check().is_ok() {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        comm.barrier(&mut Exec::cpu())
    });
    for result in results {
        let error = text(result.unwrap_err());
        assert!(error.ends_with("ranks 1 and 3 stalled: others waited for barrier for 300ms"), "{error}");
    }
}

/// A panic without `run_ranks` is still noticed, because unwinding drops the communicator.
fn an_unsupervised_rank_that_panics<C: World>() {
    let mut world = C::world(2);
    let last = world.pop().unwrap();
    let first = world.pop().unwrap();
    let start = Instant::now();
    let handle = std::thread::spawn(move || {
        let _comm = last;
        panic!("unsupervised")
    });
    let error = text(first.barrier(&mut Exec::cpu()).unwrap_err());
    assert_eq!(error, "barrier on rank 0 of 2: rank 1 panicked");
    assert!(handle.join().is_err() && start.elapsed() < SOON);
}

fn two_calls_of_one_rank_at_once<C: World>() {
    let mut world = C::world(2);
    let last = world.pop().unwrap();
    let first = Arc::new(world.pop().unwrap());
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| text(first.barrier(&mut Exec::cpu()).unwrap_err()));
        std::thread::sleep(Duration::from_millis(200));
        let second = first.all_reduce(view_mut(&mut [1f32], 1, 1), ReduceOp::Sum, &mut Exec::cpu());
        let cause = "rank 0 called all_reduce while another of its threads was in a collective";
        assert_eq!(text(second.unwrap_err()), format!("all_reduce on rank 0 of 2: {cause}"));
        assert_eq!(waiting.join().unwrap(), format!("barrier on rank 0 of 2: {cause}"));
        // Rank 0's part of its barrier may have arrived before its failure; its part of the next barrier cannot.
        let error = (0..2).find_map(|_| last.barrier(&mut Exec::cpu()).err());
        assert_eq!(text(error.unwrap()), format!("barrier on rank 1 of 2: {cause}"));
    });
}

/// The text of a panic is in the rank's own result, whatever the type of the panic.
fn panics_become_errors_of_their_rank<C: World>() {
    let results = run::<C, _>(3, |rank, _comm| match rank {
        0 => panic!("rank {rank} is out"),
        1 => std::panic::panic_any(7u8),
        _ => Ok(rank),
    });
    let text: Vec<String> = results.iter().map(|r| format!("{:?}", r.as_ref().map_err(text))).collect();
    let expected =
        [r#"Err("rank 0 panicked: rank 0 is out")"#, r#"Err("rank 1 panicked: no message")"#, "Ok(2)"];
    assert_eq!(text, expected);
    assert!(run::<C, _>(0, |_, _| Ok(())).is_empty());
}

/// A rank may finish and leave while others are still reading the last round's data.
fn leaving_after_the_last_collective_is_no_fault<C: World>() {
    for _ in 0..200 {
        for result in run::<C, _>(4, |_, comm| COLLECTIVES[1].1(&comm, 5)) {
            result.unwrap();
        }
    }
}

over_both! {
    a_rank_that_panics
    a_rank_that_returns_an_error
    a_rank_that_leaves
    a_rank_that_aborts
    a_rank_that_stalls
    several_stalled_ranks_are_all_named
    an_unsupervised_rank_that_panics
    two_calls_of_one_rank_at_once
    panics_become_errors_of_their_rank
    leaving_after_the_last_collective_is_no_fault
}
