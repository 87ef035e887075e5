//! Collectives in recorded graphs.

use candle_core::{DType, Result};
use moe_comm::{Collectives, Communicator, ReduceOp};
use moe_kernels::cuda::Graph;
use moe_kernels::{Buffer, Exec, add_into};

use super::rounds::bits;
use super::{LIMIT, run_nccl_ranks, worlds};
use crate::common::Rng;

const WIDTH: usize = 64;

/// The buffers of one rank for a small step of `n` ranks with different numbers of rows.
struct Step {
    counts: Vec<usize>,
    rank: usize,
    own: Buffer,
    all: Buffer,
    sent: Buffer,
    received: Buffer,
}

impl Step {
    fn new(rank: usize, n: usize, ex: &Exec) -> Result<Self> {
        let counts: Vec<usize> = (0..n).map(|r| 3 * r).collect();
        let total: usize = counts.iter().sum();
        let zeros = |rows| ex.zeros(DType::F32, &[rows, WIDTH]);
        let own = zeros(counts[rank])?;
        let all = zeros(total)?;
        Ok(Self { rank, own, all, sent: zeros(counts[rank] * n)?, received: zeros(total)?, counts })
    }

    fn fill(&mut self, seed: u64, ex: &Exec) -> Result<()> {
        let mut rng = Rng::seeded(seed + 1000 * self.rank as u64);
        for buffer in [&mut self.own, &mut self.sent] {
            let host = rng.floats(DType::F32, buffer.dims());
            ex.copy_from_host(host.view(), buffer.view_mut())?;
        }
        Ok(())
    }

    /// Collectives of every kind with ops in between. Each uses the result of the one before.
    fn run(&mut self, comm: &dyn Communicator, ex: &mut Exec) -> Result<()> {
        let Self { counts, rank, own, all, sent, received } = self;
        let n = counts.len();
        let mine = counts[*rank];
        comm.all_gather_v(own.view(), counts, all.view_mut(), ex)?;
        comm.all_to_all_v(sent.view(), &vec![mine; n], received.view_mut(), counts, ex)?;
        add_into(received.view(), all.view_mut(), ex)?;
        comm.all_reduce(all.view_mut(), ReduceOp::Sum, ex)?;
        comm.reduce_scatter_v(all.view(), counts, own.view_mut(), ReduceOp::Sum, ex)?;
        comm.broadcast(all.view_mut(), n - 1, ex)
    }

    fn results(&self, ex: &Exec) -> Result<Vec<Vec<u64>>> {
        [&self.own, &self.all, &self.received].map(|b| Ok(bits(&ex.to_host(b.view())?))).into_iter().collect()
    }
}

/// Replays with new data give the bits of eager steps, also if both alternate.
#[test]
fn replays_are_eager_steps() {
    for n in worlds() {
        run_nccl_ranks(n, LIMIT, |comm, ex| {
            let mut step = Step::new(comm.rank(), n, ex).unwrap();
            step.run(comm, ex).unwrap();
            let mut graph = Graph::capture(ex, |ex| step.run(comm, ex)).unwrap();
            for seed in 0..10 {
                step.fill(seed, ex).unwrap();
                step.run(comm, ex).unwrap();
                let expected = step.results(ex).unwrap();
                assert!(expected[1].iter().any(|&x| x != 0));
                for _ in 0..3 {
                    step.fill(seed, ex).unwrap();
                    graph.launch().unwrap();
                    comm.watch(ex).unwrap();
                    assert_eq!(step.results(ex).unwrap(), expected, "seed {seed}");
                }
            }
        });
    }
}

/// Calls that would have to wait for the device are refused with the reason while a graph is recorded.
#[test]
fn waiting_collectives_cannot_be_recorded() {
    type Wait = fn(&dyn Communicator, &mut Exec) -> Result<()>;
    let waits: [(Wait, &str); 3] = [
        (|comm, ex| comm.barrier(ex), "host memory"),
        (|comm, ex| comm.split(0, 0, ex).map(|_| ()), "split"),
        (|comm, ex| comm.watch(ex), "replay"),
    ];
    for (wait, reason) in waits {
        run_nccl_ranks(2, LIMIT, |comm, ex| {
            let result = Graph::capture(ex, |ex| wait(comm, ex));
            crate::common::assert_error(result.map(|_| ()), &["recorded", reason]);
        });
    }
}
