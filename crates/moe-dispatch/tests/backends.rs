//! Every backend over several ranks gives each token the result of one rank, for any geometry. By slot the bits are
//! equal; by rank results are equal up to the rounding of f32 sums, with experts that weight and reduce by themselves
//! and with others.

#![allow(clippy::unwrap_used)] // Helpers fail by panicking, like the tests that call them.

mod common;
#[path = "common/world.rs"]
mod world;

use std::sync::Arc;

use common::{Problem, bits, expert, run_named_experts};
use moe_comm::ExpertPlacement;
use moe_dispatch::candle::Result;
use moe_dispatch::{
    ActivationFormat, AddNorm, Combine, Dispatched, EpRanks, Exec, NO_EXPERT, NoEp, OverRanks,
    PrepareFinalize, ThreadComm, View, ViewMut, WeightAndReduce, WhoAdds, run_ranks,
};
use moe_kernels::{PreNorm, add_rms_norm_into};
use proptest::prelude::*;
use world::{BACKENDS, BOTH, DISABLED, World};

/// Sizes of a world: (tp, dp), hidden, K, experts. There may be more ranks than experts.
fn worlds() -> impl Strategy<Value = World> {
    let groups = prop::sample::select(vec![(1usize, 1usize), (2, 1), (4, 1), (1, 2), (1, 3), (2, 2), (2, 3)]);
    let placement = prop::sample::select(ExpertPlacement::ALL.to_vec());
    (groups, 1usize..5, 1usize..4, 1usize..9, placement, any::<bool>()).prop_flat_map(
        |((tp, dp), hidden, top_k, experts, placement, on_input)| {
            let top_k = if on_input { 1 } else { top_k };
            let tokens = prop::collection::vec(prop_oneof![1 => Just(0usize), 3 => 1usize..8], dp);
            tokens.prop_flat_map(move |tokens| {
                let problems: Vec<_> = tokens.iter().map(|&t| problem(t, hidden, top_k, experts)).collect();
                problems.prop_map(move |problems| World { tp, placement, problems, on_input })
            })
        },
    )
}

fn problem(tokens: usize, hidden: usize, top_k: usize, experts: usize) -> impl Strategy<Value = Problem> {
    // Ids include no expert, one expert for all, and the same expert twice.
    let id = prop_oneof![6 => 0..experts as u32, 1 => Just(NO_EXPERT)];
    let ids = prop_oneof![
        6 => prop::collection::vec(id, tokens * top_k),
        1 => (0..experts as u32).prop_map(move |e| vec![e; tokens * top_k]),
    ];
    (
        prop::collection::vec(-4f32..4., tokens * hidden),
        ids,
        prop::collection::vec(-1f32..1.5, tokens * top_k),
    )
        .prop_map(move |(rows, ids, weights)| Problem {
            rows,
            ids,
            weights,
            ..Problem::ones(tokens, hidden, top_k, experts)
        })
}

/// What one rank gives for the tokens of each group.
fn one_rank(world: &World) -> Vec<Vec<f32>> {
    let backend = NoEp::new().with_router_weight_on_input(world.on_input);
    world.problems.iter().map(|p| p.run::<f32>(&backend, &mut Exec::cpu()).unwrap()).collect()
}

/// The backends with whole experts that fit a world, each with both ways of adding.
fn backends(world: &World) -> impl Iterator<Item = (&'static str, WhoAdds)> {
    let same_tokens = world.problems.len() == 1;
    let fits = move |name: &&str| *name != "local_allreduce" || same_tokens;
    BACKENDS.into_iter().filter(fits).flat_map(|name| BOTH.map(|who| (name, who)))
}

/// By slot the bits must be equal; by rank results must be equal up to the rounding of f32 sums.
fn agrees(who: WhoAdds, got: &[f32], want: &[f32]) -> bool {
    match who {
        WhoAdds::BySlot => bits(got) == bits(want),
        WhoAdds::ByRank => got.len() == want.len() && got.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-3),
    }
}

/// Every rank has what one rank gives for its tokens.
fn check(world: &World, backend: (&str, WhoAdds), results: Vec<Result<Vec<f32>>>, want: &[Vec<f32>]) {
    for (rank, got) in results.into_iter().enumerate() {
        let got = got.unwrap();
        let want = &want[rank / world.tp];
        assert!(agrees(backend.1, &got, want), "{backend:?} on rank {rank}: {got:?}, expected {want:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn every_backend_gives_what_one_rank_gives(world in worlds(), agreed: bool, reduces: bool) {
        let want = one_rank(&world);
        if !world.on_input {
            // The result of a single rank is the definition.
            for (p, want) in world.problems.iter().zip(&want) {
                prop_assert!(agrees(WhoAdds::ByRank, &p.definition::<f32>(), want));
            }
        }
        for (name, who) in backends(&world) {
            // Experts that weight rows themselves need rows that were not multiplied by the weights before.
            let reduces = reduces && who == WhoAdds::ByRank && !world.on_input;
            let results = run_ranks(world.ranks(), |rank, comm| {
                let backend = world.backend(name, who, Arc::new(comm))?;
                let mut ex = Exec::cpu();
                let tokens = (0..world.ranks()).map(|r| world.problems[r / world.tp].tokens);
                let tokens: Option<Vec<usize>> = agreed.then(|| tokens.collect());
                let tokens = tokens.as_deref();
                let first = world.run(&backend, rank, reduces, tokens, &mut ex)?;
                // A second call gives the same result, so no state of a call is left.
                assert_eq!(bits(&first), bits(&world.run(&backend, rank, reduces, tokens, &mut ex)?));
                Ok(first)
            });
            check(&world, (name, who), results, &want);
        }
    }

    /// A rank may prepare a second call before it finalizes the first one.
    #[test]
    fn two_calls_may_be_in_flight(world in worlds()) {
        let want = one_rank(&world);
        for (name, who) in backends(&world) {
            let results = run_ranks(world.ranks(), |rank, comm| {
                world.run_in_two_calls(&world.backend(name, who, Arc::new(comm))?, rank)
            });
            check(&world, (name, who), results, &want);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]
    /// By rank, finalize with addition and norm gives the same bits as finalize followed by both.
    #[test]
    fn sums_return_to_the_residual_stream(world in worlds(), reduces: bool) {
        let fits = world.tp == 1 && !world.on_input;
        for name in ["allgather_reducescatter", "low_latency"].into_iter().filter(|_| fits) {
            let results = run_ranks(world.ranks(), |rank, comm| {
                let backend = world.backend(name, WhoAdds::ByRank, Arc::new(comm))?;
                let mut ex = Exec::cpu();
                let p = &world.problems[rank];
                let dims = [p.tokens, p.hidden];
                let gain = vec![1.5f32; p.hidden];
                let mut residual = p.rows.clone();
                let norm = PreNorm { weight: View::new(&gain, &[p.hidden])?, eps: 1e-6 };
                let out = p.output::<f32>(|out| {
                    let end = AddNorm { residual: ViewMut::new(&mut residual, &dims)?, norm, out };
                    world.run_add_norm(&backend, rank, reduces, end, &mut ex)
                })?;
                let sums = world.run(&backend, rank, reduces, None, &mut ex)?;
                let mut want = p.rows.clone();
                let want_out = p.output::<f32>(|out| {
                    let residual = ViewMut::new(&mut want, &dims)?;
                    add_rms_norm_into(View::new(&sums, &dims)?, norm.weight, norm.eps, residual, out, &mut ex)
                })?;
                Ok((bits(&residual) == bits(&want), bits(&out) == bits(&want_out)))
            });
            for (rank, same) in results.into_iter().enumerate() {
                prop_assert_eq!(same.unwrap(), (true, true), "{} on rank {}", name, rank);
            }
        }
    }
}

/// Segment s of an expert's row. The sum of all ranks' segments is the row.
fn segment(e: usize, s: usize, row: &[f32]) -> Vec<f32> {
    expert(e, row).iter().map(|y| y * (s as f32 * 0.31 + 0.17)).collect()
}

/// The slot rows of experts that are cut: [S_local, T, K, H].
fn cut_experts(d: &Dispatched, first: usize, local: usize, width: usize) -> Result<Vec<f32>> {
    let rows = d.rows.view().cpu::<f32>()?;
    let ids = d.topk_ids()?;
    let top_k = ids.dims()[1];
    let mut out = Vec::new();
    for s in first..first + local {
        for (slot, &id) in ids.cpu::<u32>()?.iter().enumerate() {
            match id {
                NO_EXPERT => out.extend(vec![0.; width]),
                id => out.extend(segment(id as usize, s, &rows[slot / top_k * width..][..width])),
            }
        }
    }
    Ok(out)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn cut_experts_give_what_one_rank_gives(
        p in (0usize..7, 1usize..5, 1usize..4, 1usize..6).prop_flat_map(|(t, h, k, e)| problem(t, h, k, e)),
        tp in prop::sample::select(vec![1usize, 2, 4]), local in 1usize..3,
    ) {
        let mut want = Vec::new();
        for t in 0..p.tokens {
            let row = &p.rows[t * p.hidden..][..p.hidden];
            let mut sum = vec![0f32; p.hidden];
            for slot in t * p.top_k..(t + 1) * p.top_k {
                if p.ids[slot] == NO_EXPERT {
                    continue;
                }
                let parts = (0..tp * local).map(|s| segment(p.ids[slot] as usize, s, row));
                let y = parts.reduce(|a, b| a.iter().zip(b).map(|(a, b)| a + b).collect()).unwrap();
                sum.iter_mut().zip(y).for_each(|(sum, y)| *sum = p.weights[slot].mul_add(y, *sum));
            }
            want.extend(sum);
        }
        for who in BOTH {
            let results = run_ranks(tp, |rank, comm| {
                let backend = OverRanks::disabled(Arc::new(comm), who);
                let ex = &mut Exec::cpu();
                let d = backend.prepare(p.inputs()?, None, ex)?;
                let y = cut_experts(&d, rank * local, local, p.hidden)?;
                let segments = [local, p.tokens, p.top_k, p.hidden];
                // One segment needs no leading dimension.
                let dims = if local == 1 { &segments[1..] } else { &segments };
                let y = View::new(&y, dims)?;
                p.output::<f32>(|to| backend.finalize(y, &d, WeightAndReduce::Delegate, to, ex))
            });
            for got in results {
                let got = got.unwrap();
                prop_assert!(agrees(who, &got, &want), "{who:?}: {got:?}, expected {want:?}");
            }
        }
    }
}

/// Counts the rows that are sent between ranks. A token's row is sent to a rank once, however many of its experts the
/// rank has, and a token that several ranks see is sent only by its owner. By slot rows are packed; by rank they have
/// the places of a gather, where each token has one place.
#[test]
fn rows_travel_once() {
    let ids = vec![0, 1, 0, 1, 0, 2, 3, 2, 3, 2, 2, 2];
    let p = Problem { rows: vec![1., 2., 3., 4.], ids, ..Problem::ones(4, 1, 3, 4) };
    for (tp, groups, packed, gathered) in [(1, 2, [4, 6], [8, 8]), (2, 1, [2, 3], [4, 4])] {
        let world = World {
            tp,
            placement: ExpertPlacement::Linear,
            problems: vec![p.clone(); groups],
            on_input: false,
        };
        for (who, want) in [(WhoAdds::BySlot, packed), (WhoAdds::ByRank, gathered)] {
            let arrived = run_ranks(2, |_, comm| {
                let backend = world.backend("high_throughput", who, Arc::new(comm))?;
                let d = backend.prepare(p.inputs()?, None, &mut Exec::cpu())?;
                Ok(d.rows.view().rows())
            });
            // Experts 0 and 1: tokens 0 and 1; experts 2 and 3: tokens 1, 2 and 3.
            assert_eq!(arrived.into_iter().map(Result::unwrap).collect::<Vec<_>>(), want, "tp {tp}");
        }
    }
}

/// The block size is the largest number of tokens in the step, whatever the backend was built for, even in a step
/// without tokens.
#[test]
fn low_latency_blocks_follow_the_step() {
    for (tokens, block) in [([0, 0], 0), ([0, 1], 1), ([5, 3], 5), ([100, 0], 100)] {
        let problems = tokens.map(|tokens| Problem::ones(tokens, 2, 2, 3)).to_vec();
        let world = World { tp: 1, placement: ExpertPlacement::Linear, problems, on_input: false };
        let dims = run_ranks(2, |rank, comm: ThreadComm| {
            let comm: Arc<dyn moe_dispatch::Communicator> = Arc::new(comm);
            let alone = comm.split(rank, 0, &mut Exec::cpu())?;
            let ranks = EpRanks::new(&world.layout(rank), comm, alone)?;
            let backend = OverRanks::low_latency(ranks, 100, WhoAdds::BySlot);
            let p = &world.problems[rank];
            let ex = &mut Exec::cpu();
            let d = backend.prepare(p.inputs()?, None, ex)?;
            let dims = d.rows.view().dims().to_vec();
            assert_eq!(d.is_empty(), block == 0);
            let y = run_named_experts::<f32>(&d, |slot| slot)?;
            let y = View::new(&y, &d.expert_out_dims()?)?;
            let out = p.output::<f32>(|to| backend.finalize(y, &d, WeightAndReduce::Delegate, to, ex))?;
            assert!(out.iter().all(|y| y.is_finite()));
            Ok(dims)
        });
        let dims: Vec<_> = dims.into_iter().map(Result::unwrap).collect();
        assert_eq!(dims, [[2, 2 * block, 2], [1, 2 * block, 2]], "{tokens:?}");
    }
}

#[test]
fn contracts() {
    use ActivationFormat::{BatchedExperts, Listed, Standard};
    let p = Problem { ids: vec![0, 1, 2], ..Problem::ones(3, 2, 1, 5) };
    let world = World { tp: 2, placement: ExpertPlacement::Linear, problems: vec![p], on_input: false };
    run_ranks(2, |rank, comm: ThreadComm| {
        let comm: Arc<dyn moe_dispatch::Communicator> = Arc::new(comm);
        for (name, who) in BACKENDS.into_iter().chain([DISABLED]).flat_map(|name| BOTH.map(|who| (name, who)))
        {
            let mut b = world.backend(name, who, comm.clone())?;
            let same_tokens = name == DISABLED || name == "local_allreduce";
            let (combine, format) = match who {
                WhoAdds::BySlot => (Combine::BySlot, BatchedExperts),
                WhoAdds::ByRank if same_tokens => (Combine::AllReduce, Standard),
                WhoAdds::ByRank => (Combine::ByRank, Listed),
            };
            let low_latency = name == "low_latency";
            assert_eq!((b.combine(), b.num_dispatchers()), (combine, 2), "{name} {who:?}");
            assert_eq!(b.activation_format(), if low_latency { format } else { Standard });
            assert_eq!(b.max_num_tokens_per_rank(), low_latency.then_some(3));
            let experts = b.local_experts().map(|e| (e.num_experts(), e.num_local()));
            assert_eq!(experts, (name != DISABLED).then_some((5, 3 - rank)));
            // The collective ends within the call, so nothing is pending afterwards.
            assert!(!b.applies_router_weight_on_input());
            let d = b.prepare(world.problems[0].inputs()?, None, &mut Exec::cpu())?;
            assert!(!b.combines(&d), "host memory saves no launches");
            assert_eq!(b.defer_sum(), combine == Combine::AllReduce);
            assert_eq!(b.combine() == Combine::DeferredToCaller, combine == Combine::AllReduce);
        }
        Ok(())
    })
    .into_iter()
    .for_each(|r| r.unwrap());
}
