//! Sums of thousands of rows where each rank keeps a share of the residual stream: compared with in-process CPU ranks,
//! many in a row, in graphs, and with a rank that never calls.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use candle_core::{DType, Result};
use moe_comm::{AddNorm, Collectives, Communicator, FusedCollective, NcclComm, PeerAllReduce, run_ranks};
use moe_kernels::cuda::Graph;
use moe_kernels::{Buffer, Exec, PreNorm};

use super::peer_runs::upload;
use super::peers::peers_of;
use super::rounds::bits;
use super::{LIMIT, run_nccl_ranks, worlds};
use crate::common::{Rng, assert_close, assert_error};

/// Consecutive sub-layers: the last norm is only right if ranks keep the same rows in each.
const LAYERS: usize = 3;

/// T and H: fewer rows than ranks, ranks without rows, parts of a warp's columns, one row per block and more, several
/// launches.
const ROWS: [(usize, usize); 12] = [
    (0, 2048),
    (1, 2048),
    (3, 8),
    (5, 264),
    (64, 1000),
    (257, 2048),
    (530, 2048),
    (1000, 1024),
    (700, 16_384),
    (4096, 2048),
    (4097, 2048),
    (9001, 1024),
];

fn put(host: Buffer, ex: &Exec) -> Result<Buffer> {
    let mut data = ex.zeros(host.dtype(), host.dims())?;
    ex.copy_from_host(host.view(), data.view_mut())?;
    Ok(data)
}

/// The residual stream at the end, and the last norm. The ranks add bf16 values, which are sent without loss.
fn layers(
    comm: &dyn Communicator,
    (t, h): (usize, usize),
    rounded: bool,
    seed: u64,
    ex: &mut Exec,
) -> Result<[Buffer; 2]> {
    let mut rng = Rng::seeded(seed);
    let mut residual = put(rng.floats(DType::F32, &[t, h]), ex)?;
    let weight = put(rng.floats(DType::BF16, &[h]), ex)?;
    let mut out = ex.zeros(DType::BF16, &[t, h])?;
    for layer in 0..LAYERS {
        let seed = seed + 1 + (layer * comm.world_size() + comm.rank()) as u64;
        let partial = Rng::seeded(seed).floats(if rounded { DType::BF16 } else { DType::F32 }, &[t, h]);
        let partial = Buffer::from_vec(partial.view().to_f32_vec()?, &[t, h])?;
        let mut partial = put(partial, ex)?;
        let stream = residual.view_mut();
        let to = out.view_mut();
        let norm = PreNorm { weight: weight.view(), eps: 1e-6 };
        let end = AddNorm { residual: stream, norm, out: to };
        FusedCollective::ShareAddNorm { partial: partial.view_mut(), end }.run(comm, ex)?;
    }
    Ok([ex.to_host(residual.view())?, ex.to_host(out.view())?])
}

/// The stream that the ranks keep together: each row from the first rank on which it has changed.
fn kept(ranks: &[[Buffer; 2]], begin: &Buffer, (t, h): (usize, usize)) -> Vec<f32> {
    let all: Vec<Vec<f32>> = ranks.iter().map(|rank| rank[0].view().to_f32_vec().unwrap()).collect();
    let begin = begin.view().to_f32_vec().unwrap();
    let row = |row: usize| {
        let range = row * h..(row + 1) * h;
        let mut changed = all.iter().filter(|rank| rank[range.clone()] != begin[range.clone()]);
        let kept = changed.next().unwrap_or_else(|| panic!("no rank keeps row {row} of {t}"));
        assert!(changed.next().is_none(), "two ranks keep row {row} of {t}");
        kept[range].to_vec()
    };
    (0..t).flat_map(row).collect()
}

#[test]
fn shared_sums_are_those_of_cpu_ranks() {
    let seed = Rng::new().bits() >> 1;
    for n in worlds() {
        for (i, shape) in ROWS.into_iter().enumerate() {
            let seed = seed + 1000 * i as u64;
            let got = run_nccl_ranks(n, LIMIT, |comm, ex| {
                assert!(peers_of(comm).fits_share(shape.0, shape.1));
                let got = [true, false].map(|rounded| layers(comm, shape, rounded, seed, ex).unwrap());
                comm.check().unwrap();
                got
            });
            let (exact, rounded): (Vec<_>, Vec<_>) =
                got.into_iter().map(|[exact, rounded]| (exact, rounded)).unzip();
            for (got, is_exact) in [(exact, true), (rounded, false)] {
                let expected = run_ranks(n, |_, comm| layers(&comm, shape, is_exact, seed, &mut Exec::cpu()));
                let expected: Vec<_> = expected.into_iter().map(Result::unwrap).collect();
                let what = format!("{n} ranks, {shape:?}, bf16 parts: {is_exact}");
                for rank in &got {
                    assert_eq!(bits(&rank[1]), bits(&got[0][1]), "ranks differ, {what}");
                }
                // A part that is rounded to bf16 is off by at most 2^-9 of itself; the norm itself is rounded to bf16.
                let bound = if is_exact { 1e-6 } else { 4e-3 };
                assert_close(&format!("norm, {what}"), &expected[0][1], &got[0][1], bound);
                if is_exact {
                    let begin = Rng::seeded(seed).floats(DType::F32, &[shape.0, shape.1]);
                    assert_eq!(kept(&got, &begin, shape), kept(&expected, &begin, shape), "{what}");
                }
            }
        }
    }
}

/// Without peer memory NCCL runs the parts.
#[test]
fn nccl_does_the_same() {
    let shape = (700, 1024);
    for n in worlds() {
        let got = run_nccl_ranks(n, LIMIT, |comm, ex| {
            comm.use_peers(false);
            layers(comm, shape, false, 5, ex).unwrap()
        });
        let expected = run_ranks(n, |_, comm| layers(&comm, shape, false, 5, &mut Exec::cpu()));
        let [_, out] = expected.into_iter().next().unwrap().unwrap();
        for rank in &got {
            assert_close(&format!("norm on {n} ranks"), &out, &rank[1], 1e-5);
            assert_eq!(bits(&rank[1]), bits(&got[0][1]));
        }
    }
}

/// Streams that grow by whole numbers, whose sums are exact even in bf16.
struct Piles {
    weight: Buffer,
    partials: Vec<Buffer>,
    residuals: Vec<Buffer>,
    outs: Vec<Buffer>,
    times: [usize; SHAPES.len()],
}

const SHAPES: [[usize; 2]; 3] = [[300, 2048], [4500, 1024], [7, 64]];

impl Piles {
    fn new(rank: usize, ex: &Exec) -> Self {
        let zeros = |dtype| SHAPES.map(|dims| ex.zeros(dtype, &dims).unwrap()).into();
        let partial =
            |[t, h]: [usize; 2]| upload(ex, (0..t * h).map(|i| (rank + 1 + i % 7) as f32).collect(), &[t, h]);
        let weight = Rng::seeded(3).floats(DType::BF16, &[2048]);
        Self {
            weight: put(weight, ex).unwrap(),
            partials: SHAPES.map(partial).into(),
            residuals: zeros(DType::F32),
            outs: zeros(DType::BF16),
            times: [0; SHAPES.len()],
        }
    }

    fn call(&mut self, i: usize, peers: &PeerAllReduce, ex: &mut Exec) -> Result<()> {
        let shape = i % SHAPES.len();
        let norm = PreNorm { weight: self.weight.view().narrow(0, SHAPES[shape][1])?, eps: 1e-6 };
        let residual = self.residuals[shape].view_mut();
        let out = self.outs[shape].view_mut();
        peers.share_add_norm_into(self.partials[shape].view(), residual, &norm, out, ex)?;
        // Another kind of call uses the same slots.
        if i.is_multiple_of(5) { peers.all_reduce_into(self.outs[2].view_mut(), ex) } else { Ok(()) }
    }

    fn count(&mut self, i: usize) {
        self.times[i % SHAPES.len()] += 1;
    }

    fn check(&self, n: usize, ex: &Exec) {
        for (shape, residual) in self.residuals.iter().enumerate() {
            let got = ex.to_host(residual.view()).unwrap().view().to_f32_vec().unwrap();
            let mut rows = 0;
            for (row, got) in got.chunks(SHAPES[shape][1]).enumerate() {
                if got.iter().all(|x| *x == 0.0) {
                    continue;
                }
                rows += 1;
                for (i, got) in got.iter().enumerate() {
                    let sum: usize = (0..n).map(|rank| rank + 1 + (row * SHAPES[shape][1] + i) % 7).sum();
                    assert_eq!(*got, (self.times[shape] * sum) as f32, "row {row} of {:?}", SHAPES[shape]);
                }
            }
            assert!(rows <= SHAPES[shape][0].div_ceil(n) + 1, "{rows} of {:?} on one rank", SHAPES[shape]);
        }
    }
}

#[test]
fn thousands_of_calls_without_a_wait_and_in_graphs() {
    const RECORDED: usize = 5;
    for n in worlds() {
        run_nccl_ranks(n, LIMIT, |comm, ex| {
            let peers = peers_of(comm);
            let mut piles = Piles::new(comm.rank(), ex);
            for i in 0..3000 {
                // Each rank is late at different times.
                if i % 997 == 100 * comm.rank() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                piles.call(i, peers, ex).unwrap();
                piles.count(i);
            }
            piles.check(n, ex);
            let record = |ex: &mut Exec| (0..RECORDED).try_for_each(|i| piles.call(i, peers, ex));
            let mut graph = Graph::capture(ex, record).unwrap();
            for replay in 0..100 {
                graph.launch().unwrap();
                comm.watch(ex).unwrap();
                (0..RECORDED).for_each(|i| piles.count(i));
                for i in 0..replay % 4 {
                    piles.call(i, peers, ex).unwrap();
                    piles.count(i);
                }
            }
            piles.check(n, ex);
            comm.check().unwrap();
        });
    }
}

/// A separate group next to the communicator's own, with its own time limit.
fn group(comm: &NcclComm, limit: Duration, ex: &Exec) -> PeerAllReduce {
    PeerAllReduce::new(comm, &mut ex.clone(), limit, ex).unwrap().unwrap()
}

#[test]
fn a_rank_that_stays_away_ends_the_wait() {
    for n in worlds() {
        let done = Barrier::new(n);
        run_nccl_ranks(n, LIMIT, |comm, ex| {
            let peers = group(comm, Duration::from_secs(1), ex);
            let mut piles = Piles::new(comm.rank(), ex);
            piles.call(1, &peers, ex).unwrap();
            ex.synchronize().unwrap();
            peers.check().unwrap();
            if comm.rank() < n - 1 {
                let start = Instant::now();
                piles.call(1, &peers, ex).unwrap();
                piles.call(2, &peers, ex).unwrap();
                ex.synchronize().unwrap();
                let took = start.elapsed();
                assert!((1..8).contains(&took.as_secs()), "{took:?}");
                assert_error(peers.check(), &["did not come to a collective over peer memory"]);
            }
            done.wait();
            comm.barrier(ex).unwrap();
            comm.check().unwrap();
        });
    }
}

#[test]
fn wrong_arguments_are_refused() {
    run_nccl_ranks(2, LIMIT, |comm, ex| {
        let peers = peers_of(comm);
        let partial = ex.zeros(DType::F32, &[2, 12]).unwrap();
        let weight = ex.zeros(DType::BF16, &[12]).unwrap();
        let mut residual = ex.zeros(DType::F32, &[2, 12]).unwrap();
        let mut out = ex.zeros(DType::BF16, &[2, 12]).unwrap();
        let norm = PreNorm { weight: weight.view(), eps: 1e-6 };
        let mut call = |partial: &Buffer, ex: &mut Exec| {
            peers.share_add_norm_into(partial.view(), residual.view_mut(), &norm, out.view_mut(), ex)
        };
        assert_error(call(&partial, ex), &["a multiple of 8", "[2, 12]"]);
        let narrow = ex.zeros(DType::F32, &[2, 8]).unwrap();
        assert_error(call(&narrow, ex), &["residual", "[2, 8]", "[2, 12]"]);
        ex.synchronize().unwrap();
        peers.check().unwrap();
    });
}
