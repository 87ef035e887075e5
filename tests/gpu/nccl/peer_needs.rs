//! Rows are sent only to the ranks that own one of their experts, and their sums return. This is compared with
//! in-process CPU ranks, which send all rows, and tested in graphs.

use candle_core::{DType, Result};
use moe_comm::{Communicator, FusedCollective, RowNeeds, run_ranks};
use moe_kernels::cuda::Graph;
use moe_kernels::half::bf16;
use moe_kernels::{Buffer, Exec, NO_EXPERT};

use super::peers::peers_of;
use super::rounds::bits;
use super::{LIMIT, run_nccl_ranks, worlds};
use crate::common::{Rng, words};

const EXPERTS: usize = 12;
const TOP_K: usize = 2;

/// The data of each rank and which ranks need it. All ranks share it, except for `rows` and `sums`.
struct Case {
    counts: Vec<usize>,
    hidden: usize,
    owners: Vec<u32>,
    ids: Vec<u32>,
    seed: u64,
}

impl Case {
    fn new(n: usize, most: usize, hidden: usize, rng: &mut Rng) -> Self {
        let counts: Vec<usize> = (0..n).map(|rank| [most, most / 2, 0][rank % 3]).collect();
        let total = counts.iter().sum::<usize>();
        let owners = (0..EXPERTS).map(|_| rng.below(n) as u32).collect();
        let mut id = || if rng.below(3) == 0 { NO_EXPERT } else { rng.below(EXPERTS) as u32 };
        let ids = (0..total * TOP_K).map(|_| id()).collect();
        Self { counts, hidden, owners, ids, seed: rng.bits() >> 1 }
    }

    fn needs(&self, rank: usize, row: usize) -> bool {
        let chosen = &self.ids[row * TOP_K..(row + 1) * TOP_K];
        chosen.iter().any(|&id| self.owners.get(id as usize).is_some_and(|&owner| owner as usize == rank))
    }

    /// The rows of all ranks as this rank receives them, its sums, and its sums of parts in bf16. With `in_graph` the
    /// calls are replayed.
    fn play(&self, comm: &dyn Communicator, in_graph: bool, ex: &mut Exec) -> Result<[Buffer; 3]> {
        let rank = comm.rank();
        let total = self.counts.iter().sum::<usize>();
        let put = |host: Buffer| {
            let mut data = ex.zeros(host.dtype(), host.dims())?;
            ex.copy_from_host(host.view(), data.view_mut())?;
            Ok::<_, candle_core::Error>(data)
        };
        let mut rng = Rng::seeded(self.seed + rank as u64);
        let rows = put(rng.floats(DType::BF16, &[self.counts[rank], self.hidden]))?;
        let mut sums = rng.floats(DType::F32, &[total, self.hidden]).view().to_f32_vec()?;
        for (row, sums) in sums.chunks_mut(self.hidden).enumerate() {
            if !self.needs(rank, row) {
                sums.fill(0.0);
            }
        }
        let narrow: Vec<_> = sums.iter().map(|x| bf16::from_f32(*x)).collect();
        let sums = put(Buffer::from_vec(sums, &[total, self.hidden])?)?;
        let narrow = put(Buffer::from_vec(narrow, &[total, self.hidden])?)?;
        let ids = put(words(self.ids.clone(), &[total, TOP_K]))?;
        let owners = put(words(self.owners.clone(), &[EXPERTS]))?;
        let mut all = ex.zeros(DType::BF16, &[total, self.hidden])?;
        let mut own = ex.zeros(DType::F32, &[self.counts[rank], self.hidden])?;
        let mut own_narrow = ex.zeros(DType::F32, own.dims())?;
        let mut call = |ex: &mut Exec| {
            let needs = Some(RowNeeds { ids: ids.view(), owners: owners.view() });
            let counts = &self.counts[..];
            let arrays = vec![(rows.view(), all.view_mut())];
            FusedCollective::Gather { arrays, counts, needs }.run(comm, ex)?;
            let out = own.view_mut();
            FusedCollective::ScatterSums { sums: sums.view(), counts, needs, out }.run(comm, ex)?;
            let out = own_narrow.view_mut();
            FusedCollective::ScatterSums { sums: narrow.view(), counts, needs, out }.run(comm, ex)
        };
        call(ex)?;
        if in_graph {
            let mut graph = Graph::capture(ex, call)?;
            (0..5).try_for_each(|_| graph.launch())?;
            ex.synchronize()?;
        }
        Ok([ex.to_host(all.view())?, ex.to_host(own.view())?, ex.to_host(own_narrow.view())?])
    }
}

#[test]
fn needed_rows_and_their_sums_are_those_of_cpu_ranks() {
    let mut rng = Rng::new();
    for n in worlds() {
        let sizes = [(0, 64), (1, 8), (17, 264), (300, 2048), (3001, 1024)];
        let cases: Vec<Case> =
            sizes.into_iter().map(|(most, hidden)| Case::new(n, most, hidden, &mut rng)).collect();
        let cpu = |case: &Case| {
            let results = run_ranks(n, |_, comm| case.play(&comm, false, &mut Exec::cpu()));
            results.into_iter().map(Result::unwrap).collect::<Vec<_>>()
        };
        let got = run_nccl_ranks(n, LIMIT, |comm, ex| {
            peers_of(comm);
            let both = |case: &Case| [false, true].map(|graph| case.play(comm, graph, ex).unwrap());
            let got = cases.iter().map(both).collect::<Vec<_>>();
            comm.check().unwrap();
            got
        });
        for (at, case) in cases.iter().enumerate() {
            for (rank, want) in cpu(case).into_iter().enumerate() {
                for (in_graph, got) in got[rank][at].iter().enumerate() {
                    let what =
                        format!("rank {rank} of {n}, {:?} x {}, graph {in_graph}", case.counts, case.hidden);
                    let [all, wanted] = [&got[0], &want[0]].map(bits);
                    for row in (0..case.counts.iter().sum()).filter(|row| case.needs(rank, *row)) {
                        let range = row * case.hidden..(row + 1) * case.hidden;
                        assert_eq!(all[range.clone()], wanted[range], "row {row}, {what}");
                    }
                    // A zero may have lost its sign.
                    let [own, wanted] = [&got[1], &want[1]].map(|sums| sums.view().to_f32_vec().unwrap());
                    assert_eq!(own, wanted, "sums, {what}");
                    // CPU ranks round the sum, too.
                    let rounded = got[2].view().to_f32_vec().unwrap().into_iter().map(bf16::from_f32);
                    let wanted = want[2].view().to_f32_vec().unwrap().into_iter().map(bf16::from_f32);
                    assert!(rounded.eq(wanted), "sums of rounded parts, {what}");
                }
            }
        }
    }
}
