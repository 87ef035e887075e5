//! Many sums over peer memory in a row: without a wait, in graphs, alternating with NCCL, and with a rank that never
//! calls.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use candle_core::{DType, Result};
use moe_comm::{Collectives, Communicator, NcclComm, PeerAllReduce, ReduceOp};
use moe_kernels::cuda::Graph;
use moe_kernels::{Buffer, Exec};

use super::peers::peers_of;
use super::{LIMIT, run_nccl_ranks, worlds};
use crate::common::assert_error;

/// One shot, one shot with many rows, two shots on 4 GPUs.
const SHAPES: [[usize; 2]; 3] = [[1, 2048], [40, 1024], [64, 2048]];
/// The number of arrays of each shape. Calls use them in turn, so that a call that reads the result of another call is
/// noticed.
const ARRAYS: usize = 5;

/// Values on the context's device.
pub fn upload(ex: &Exec, values: Vec<f32>, dims: &[usize]) -> Buffer {
    let mut data = ex.zeros(DType::F32, dims).unwrap();
    ex.copy_from_host(Buffer::from_vec(values, dims).unwrap().view(), data.view_mut()).unwrap();
    data
}

/// The contents of array `array` of rank `rank`: small whole numbers, whose sums are exact.
fn value(rank: usize, array: usize, i: usize) -> usize {
    (rank + 1) * (array + 1) + i % 7
}

/// Sums that accumulate in residual streams, and how often each array was added.
struct Piles {
    partials: Vec<Vec<Buffer>>,
    residuals: Vec<Buffer>,
    times: [[usize; ARRAYS]; SHAPES.len()],
}

impl Piles {
    fn new(rank: usize, ex: &Exec) -> Self {
        let partial = |[t, h]: [usize; 2], array| {
            upload(ex, (0..t * h).map(|i| value(rank, array, i) as f32).collect(), &[t, h])
        };
        Self {
            partials: SHAPES.map(|shape| (0..ARRAYS).map(|array| partial(shape, array)).collect()).into(),
            residuals: SHAPES.map(|dims| ex.zeros(DType::F32, &dims).unwrap()).into(),
            times: Default::default(),
        }
    }

    /// The shape and array of call number `i`.
    fn of(i: usize) -> (usize, usize) {
        (i % SHAPES.len(), i / SHAPES.len() % ARRAYS)
    }

    /// Puts call number `i` on the stream.
    fn call(&mut self, i: usize, peers: &PeerAllReduce, ex: &mut Exec) -> Result<()> {
        let (shape, array) = Self::of(i);
        let partial = self.partials[shape][array].view();
        let residual = self.residuals[shape].view_mut();
        peers.all_reduce_add_norm_into(partial, residual, None, ex)
    }

    /// Counts call number `i`, which runs.
    fn count(&mut self, i: usize) {
        let (shape, array) = Self::of(i);
        self.times[shape][array] += 1;
    }

    fn check(&self, n: usize, ex: &Exec) {
        for (shape, residual) in self.residuals.iter().enumerate() {
            let got = ex.to_host(residual.view()).unwrap().view().to_f32_vec().unwrap();
            for (i, got) in got.into_iter().enumerate() {
                let sum = |array| (0..n).map(|rank| value(rank, array, i)).sum::<usize>();
                let expected: usize = (0..ARRAYS).map(|array| self.times[shape][array] * sum(array)).sum();
                assert!(expected < 1 << 24, "f32 must hold {expected}");
                assert_eq!(got, expected as f32, "element {i} of shape {:?}", SHAPES[shape]);
            }
        }
    }
}

/// Ranks drift apart and meet again, with one size after the other, and no rank waits for the device.
#[test]
fn ten_thousand_calls_without_a_wait() {
    for n in worlds() {
        run_nccl_ranks(n, LIMIT, |comm, ex| {
            let peers = peers_of(comm);
            let mut piles = Piles::new(comm.rank(), ex);
            for i in 0..10_000 {
                // Each rank is late at different times.
                if i % 997 == 100 * comm.rank() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                piles.call(i, peers, ex).unwrap();
                piles.count(i);
            }
            piles.check(n, ex);
            comm.check().unwrap();
        });
    }
}

/// A recorded step has an odd number of calls, so with each replay it uses the halves of the buffers in the other
/// order.
#[test]
fn replays_take_turns_with_calls_and_nccl() {
    const RECORDED: usize = 7;
    for n in worlds() {
        run_nccl_ranks(n, LIMIT, |comm, ex| {
            let peers = peers_of(comm);
            let rank = comm.rank();
            let mut piles = Piles::new(rank, ex);
            let own = upload(ex, vec![rank as f32; 512], &[512]);
            let mut all = ex.zeros(DType::F32, &[n * 512]).unwrap();
            let gather = |all: &mut Buffer, ex: &mut Exec| {
                comm.use_peers(false);
                let gathered = comm.all_gather(own.view(), all.view_mut(), ex);
                comm.use_peers(true);
                gathered
            };
            gather(&mut all, ex).unwrap();
            let record = |ex: &mut Exec| {
                (0..3).try_for_each(|i| piles.call(i, peers, ex))?;
                gather(&mut all, ex)?;
                peers.all_reduce_into(all.view_mut(), ex)?;
                (3..RECORDED).try_for_each(|i| piles.call(i, peers, ex))
            };
            let mut graph = Graph::capture(ex, record).unwrap();
            for replay in 0..200 {
                graph.launch().unwrap();
                comm.watch(ex).unwrap();
                (0..RECORDED).for_each(|i| piles.count(i));
                for i in 0..replay % 4 {
                    piles.call(i, peers, ex).unwrap();
                    piles.count(i);
                }
            }
            piles.check(n, ex);
            let expected: Vec<f32> = (0..n * 512).map(|i| (n * (i / 512)) as f32).collect();
            assert_eq!(ex.to_host(all.view()).unwrap().view().to_f32_vec().unwrap(), expected);
            comm.check().unwrap();
        });
    }
}

/// NCCL and peer memory give the same sums of whole numbers, one after the other on the same data.
#[test]
fn nccl_and_peers_agree() {
    for n in worlds() {
        run_nccl_ranks(n, LIMIT, |comm, ex| {
            peers_of(comm);
            for round in 0..100 {
                let len = [5, 2048, 100_000][round % 3];
                let mut data =
                    upload(ex, (0..len).map(|i| ((i + round + comm.rank()) % 9) as f32).collect(), &[len]);
                for over_peers in [round % 2 == 0, round % 2 == 1] {
                    comm.use_peers(over_peers);
                    comm.all_reduce(data.view_mut(), ReduceOp::Sum, ex).unwrap();
                }
                comm.use_peers(true);
                let sum = |i: usize| (0..n).map(|rank| (i + round + rank) % 9).sum::<usize>();
                let expected: Vec<f32> = (0..len).map(|i| (n * sum(i)) as f32).collect();
                assert_eq!(
                    ex.to_host(data.view()).unwrap().view().to_f32_vec().unwrap(),
                    expected,
                    "round {round}"
                );
            }
            comm.check().unwrap();
        });
    }
}

/// A separate group next to the communicator's own, with its own time limit.
fn group(comm: &NcclComm, limit: Duration, ex: &Exec) -> PeerAllReduce {
    PeerAllReduce::new(comm, &mut ex.clone(), limit, ex).unwrap().unwrap()
}

/// Kernels that wait for a rank that never calls end and name that rank; the other ranks' groups continue.
#[test]
fn a_rank_that_stays_away_ends_the_wait() {
    for n in worlds() {
        let done = Barrier::new(n);
        for len in [2048, 200_000] {
            run_nccl_ranks(n, LIMIT, |comm, ex| {
                let peers = group(comm, Duration::from_secs(1), ex);
                let mut data = ex.zeros(DType::F32, &[len]).unwrap();
                for _ in 0..3 {
                    peers.all_reduce_into(data.view_mut(), ex).unwrap();
                }
                ex.synchronize().unwrap();
                peers.check().unwrap();
                if comm.rank() < n - 1 {
                    let start = Instant::now();
                    // The second and third call are on the stream before the first has given up.
                    for _ in 0..3 {
                        peers.all_reduce_into(data.view_mut(), ex).unwrap();
                    }
                    ex.synchronize().unwrap();
                    let took = start.elapsed();
                    assert!((1..5).contains(&took.as_secs()), "{took:?}");
                    // In two shots a rank may first see that another rank is late, which is itself waiting.
                    let one_shot = len == 2048 || n == 2;
                    let absent = if one_shot { format!("rank {}", n - 1) } else { String::new() };
                    let cause = format!("{absent} did not come to a collective over peer memory");
                    assert_error(peers.check(), &[&cause]);
                    assert_error(peers.all_reduce_into(data.view_mut(), ex), &[&cause]);
                }
                done.wait();
                comm.all_reduce(data.view_mut(), ReduceOp::Sum, ex).unwrap();
                ex.synchronize().unwrap();
                comm.check().unwrap();
            });
        }
    }
}

#[test]
fn any_thread_may_stop_the_wait() {
    run_nccl_ranks(2, LIMIT, |comm, ex| {
        let peers = group(comm, Duration::from_secs(60), ex);
        let mut data = ex.zeros(DType::F32, &[2048]).unwrap();
        if comm.rank() == 0 {
            peers.all_reduce_into(data.view_mut(), ex).unwrap();
            let start = Instant::now();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(300));
                    peers.stop();
                });
                ex.synchronize().unwrap();
            });
            assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
            assert_error(peers.check(), &["were stopped"]);
        }
        comm.barrier(ex).unwrap();
    });
}
