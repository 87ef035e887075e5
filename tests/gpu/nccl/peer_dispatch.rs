//! Rows reach the ranks that own one of their experts, in one launch with the ids that decide it. This is compared with
//! in-process CPU ranks, which send all rows, eagerly and in graphs whose inputs change between replays.

use candle_core::{DType, Result};
use moe_comm::{Communicator, FusedCollective, run_ranks};
use moe_kernels::cuda::Graph;
use moe_kernels::{Buffer, Exec, NO_EXPERT, ViewMut, copy_rows_into, fill_into};

use super::peers::peers_of;
use super::rounds::bits;
use super::{LIMIT, run_nccl_ranks, worlds};
use crate::common::{Rng, assert_error, words};

const EXPERTS: usize = 12;

/// The value of rows that were not sent.
const POISON: f32 = 7.0;

/// Which experts the tokens choose.
#[derive(Clone, Copy, Debug)]
enum Chosen {
    /// Any of them, or none.
    Any,
    /// The experts of one rank.
    OfRank(usize),
    Nobody,
}

/// The tokens of all ranks.
struct Tokens {
    rows: Buffer,
    ids: Vec<u32>,
    weights: Buffer,
}

struct Case {
    counts: Vec<usize>,
    dtype: DType,
    hidden: usize,
    top_k: usize,
    owners: Vec<u32>,
    chosen: Chosen,
    /// Tokens of the first calls, and tokens of the last replay.
    tokens: [Tokens; 2],
}

impl Case {
    fn new(n: usize, (most, hidden, top_k): (usize, usize, usize), chosen: Chosen, rng: &mut Rng) -> Self {
        let mut counts: Vec<usize> = (0..n).map(|rank| [most, most / 2, 0][rank % 3]).collect();
        // Another rank than the first may have the most tokens, and the first none.
        counts.rotate_left(rng.below(n));
        let dtype = [DType::BF16, DType::F32, DType::F16][rng.below(3)];
        let total = counts.iter().sum::<usize>();
        let owners: Vec<u32> = (0..EXPERTS).map(|_| rng.below(n) as u32).collect();
        let mut tokens = || {
            let id = |rng: &mut Rng| {
                let id = rng.below(EXPERTS);
                let wanted = match chosen {
                    Chosen::Any => rng.below(3) > 0,
                    Chosen::OfRank(rank) => owners[id] as usize == rank,
                    Chosen::Nobody => false,
                };
                if wanted { id as u32 } else { NO_EXPERT }
            };
            let ids = (0..total * top_k).map(|_| id(rng)).collect();
            let rows = rng.floats(dtype, &[total, hidden]);
            Tokens { rows, ids, weights: rng.floats(DType::F32, &[total, top_k]) }
        };
        let tokens = [tokens(), tokens()];
        Self { counts, dtype, hidden, top_k, owners, chosen, tokens }
    }

    fn needs(&self, tokens: &Tokens, rank: usize, row: usize) -> bool {
        let chosen = &tokens.ids[row * self.top_k..(row + 1) * self.top_k];
        chosen.iter().any(|&id| self.owners.get(id as usize).is_some_and(|&owner| owner as usize == rank))
    }

    fn own(&self, rank: usize) -> std::ops::Range<usize> {
        let begin = self.counts[..rank].iter().sum();
        begin..begin + self.counts[rank]
    }

    /// Rows, ids and weights as this rank receives them, of the second tokens. On a GPU the first tokens are sent
    /// twice before, and a graph sends first the first and then the second ones.
    fn play(&self, comm: &dyn Communicator, in_graph: bool, ex: &mut Exec) -> Result<[Buffer; 3]> {
        let rank = comm.rank();
        let own = self.own(rank);
        let total = self.counts.iter().sum::<usize>();
        let mut rows = ex.zeros(self.dtype, &[own.len(), self.hidden])?;
        let mut ids = ex.zeros(DType::U32, &[own.len(), self.top_k])?;
        let mut weights = ex.zeros(DType::F32, &[own.len(), self.top_k])?;
        let mut owners = ex.zeros(DType::U32, &[EXPERTS])?;
        ex.copy_from_host(words(self.owners.clone(), &[EXPERTS]).view(), owners.view_mut())?;
        let mut all_rows = ex.zeros(self.dtype, &[total, self.hidden])?;
        let mut poison = ex.zeros(DType::F32, &[total, self.hidden])?;
        fill_into(POISON, poison.view_mut(), ex)?;
        let mut all_ids = ex.zeros(DType::U32, &[total, self.top_k])?;
        let mut all_weights = ex.zeros(DType::F32, &[total, self.top_k])?;
        let fill = |tokens: &Tokens, [rows, ids, weights]: [ViewMut; 3], ex: &Exec| {
            let all = words(tokens.ids.clone(), &[total, self.top_k]);
            ex.copy_from_host(tokens.rows.view().narrow(own.start, own.len())?, rows)?;
            ex.copy_from_host(all.view().narrow(own.start, own.len())?, ids)?;
            ex.copy_from_host(tokens.weights.view().narrow(own.start, own.len())?, weights)
        };
        let [first, second] = &self.tokens;
        fill(first, [rows.view_mut(), ids.view_mut(), weights.view_mut()], ex)?;
        let mut send = |rows: &Buffer, ids: &Buffer, weights: &Buffer, ex: &mut Exec| {
            copy_rows_into(poison.view(), all_rows.view_mut(), ex)?;
            let dispatch = FusedCollective::Dispatch {
                rows: (rows.view(), all_rows.view_mut()),
                ids: (ids.view(), all_ids.view_mut()),
                weights: (weights.view(), all_weights.view_mut()),
                counts: &self.counts,
                owners: owners.view(),
            };
            dispatch.run(comm, ex)
        };
        (0..2).try_for_each(|_| send(&rows, &ids, &weights, ex))?;
        if in_graph {
            let mut graph = Graph::capture(ex, |ex| send(&rows, &ids, &weights, ex))?;
            graph.launch()?;
            ex.synchronize()?;
            fill(second, [rows.view_mut(), ids.view_mut(), weights.view_mut()], ex)?;
            graph.launch()?;
            ex.synchronize()?;
        } else {
            fill(second, [rows.view_mut(), ids.view_mut(), weights.view_mut()], ex)?;
            send(&rows, &ids, &weights, ex)?;
        }
        Ok([ex.to_host(all_rows.view())?, ex.to_host(all_ids.view())?, ex.to_host(all_weights.view())?])
    }

    /// Compares what a rank of GPUs has received with what a rank of CPUs has.
    fn compare(&self, rank: usize, want: &[Buffer; 3], got: &[Buffer; 3], what: &str) {
        assert_eq!(bits(&got[1]), bits(&want[1]), "ids, {what}");
        assert_eq!(bits(&got[2]), bits(&want[2]), "weights, {what}");
        let [wanted, rows] = [&want[0], &got[0]].map(|rows| rows.view().to_f32_vec().unwrap());
        let own = self.own(rank);
        for row in 0..self.counts.iter().sum() {
            let range = row * self.hidden..(row + 1) * self.hidden;
            let is_there = own.contains(&row) || self.needs(&self.tokens[1], rank, row);
            match is_there {
                true => assert_eq!(rows[range.clone()], wanted[range], "row {row}, {what}"),
                false => assert!(rows[range].iter().all(|x| *x == POISON), "row {row} was sent, {what}"),
            }
        }
    }
}

/// The most rows of a rank, H and K: no row, one slot, fewer slots than a block has threads and more than it has in
/// progress, as many ids as a warp has lanes, several rows for each block.
const SIZES: [(usize, usize, usize); 7] =
    [(0, 64, 2), (1, 8, 1), (17, 264, 3), (64, 2048, 8), (5, 7168, 8), (33, 512, 32), (400, 1024, 2)];

#[test]
fn rows_reach_the_ranks_that_need_them_as_cpu_ranks_send_them() {
    let mut rng = Rng::new();
    for n in worlds() {
        let mut cases = Vec::new();
        for size in SIZES {
            for chosen in [Chosen::Any, Chosen::OfRank(0), Chosen::OfRank(n - 1), Chosen::Nobody] {
                cases.push(Case::new(n, size, chosen, &mut rng));
            }
        }
        let got = run_nccl_ranks(n, LIMIT, |comm, ex| {
            let all = |case: &Case| {
                let Case { counts, top_k, hidden, dtype, .. } = case;
                assert!(peers_of(comm).fits_dispatch(counts, *top_k, *hidden, *dtype));
                [false, true].map(|graph| case.play(comm, graph, ex).unwrap())
            };
            let got = cases.iter().map(all).collect::<Vec<_>>();
            comm.check().unwrap();
            got
        });
        for (at, case) in cases.iter().enumerate() {
            let want = run_ranks(n, |_, comm| case.play(&comm, false, &mut Exec::cpu()));
            for (rank, want) in want.into_iter().map(Result::unwrap).enumerate() {
                for (in_graph, got) in got[rank][at].iter().enumerate() {
                    let Case { counts, dtype, hidden, top_k, chosen, .. } = case;
                    let what = format!(
                        "rank {rank} of {n}, {counts:?} x {hidden} {dtype:?}, {top_k} of {chosen:?}, graph {in_graph}"
                    );
                    case.compare(rank, &want, got, &what);
                }
            }
        }
    }
}

/// Without peer memory all rows are gathered.
#[test]
fn nccl_sends_all_rows() {
    let mut rng = Rng::new();
    let cases = [(17, 264, 3), (64, 2048, 8)].map(|size| Case::new(2, size, Chosen::Any, &mut rng));
    let got = run_nccl_ranks(2, LIMIT, |comm, ex| {
        comm.use_peers(false);
        cases.iter().map(|case| case.play(comm, false, ex).unwrap()).collect::<Vec<_>>()
    });
    for (at, case) in cases.iter().enumerate() {
        let want = run_ranks(2, |_, comm| case.play(&comm, false, &mut Exec::cpu()));
        for (rank, want) in want.into_iter().map(Result::unwrap).enumerate() {
            for (want, got) in want.iter().zip(&got[rank][at]) {
                assert_eq!(bits(got), bits(want), "rank {rank}, {:?}", case.counts);
            }
        }
    }
}

#[test]
fn wrong_arguments_are_refused() {
    run_nccl_ranks(2, LIMIT, |comm, ex| {
        let peers = peers_of(comm);
        let rows = ex.zeros(DType::BF16, &[2, 16]).unwrap();
        let ids = ex.zeros(DType::U32, &[2, 2]).unwrap();
        let weights = ex.zeros(DType::F32, &[2, 2]).unwrap();
        let owners = ex.zeros(DType::U32, &[4]).unwrap();
        let mut all_rows = ex.zeros(DType::BF16, &[4, 16]).unwrap();
        let mut all_ids = ex.zeros(DType::U32, &[4, 2]).unwrap();
        let mut all_weights = ex.zeros(DType::F32, &[4, 2]).unwrap();
        let mut call = |rows: &Buffer, weights: &Buffer, counts: &[usize], ex: &mut Exec| {
            let rows = (rows.view(), all_rows.view_mut());
            let ids = (ids.view(), all_ids.view_mut());
            let weights = (weights.view(), all_weights.view_mut());
            peers.dispatch_into(rows, ids, weights, counts, owners.view(), ex)
        };
        assert_error(call(&rows, &weights, &[2, 2, 0], ex), &["counts of 2 ranks", "[2, 16]"]);
        assert_error(call(&rows, &weights, &[1, 3], ex), &["[1, 3] rows"]);
        assert_error(call(&rows, &rows, &[2, 2], ex), &["weights"]);
        assert_error(call(&weights, &weights, &[2, 2], ex), &["all rows"]);
        comm.check().unwrap();
    });
}
