//! Ranks that disagree about a collective, and arguments that are wrong on one rank.

use std::time::{Duration, Instant};

use half::bf16;
use moe_comm::candle::Result;
use moe_comm::{Collectives, Communicator, Exec, ReduceOp, SelfComm, run_ranks_with};

use crate::faults::COLLECTIVES;
use crate::support::{World, over_both, run, text, view, view_mut};

/// The causes that the ranks of a world of 3 report. Ranks 0 and 2 call `usual`, rank 1 calls `odd`.
#[track_caller]
fn causes<C: World>(
    usual: impl Fn(&dyn Communicator) -> Result<()> + Sync,
    odd: impl Fn(&dyn Communicator) -> Result<()> + Sync,
) -> String {
    let start = Instant::now();
    let world = C::world_with_timeout(3, Duration::from_secs(60));
    let results = run_ranks_with(world, |rank, comm| if rank == 1 { odd(&comm) } else { usual(&comm) });
    assert!(start.elapsed() < Duration::from_secs(5));
    let cause = |(rank, result): (usize, Result<()>)| {
        let error = text(result.unwrap_err());
        let (place, cause) = error.split_once(" of 3: ").unwrap();
        assert!(place.ends_with(&format!(" on rank {rank}")), "{error}");
        cause.to_string()
    };
    let mut causes: Vec<String> = results.into_iter().enumerate().map(cause).collect();
    causes.dedup();
    assert_eq!(causes.len(), 1, "{causes:?}");
    causes.remove(0)
}

fn shapes_that_differ<C: World>() {
    for (op, collective) in COLLECTIVES {
        if matches!(op, "barrier" | "split") {
            continue;
        }
        let cause = causes::<C>(|c| collective(c, 3), |c| collective(c, 4));
        let expected = match op {
            "all_reduce" | "broadcast" => {
                format!("ranks disagree about the dims in {op}: [2, 3] on ranks 0 and 2, [2, 4] on rank 1")
            }
            _ => format!(
                "ranks disagree about the dims after the first in {op}: [3] on ranks 0 and 2, [4] on rank 1"
            ),
        };
        assert_eq!(cause, expected);
    }
}

fn collectives_that_differ<C: World>() {
    for (op, collective) in COLLECTIVES {
        let (other, odd) = if op == "barrier" { COLLECTIVES[0] } else { COLLECTIVES[8] };
        let cause = causes::<C>(|c| collective(c, 3), |c| odd(c, 3));
        let expected =
            format!("ranks disagree about the collective: {op} on ranks 0 and 2, {other} on rank 1");
        assert_eq!(cause, expected);
    }
}

fn dtypes_reductions_and_roots_that_differ<C: World>() {
    let ex = Exec::cpu;
    let f32s = |c: &dyn Communicator| c.all_reduce(view_mut(&mut [1f32; 4], 2, 2), ReduceOp::Sum, &mut ex());
    let cause =
        causes::<C>(f32s, |c| c.all_reduce(view_mut(&mut [bf16::ONE; 4], 2, 2), ReduceOp::Sum, &mut ex()));
    assert_eq!(cause, "ranks disagree about the dtype in all_reduce: f32 on ranks 0 and 2, bf16 on rank 1");
    let cause = causes::<C>(f32s, |c| c.all_reduce(view_mut(&mut [1f32; 4], 2, 2), ReduceOp::Min, &mut ex()));
    assert_eq!(
        cause,
        "ranks disagree about the reduction in all_reduce: sum on ranks 0 and 2, min on rank 1"
    );
    let root = |root: usize| {
        move |c: &dyn Communicator| c.broadcast(view_mut(&mut [1u32], 1, 1), root, &mut Exec::cpu())
    };
    let cause = causes::<C>(root(0), root(2));
    assert_eq!(cause, "ranks disagree about the root in broadcast: 0 on ranks 0 and 2, 2 on rank 1");
}

fn counts_that_differ<C: World>() {
    let gather = |counts: [usize; 3]| {
        move |c: &dyn Communicator| {
            let own = counts[c.rank()];
            let all = counts.iter().sum();
            let input = vec![1i32; own];
            let mut out = vec![0i32; all];
            c.all_gather_v(view(&input, own, 1), &counts, view_mut(&mut out, all, 1), &mut Exec::cpu())
        }
    };
    let cause = causes::<C>(gather([1, 0, 2]), gather([1, 1, 2]));
    let counts = "[1, 0, 2] on ranks 0 and 2, [1, 1, 2] on rank 1";
    assert_eq!(cause, format!("ranks disagree about the counts in all_gather: {counts}"));

    let exchange = |send: [usize; 3], recv: [usize; 3]| {
        move |c: &dyn Communicator| {
            let sent = send.iter().sum();
            let received = recv.iter().sum();
            let input = vec![1u8; sent];
            let mut out = vec![0u8; received];
            let out = view_mut(&mut out, received, 1);
            c.all_to_all_v(view(&input, sent, 1), &send, out, &recv, &mut Exec::cpu())
        }
    };
    let cause = causes::<C>(exchange([1; 3], [1; 3]), exchange([1; 3], [1, 1, 2]));
    let counts = "rank 2 sends 1 rows to rank 1, which expects 2";
    assert_eq!(cause, format!("ranks disagree about the counts in all_to_all: {counts}"));
}

/// A rank that fails in its own argument checks fails the others too, instead of leaving them waiting.
fn wrong_arguments_on_one_rank<C: World>() {
    let cause = causes::<C>(
        |c| c.all_gather(view(&[1f32; 2], 1, 2), view_mut(&mut [0f32; 6], 3, 2), &mut Exec::cpu()),
        |c| c.all_gather(view(&[1f32; 2], 1, 2), view_mut(&mut [0f32; 4], 2, 2), &mut Exec::cpu()),
    );
    let expected = "rank 1 failed: all_gather: expected out with 3 rows of dims [2], got dims [2, 2]";
    assert_eq!(cause, expected);
}

/// The errors of the argument checks, on the smallest communicator. It stays usable, because no rank waits for it.
#[test]
fn argument_errors() {
    let comm = SelfComm::new();
    let mut ex = Exec::cpu();
    let ex = &mut ex;
    let mut out = [0f32; 4];
    let input = [1f32; 4];
    let check = |result: Result<()>, expected: &str| assert_eq!(text(result.unwrap_err()), expected);
    check(
        comm.all_gather(view(&[1u8; 4], 2, 2), view_mut(&mut out, 2, 2), ex),
        "all_gather: expected out of dtype u8, got f32",
    );
    check(
        comm.all_gather(view(&input, 2, 2), view_mut(&mut out, 1, 4), ex),
        "all_gather: expected input and out with equal dims after the first, got [2, 2] and [1, 4]",
    );
    check(
        comm.all_gather_v(view(&input, 2, 2), &[1, 1], view_mut(&mut out, 2, 2), ex),
        "all_gather: expected counts of 1 ranks, got [1, 1]",
    );
    check(
        comm.all_gather_v(view(&input, 2, 2), &[3], view_mut(&mut out, 2, 2), ex),
        "all_gather: expected input with 3 rows of dims [2], got dims [2, 2]",
    );
    check(
        comm.reduce_scatter(view(&input, 2, 2), view_mut(&mut out[..2], 1, 2), ReduceOp::Sum, ex),
        "reduce_scatter: expected input with 1 rows of dims [2], got dims [2, 2]",
    );
    check(
        comm.reduce_scatter_v(view(&input, 2, 2), &[2], view_mut(&mut out[..2], 1, 2), ReduceOp::Sum, ex),
        "reduce_scatter: expected out with 2 rows of dims [2], got dims [1, 2]",
    );
    check(
        comm.all_to_all_v(view(&input, 2, 2), &[2], view_mut(&mut out, 2, 2), &[1], ex),
        "all_to_all: expected out with 1 rows of dims [2], got dims [2, 2]",
    );
    check(
        comm.broadcast(view_mut(&mut out, 2, 2), 1, ex),
        "broadcast: the root 1 is outside of a group of 1 ranks",
    );
    let scalar = moe_comm::View::new(&input[..1], &[]).unwrap();
    check(
        comm.all_to_all(scalar, view_mut(&mut out[..1], 1, 1), ex),
        "all_to_all: expected input and out with rows, got dims [] and [1, 1]",
    );
    comm.barrier(ex).unwrap();
}

/// Sums of counts that overflow are errors, not panics.
fn absurd_counts<C: World>() {
    let results = run::<C, _>(2, |_, comm| {
        let mut out = [0f32; 0];
        let counts = [usize::MAX, 2];
        comm.all_gather_v(view(&[0f32; 0], 0, 1), &counts, view_mut(&mut out, 0, 1), &mut Exec::cpu())
    });
    for result in results {
        let error = text(result.unwrap_err());
        assert!(error.contains("overflow"), "{error}");
    }
    let results = run::<C, _>(3, |_, comm| {
        let input = [0f32; 4];
        let mut out = [0f32; 4];
        comm.all_to_all(view(&input, 4, 1), view_mut(&mut out, 4, 1), &mut Exec::cpu())
    });
    for result in results {
        let error = text(result.unwrap_err());
        assert!(error.contains("expected input with 3 rows of dims [1], got dims [4, 1]"), "{error}");
    }
}

over_both! {
    shapes_that_differ
    collectives_that_differ
    dtypes_reductions_and_roots_that_differ
    counts_that_differ
    wrong_arguments_on_one_rank
    absurd_counts
}
