//! Gathers and reduce-scatters over peer memory, compared with in-process CPU ranks for any size, alignment and value,
//! and many in a row.

use candle_core::{DType, Result};
use moe_comm::{Collectives, Communicator, FusedCollective, NcclComm, PeerAllReduce, ReduceOp, run_ranks};
use moe_kernels::cuda::Graph;
use moe_kernels::{Buffer, Exec, NO_EXPERT, View, add_into};

use super::peer_runs::upload;
use super::peers::peers_of;
use super::rounds::bits;
use super::{LIMIT, run_nccl_ranks, worlds};
use crate::common::{Rng, assert_close, words};

/// The exchange of a step: each rank brings rows [T, H] with ids and weights [T, K], and sums for the rows of all
/// ranks.
#[derive(Clone, Copy, Debug)]
struct Case {
    /// Number of tokens of rank 0; see `counts`.
    tokens: usize,
    /// Whether the ranks bring different numbers of tokens, some of them none.
    uneven: bool,
    hidden: usize,
    top_k: usize,
    dtype: DType,
    /// Distance in elements from an aligned address. It is used on odd ranks only, because ranks need not agree.
    offset: usize,
}

/// A copy on the context's device, `offset` elements after an aligned address.
struct Placed {
    data: Buffer,
    offset: usize,
    dims: Vec<usize>,
}

impl Placed {
    fn new(host: &Buffer, offset: usize, ex: &Exec) -> Result<Self> {
        let len = host.view().elem_count();
        let mut data = ex.zeros(host.dtype(), &[offset + len])?;
        ex.copy_from_host(host.view(), data.view_mut().narrow(offset, len)?)?;
        Ok(Self { data, offset, dims: host.dims().to_vec() })
    }

    fn view(&self) -> Result<View<'_>> {
        self.data.view().narrow(self.offset, self.dims.iter().product())?.reshape(&self.dims)
    }
}

impl Case {
    /// The number of tokens of each of `n` ranks.
    fn counts(&self, n: usize) -> Vec<usize> {
        let of = |rank| match (self.uneven, rank % 3) {
            (false, _) | (true, 0) => self.tokens,
            (true, 1) => self.tokens / 3,
            (true, _) => 0,
        };
        (0..n).map(of).collect()
    }

    /// Whether every part fills whole slots: of 16 bytes, and for ids of 8 bytes.
    fn is_whole(&self, n: usize) -> bool {
        let size = self.dtype.size_in_bytes();
        self.counts(n)
            .iter()
            .all(|n| (n * self.hidden * size).is_multiple_of(16) && (n * self.top_k).is_multiple_of(4))
    }

    /// Ids that include the bit patterns with a special meaning in the protocol.
    fn ids(&self, tokens: usize, rng: &mut Rng) -> Buffer {
        let special = [NO_EXPERT, NO_EXPERT - 1, 0x7fff_7fff, 0xffff, 0xffff_0000];
        let id = |_| if rng.below(3) == 0 { special[rng.below(5)] } else { rng.below(128) as u32 };
        words((0..tokens * self.top_k).map(id).collect(), &[tokens, self.top_k])
    }

    /// The received data: rows, ids and weights of all ranks, and this rank's sums.
    fn play(&self, comm: &dyn Communicator, ex: &mut Exec) -> Result<[Buffer; 4]> {
        let rank = comm.rank();
        let n = comm.world_size();
        let Self { hidden, top_k, dtype, .. } = *self;
        let counts = self.counts(n);
        let tokens = counts[rank];
        let total = counts.iter().sum::<usize>();
        let mut rng = Rng::seeded(7 + rank as u64);
        let own = [
            rng.floats(dtype, &[tokens, hidden]),
            self.ids(tokens, &mut rng),
            rng.floats(DType::F32, &[tokens, top_k]),
            rng.floats(DType::F32, &[total, hidden]),
        ];
        let offset = self.offset * (rank % 2);
        let [rows, ids, weights, sums] = own.map(|host| Placed::new(&host, offset, ex).unwrap());
        let room =
            |of: &Placed, dims: &[usize]| Placed::new(&Buffer::zeros(of.data.dtype(), dims)?, offset, ex);
        let mut all = [
            room(&rows, &[total, hidden])?,
            room(&ids, &[total, top_k])?,
            room(&weights, &[total, top_k])?,
            room(&sums, &[tokens, hidden])?,
        ];
        let [to_rows, to_ids, to_weights, to_sums] = all.each_mut().map(|to| {
            let len = to.dims.iter().product();
            to.data.view_mut().narrow(to.offset, len).unwrap().reshape(&to.dims).unwrap()
        });
        let arrays = vec![(rows.view()?, to_rows), (ids.view()?, to_ids), (weights.view()?, to_weights)];
        FusedCollective::Gather { arrays, counts: &counts, needs: None }.run(comm, ex)?;
        comm.reduce_scatter_v(sums.view()?, &counts, to_sums, ReduceOp::Sum, ex)?;
        Ok(all.map(|to| ex.to_host(to.view().unwrap()).unwrap()))
    }
}

/// The cases: no token, a part of a slot, one slot per thread and more, rows that fill half a buffer and more; equal
/// and unequal numbers on the ranks.
fn cases() -> Vec<Case> {
    let sizes = [
        (0, 64, 8),
        (1, 8, 4),
        (1, 7, 1),
        (2, 12, 3),
        (1, 2048, 8),
        (5, 264, 8),
        (3, 64, 6),
        (16, 2048, 8),
        (100, 1000, 4),
        (128, 2048, 8),
        (400, 2048, 8),
        (1500, 2048, 8),
        (3001, 2048, 8),
    ];
    let dtypes = [DType::BF16, DType::F32, DType::F16];
    let mut all = Vec::new();
    for (tokens, hidden, top_k) in sizes {
        for (i, dtype) in dtypes.into_iter().enumerate().filter(|(i, _)| tokens < 1000 || *i == 0) {
            for uneven in [false, true] {
                all.push(Case { tokens, uneven, hidden, top_k, dtype, offset: [0, 1, 3][i] });
            }
        }
    }
    all
}

#[test]
fn gathers_and_scatters_have_the_bits_of_cpu_ranks() {
    let cases = cases();
    for n in worlds() {
        let expected = run_ranks(n, |_, comm| {
            cases.iter().map(|c| c.play(&comm, &mut Exec::cpu())).collect::<Result<Vec<_>>>()
        });
        let got = run_nccl_ranks(n, LIMIT, |comm, ex| {
            let peers = peers_of(comm);
            let both = |case: &Case| {
                let parts = |width: usize| case.counts(n).iter().map(|n| n * width).collect::<Vec<_>>();
                let rows = parts(case.hidden);
                let slots = parts(case.top_k);
                let arrays = [(case.dtype, &rows[..]), (DType::U32, &slots), (DType::F32, &slots)];
                let scatters = peers.fits_scatter(DType::F32, &rows);
                assert!(peers.fits_gather(arrays.into_iter()) && scatters || !case.is_whole(n), "{case:?}");
                let [peers, nccl] = [true, false].map(|over_peers| {
                    comm.use_peers(over_peers);
                    case.play(comm, ex).unwrap()
                });
                comm.check().unwrap();
                (peers, nccl, scatters)
            };
            cases.iter().map(both).collect::<Vec<_>>()
        });
        for (rank, (got, want)) in got.iter().zip(expected).enumerate() {
            for (case, (got, want)) in cases.iter().zip(got.iter().zip(want.unwrap())) {
                let what = format!("rank {rank} of {n}: {case:?}");
                let (peers, nccl, scatters) = got;
                for i in 0..3 {
                    assert_eq!(bits(&nccl[i]), bits(&want[i]), "NCCL, array {i}, {what}");
                    assert_eq!(bits(&peers[i]), bits(&want[i]), "array {i}, {what}");
                }
                // NCCL adds in its own order.
                assert_close(&what, &want[3], &nccl[3], (n * n) as f64 * 1e-7);
                if *scatters {
                    assert_eq!(bits(&peers[3]), bits(&want[3]), "sums, {what}");
                }
            }
        }
    }
}

/// A word of all ones marks data that has not arrived. Floats of that pattern are NaNs, and must arrive as NaNs, the
/// same on all ranks.
#[test]
fn floats_that_look_empty_arrive() {
    let empty = f32::from_bits(u32::MAX);
    for n in worlds() {
        let results = run_nccl_ranks(n, LIMIT, |comm, ex| {
            let host = Buffer::from_vec(vec![empty, 1.0, empty, -2.0], &[1, 4]).unwrap();
            let own = Placed::new(&host, 0, ex).unwrap();
            let mut all = ex.zeros(DType::F32, &[n, 4]).unwrap();
            comm.all_gather(own.view().unwrap(), all.view_mut(), ex).unwrap();
            comm.check().unwrap();
            ex.to_host(all.view()).unwrap()
        });
        for all in &results {
            assert_eq!(bits(all), bits(&results[0]));
            for row in all.view().to_f32_vec().unwrap().chunks(4) {
                assert!(row[0].is_nan() && row[1] == 1.0 && row[2].is_nan() && row[3] == -2.0, "{row:?}");
            }
        }
    }
}

/// Rows are sent to all ranks, return summed, and accumulate. Calls alternate with sums, which use the same slots in
/// another way.
struct Pile {
    own: [Buffer; 3],
    all: Buffer,
    back: Buffer,
    pile: Buffer,
    times: [usize; 3],
}

const DIMS: [usize; 2] = [3, 1024];

/// The contents of array `array` of rank `rank`: small whole numbers, whose sums are exact.
fn value(rank: usize, array: usize, i: usize) -> f32 {
    ((rank + 1) * (array + 1) + i % 7) as f32
}

impl Pile {
    fn new(rank: usize, n: usize, ex: &Exec) -> Self {
        let zeros = |dims: &[usize]| ex.zeros(DType::F32, dims).unwrap();
        let own = std::array::from_fn(|array| {
            upload(ex, (0..DIMS[0] * DIMS[1]).map(|i| value(rank, array, i)).collect(), &DIMS)
        });
        Self {
            own,
            all: zeros(&[n * DIMS[0], DIMS[1]]),
            back: zeros(&DIMS),
            pile: zeros(&DIMS),
            times: [0; 3],
        }
    }

    /// Puts call number `i` on the stream. The result is n times the rank's own rows.
    fn call(&mut self, i: usize, comm: &NcclComm, peers: &PeerAllReduce, ex: &mut Exec) -> Result<()> {
        comm.all_gather(self.own[i % 3].view(), self.all.view_mut(), ex)?;
        comm.reduce_scatter(self.all.view(), self.back.view_mut(), ReduceOp::Sum, ex)?;
        if i % 4 == 1 {
            // The arrays of all ranks are summed but not used: only the use of the slots matters.
            peers.all_reduce_into(self.all.view_mut(), ex)?;
        }
        add_into(self.back.view(), self.pile.view_mut(), ex)
    }

    fn count(&mut self, i: usize) {
        self.times[i % 3] += 1;
    }

    fn check(&self, rank: usize, n: usize, ex: &Exec) {
        let got = ex.to_host(self.pile.view()).unwrap().view().to_f32_vec().unwrap();
        for (i, got) in got.into_iter().enumerate() {
            let all = (0..3).map(|array| self.times[array] as f32 * value(rank, array, i));
            let expected = n as f32 * all.sum::<f32>();
            assert!(expected < (1 << 24) as f32, "f32 must hold {expected}");
            assert_eq!(got, expected, "element {i}");
        }
    }
}

#[test]
fn thousands_of_exchanges_without_a_wait_and_in_graphs() {
    const RECORDED: usize = 5;
    for n in worlds() {
        run_nccl_ranks(n, LIMIT, |comm, ex| {
            let peers = peers_of(comm);
            let rank = comm.rank();
            assert!(peers.fits_scatter(DType::F32, &vec![DIMS[0] * DIMS[1]; n]));
            let mut pile = Pile::new(rank, n, ex);
            for i in 0..3000 {
                // Each rank is late at different times.
                if i % 997 == 100 * rank {
                    std::thread::sleep(std::time::Duration::from_millis(1));
                }
                pile.call(i, comm, peers, ex).unwrap();
                pile.count(i);
            }
            pile.check(rank, n, ex);
            let record = |ex: &mut Exec| (0..RECORDED).try_for_each(|i| pile.call(i, comm, peers, ex));
            let mut graph = Graph::capture(ex, record).unwrap();
            for replay in 0..200 {
                graph.launch().unwrap();
                comm.watch(ex).unwrap();
                (0..RECORDED).for_each(|i| pile.count(i));
                for i in 0..replay % 4 {
                    pile.call(i, comm, peers, ex).unwrap();
                    pile.count(i);
                }
            }
            pile.check(rank, n, ex);
            comm.check().unwrap();
        });
    }
}
