//! A rank that stalls, aborts or fails causes an error on every rank in bounded time.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use candle_core::{DType, Result};
use moe_comm::{Collectives, Communicator, NcclComm, ReduceOp};
use moe_kernels::cuda::Graph;
use moe_kernels::{Buffer, Exec};

use super::{LIMIT, run_nccl_ranks, worlds};
use crate::common::assert_error;

/// The time limit of worlds that are made to fail, and the longest time that a failure may take.
const SHORT: Duration = Duration::from_secs(4);
const BOUND: Duration = Duration::from_secs(15);

fn data(ex: &Exec) -> Buffer {
    ex.zeros(DType::F32, &[64, 64]).unwrap()
}

/// Runs a collective to its end on the device.
fn finished(comm: &dyn Communicator, ex: &mut Exec, data: &mut Buffer) -> Result<()> {
    comm.all_reduce(data.view_mut(), ReduceOp::Sum, ex)?;
    ex.synchronize()?;
    comm.check()
}

/// All ranks except the last one call `f`. They must fail in time, with these parts in their errors.
fn all_but_one_fail(
    n: usize,
    prepare: impl Fn(&NcclComm, &mut Exec) + Sync,
    f: impl Fn(&NcclComm, &mut Exec) -> Result<()> + Sync,
    parts: &[&str],
) {
    let done = Barrier::new(n);
    run_nccl_ranks(n, SHORT, |comm, ex| {
        prepare(comm, ex);
        let start = Instant::now();
        let result = if comm.rank() == n - 1 { None } else { Some(f(comm, ex)) };
        let took = start.elapsed();
        done.wait();
        if let Some(result) = result {
            assert!(took < BOUND, "{took:?}");
            assert_error(result, parts);
        }
        // This includes the rank that did not call.
        assert_error(comm.check(), parts);
        assert_error(comm.barrier(ex), parts);
    });
}

#[test]
fn a_rank_that_never_calls_fails_the_first_collective() {
    for n in worlds() {
        let call = |comm: &NcclComm, ex: &mut Exec| finished(comm, ex, &mut data(ex));
        all_but_one_fail(n, |_, _| {}, call, &["all_reduce", "did not end within 4s"]);
    }
}

#[test]
fn a_rank_that_never_calls_fails_a_later_collective() {
    for n in worlds() {
        let prepare = |comm: &NcclComm, ex: &mut Exec| {
            (0..3).for_each(|_| finished(comm, ex, &mut data(ex)).unwrap());
        };
        let call = |comm: &NcclComm, ex: &mut Exec| finished(comm, ex, &mut data(ex));
        all_but_one_fail(n, prepare, call, &["all_reduce", "did not end within 4s"]);
    }
}

#[test]
fn a_rank_that_never_replays_fails_the_replay() {
    let n = 2;
    let done = Barrier::new(n);
    run_nccl_ranks(n, SHORT, |comm, ex| {
        let mut data = data(ex);
        finished(comm, ex, &mut data).unwrap();
        let record = |ex: &mut Exec| comm.all_reduce(data.view_mut(), ReduceOp::Sum, ex);
        let mut graph = Graph::capture(ex, record).unwrap();
        let start = Instant::now();
        if comm.rank() == 0 {
            graph.launch().unwrap();
            comm.watch(ex).unwrap();
            ex.synchronize().unwrap();
        }
        assert!(start.elapsed() < BOUND);
        done.wait();
        assert_error(comm.check(), &["the replay of a graph", "did not end within 4s"]);
    });
}

#[test]
fn any_thread_may_abort() {
    for n in worlds() {
        run_nccl_ranks(n, LIMIT, |comm, ex| {
            finished(comm, ex, &mut data(ex)).unwrap();
            let start = Instant::now();
            if comm.rank() == n - 1 {
                std::thread::scope(|scope| {
                    scope.spawn(|| {
                        std::thread::sleep(Duration::from_millis(300));
                        comm.abort("out of patience");
                    });
                });
            } else {
                assert_error(comm.barrier(ex), &["barrier on rank", "aborted: out of patience"]);
            }
            assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
            assert_error(comm.check(), &["out of patience"]);
            assert_error(finished(comm, ex, &mut data(ex)), &["out of patience"]);
        });
    }
}

/// A failure of a group fails the world, and a failure of the world fails its groups.
#[test]
fn groups_fail_together() {
    for n in worlds() {
        let split = Barrier::new(n);
        run_nccl_ranks(n, LIMIT, |comm, ex| {
            let half = comm.split(comm.rank() % 2, 0, ex).unwrap();
            finished(&*half, ex, &mut data(ex)).unwrap();
            // This barrier is on the host, because a rank could still be inside a barrier of the group when another
            // rank has passed it and aborts.
            split.wait();
            if comm.rank() == 0 {
                half.abort("half is not enough");
            }
            assert_error(comm.barrier(ex), &["half is not enough"]);
            assert_error(half.check(), &["half is not enough"]);
        });
    }
}

#[test]
fn wrong_arguments_fail_every_rank() {
    for n in worlds() {
        run_nccl_ranks(n, SHORT, |comm, ex| {
            let input = data(ex);
            let mut out = ex.zeros(DType::F32, &[64 * n, 64]).unwrap();
            let mut wrong = ex.zeros(DType::F32, &[64 * n, 63]).unwrap();
            let out = if comm.rank() == 1 { wrong.view_mut() } else { out.view_mut() };
            let result = comm.all_gather(input.view(), out, ex).and_then(|()| {
                ex.synchronize()?;
                // Either the failure of the other rank aborts this work, or it cannot begin.
                comm.barrier(ex)
            });
            assert_error(result, &["rank 1 of", "equal dims after the first"]);
        });
    }
}

#[test]
fn places_are_checked() {
    run_nccl_ranks(2, LIMIT, |comm, ex| {
        let host = [0f32; 4];
        let mut out = ex.zeros(DType::F32, &[8]).unwrap();
        let view = moe_kernels::View::new(&host, &[4]).unwrap();
        let result = comm.all_gather(view, out.view_mut(), ex);
        assert_error(result, &["expected input on CUDA device", "host memory"]);
    });
    let id = NcclComm::unique_id().unwrap();
    assert_error(NcclComm::new(id, 0, 1, &Exec::cpu()), &["expected a context on a CUDA device"]);
    assert_error(NcclComm::new(id, 2, 2, &super::context(0).unwrap()), &["rank 2 is outside"]);
    let alone = NcclComm::with_timeout(id, 0, 2, &super::context(0).unwrap(), Duration::from_secs(2));
    assert_error(alone, &["joining the group did not end within 2s"]);
}
