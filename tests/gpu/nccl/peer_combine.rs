//! Slots of a sparse layer are summed over ranks, added to the residual stream and normed in one launch. This is
//! compared with in-process CPU ranks, with and without slots that were added up before, where only ranks that own an
//! expert of a row send sums for it, in graphs, and by NCCL.

use candle_core::{DType, Result};
use moe_comm::{AddNorm, Communicator, FusedCollective, RowNeeds, run_ranks};
use moe_kernels::cuda::Graph;
use moe_kernels::{Buffer, Exec, NO_EXPERT, PreNorm, SlotRouting, SlotRows, View};

use super::peers::peers_of;
use super::rounds::bits;
use super::{LIMIT, run_nccl_ranks, worlds};
use crate::common::{Rng, assert_close, assert_error, words};

const EXPERTS: usize = 12;

/// How the layers of a case run.
#[derive(Clone, Copy, Debug)]
struct Form {
    added: bool,
    in_graph: bool,
    needed: bool,
}

/// Every form, with and without graphs.
fn forms(graphs: &[bool]) -> Vec<Form> {
    let mut forms = Vec::new();
    for added in [false, true] {
        for needed in [false, true] {
            forms.extend(graphs.iter().map(|&in_graph| Form { added, in_graph, needed }));
        }
    }
    forms
}

/// The data that all ranks share. The slots of each rank come from `seed`.
struct Case {
    counts: Vec<usize>,
    hidden: usize,
    top_k: usize,
    owners: Vec<usize>,
    ids: Vec<u32>,
    seed: u64,
}

impl Case {
    fn new(n: usize, (most, hidden, top_k): (usize, usize, usize), rng: &mut Rng) -> Self {
        let counts: Vec<usize> = (0..n).map(|rank| [most, most / 2, 0][rank % 3]).collect();
        let owners = (0..EXPERTS).map(|_| rng.below(n)).collect();
        let mut id = || if rng.below(4) == 0 { NO_EXPERT } else { rng.below(EXPERTS) as u32 };
        let ids = (0..counts.iter().sum::<usize>() * top_k).map(|_| id()).collect();
        Self { counts, hidden, top_k, owners, ids, seed: rng.bits() >> 1 }
    }

    /// The local slot of each physical expert on a rank.
    fn map(&self, rank: usize) -> Vec<i32> {
        let mut local = 0..;
        self.owners.iter().map(|&owner| if owner == rank { local.next().unwrap_or(0) } else { -1 }).collect()
    }

    /// The sums of a rank, which are zero for rows of which it owns no expert.
    fn sums(&self, rank: usize, rng: &mut Rng) -> Result<Buffer> {
        let total = self.counts.iter().sum::<usize>();
        let mut sums = rng.floats(DType::F32, &[total, self.hidden]).view().to_f32_vec()?;
        for (sums, ids) in sums.chunks_mut(self.hidden).zip(self.ids.chunks(self.top_k)) {
            if !ids.iter().any(|&id| self.owners.get(id as usize) == Some(&rank)) {
                sums.fill(0.0);
            }
        }
        Buffer::from_vec(sums, &[total, self.hidden])
    }

    /// The residual stream and its norm after two layers. With `added`, slots come as sums. With a graph these layers
    /// also run a second and third time. With `needed`, ranks leave out the rows of which they own no expert.
    fn play(
        &self,
        comm: &dyn Communicator,
        Form { added, in_graph, needed }: Form,
        ex: &mut Exec,
    ) -> Result<[Buffer; 2]> {
        let rank = comm.rank();
        let total = self.counts.iter().sum::<usize>();
        let h = self.hidden;
        let put = |host: Buffer| {
            let mut data = ex.zeros(host.dtype(), host.dims())?;
            ex.copy_from_host(host.view(), data.view_mut())?;
            Ok::<_, candle_core::Error>(data)
        };
        let mut rng = Rng::seeded(self.seed + rank as u64);
        let slots = match added {
            true => put(self.sums(rank, &mut rng)?)?,
            false => put(rng.floats(DType::F32, &[total, self.top_k, h]))?,
        };
        let mut residual = put(rng.floats(DType::F32, &[self.counts[rank], h]))?;
        let mut rng = Rng::seeded(self.seed - 1);
        let weights = put(rng.floats(DType::F32, &[total, self.top_k]))?;
        let gain = put(rng.floats(DType::BF16, &[h]))?;
        let ids = put(words(self.ids.clone(), &[total, self.top_k]))?;
        let map = put(Buffer::from_vec(self.map(rank), &[EXPERTS])?)?;
        let mut out = ex.zeros(DType::BF16, residual.dims())?;
        let routing =
            SlotRouting { topk_ids: ids.view(), topk_weights: weights.view(), expert_map: Some(map.view()) };
        let rows = SlotRows { rows: slots.view(), routing: (!added).then_some(routing) };
        let norm = PreNorm { weight: gain.view(), eps: 1e-6 };
        let owners = put(words(self.owners.iter().map(|&owner| owner as u32).collect(), &[EXPERTS]))?;
        let needs = needed.then(|| RowNeeds { ids: ids.view(), owners: owners.view() });
        let mut layers = |count: usize, ex: &mut Exec| {
            (0..count).try_for_each(|_| {
                let end = AddNorm { residual: residual.view_mut(), norm, out: out.view_mut() };
                FusedCollective::CombineAddNorm { slots: rows, counts: &self.counts, needs, end }
                    .run(comm, ex)
            })
        };
        layers(2, ex)?;
        if in_graph {
            let mut graph = Graph::capture(ex, |ex| layers(2, ex))?;
            (0..2).try_for_each(|_| graph.launch())?;
            ex.synchronize()?;
        } else {
            layers(4, ex)?;
        }
        Ok([ex.to_host(residual.view())?, ex.to_host(out.view())?])
    }
}

/// Rows of the rank with the most rows, H and K: no row, fewer columns than a warp has, parts of a turn, several turns,
/// several rows per block.
const SIZES: [(usize, usize, usize); 6] =
    [(0, 64, 2), (1, 8, 1), (17, 264, 8), (128, 2048, 8), (40, 4096, 3), (200, 1024, 32)];

fn compare(n: usize, uses_peers: bool, forms: &[Form], sizes: &[(usize, usize, usize)]) {
    let mut rng = Rng::new();
    let cases: Vec<Case> = sizes.iter().map(|size| Case::new(n, *size, &mut rng)).collect();
    let got = run_nccl_ranks(n, LIMIT, |comm, ex| {
        comm.use_peers(uses_peers);
        let all = |case: &Case| {
            if uses_peers {
                assert!(peers_of(comm).fits_combine(&case.counts, case.top_k, case.hidden));
            }
            forms.iter().map(|form| case.play(comm, *form, ex).unwrap()).collect::<Vec<_>>()
        };
        let got = cases.iter().map(all).collect::<Vec<_>>();
        comm.check().unwrap();
        got
    });
    for (at, case) in cases.iter().enumerate() {
        for (i, form) in forms.iter().enumerate() {
            let want =
                run_ranks(n, |_, comm| case.play(&comm, Form { in_graph: false, ..*form }, &mut Exec::cpu()));
            for (rank, want) in want.into_iter().map(Result::unwrap).enumerate() {
                let what = format!("rank {rank} of {n}, {:?}, {form:?}", SIZES[at]);
                let got = &got[rank][at];
                // NCCL adds in its own order.
                let bound = if uses_peers { 1e-6 } else { 1e-5 };
                assert_close(&format!("residual, {what}"), &want[0], &got[i][0], bound);
                assert_close(&format!("norm, {what}"), &want[1], &got[i][1], 4e-3);
                let same = forms.iter().position(|other| other.added == form.added).unwrap_or(i);
                for (a, b) in got[i].iter().zip(&got[same]) {
                    assert_eq!(bits(a), bits(b), "with and without a graph and zeros that are sent, {what}");
                }
            }
        }
    }
}

#[test]
fn slots_end_as_those_of_cpu_ranks() {
    for n in worlds() {
        compare(n, true, &forms(&[false, true]), &SIZES);
    }
}

/// Without peer memory NCCL runs the parts.
#[test]
fn nccl_does_the_same() {
    for n in worlds() {
        compare(n, false, &forms(&[false]), &SIZES[..4]);
    }
}

#[test]
fn wrong_arguments_are_refused() {
    run_nccl_ranks(2, LIMIT, |comm, ex| {
        let peers = peers_of(comm);
        let slots = ex.zeros(DType::F32, &[4, 2, 16]).unwrap();
        let gain = ex.zeros(DType::BF16, &[16]).unwrap();
        let ids = ex.zeros(DType::U32, &[4, 2]).unwrap();
        let weights = ex.zeros(DType::F32, &[4, 2]).unwrap();
        let map = ex.zeros(DType::I32, &[4]).unwrap();
        let mut residual = ex.zeros(DType::F32, &[2, 16]).unwrap();
        let mut out = ex.zeros(DType::BF16, &[2, 16]).unwrap();
        let norm = PreNorm { weight: gain.view(), eps: 1e-6 };
        let routing =
            SlotRouting { topk_ids: ids.view(), topk_weights: weights.view(), expert_map: Some(map.view()) };
        let mut call = |rows: View, routing, counts: &[usize]| {
            let rows = SlotRows { rows, routing };
            let end = AddNorm { residual: residual.view_mut(), norm, out: out.view_mut() };
            peers.combine_add_norm_into(&rows, counts, None, end, ex)
        };
        let fewer = SlotRouting {
            topk_ids: ids.view().narrow(0, 3).unwrap(),
            topk_weights: weights.view().narrow(0, 3).unwrap(),
            ..routing
        };
        let rows = slots.view().narrow(0, 3).unwrap();
        assert_error(call(rows, Some(fewer), &[2, 2]), &["rows of 2 ranks", "[3, 2, 16]"]);
        assert_error(call(slots.view(), Some(routing), &[2, 2, 0]), &["rows of 2 ranks"]);
        assert_error(call(slots.view(), None, &[2, 2]), &["sums", "2 dimensions"]);
        let short = SlotRouting { topk_weights: weights.view().narrow(0, 2).unwrap(), ..routing };
        assert_error(call(slots.view(), Some(short), &[2, 2]), &["topk_weights"]);
        comm.check().unwrap();
    });
}
