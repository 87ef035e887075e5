//! Every expert-parallel backend gives each token the bits of one rank, whatever the geometry.

#![allow(clippy::unwrap_used)] // Helpers fail by panicking, like the tests that call them.

mod common;
#[path = "common/world.rs"]
mod world;

use std::sync::Arc;

use common::{Problem, bits, expert, run_named_experts};
use moe_comm::ExpertPlacement;
use moe_dispatch::candle::Result;
use moe_dispatch::{
    Dispatched, EpRanks, Exec, LowLatency, NO_EXPERT, NoEp, PrepareFinalize, TensorParallel, ThreadComm,
    View, ViewMut, WeightAndReduce, run_ranks,
};
use proptest::prelude::*;
use world::{BACKENDS, World};

/// Sizes of a world: (tp, dp), hidden, K, experts. More ranks than experts is legal.
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
    // Also none, one for all, and the same one twice.
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
            tokens,
            hidden,
            top_k,
            rows,
            ids,
            weights,
            map: (0..experts as i32).collect(),
            num_local: experts,
        })
}

fn one_rank(world: &World, p: &Problem) -> Vec<u32> {
    let backend = NoEp::new().with_router_weight_on_input(world.on_input);
    bits(&p.run::<f32>(&backend, false, &mut Exec::cpu()).unwrap())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn every_backend_gives_the_bits_of_one_rank(world in worlds(), agreed: bool, halves: bool) {
        let want: Vec<Vec<u32>> = world.problems.iter().map(|p| one_rank(&world, p)).collect();
        if !world.on_input {
            // The single rank itself is the definition.
            for (p, want) in world.problems.iter().zip(&want) {
                let close = p.definition::<f32>().iter().zip(want).all(|(a, b)| (a - f32::from_bits(*b)).abs() < 1e-3);
                prop_assert!(close);
            }
        }
        for name in BACKENDS {
            if name == "local_allreduce" && world.problems.len() > 1 {
                continue;
            }
            let results = run_ranks(world.ranks(), |rank, comm| {
                let backend = world.backend(name, Arc::new(comm))?;
                let mut ex = Exec::cpu();
                let tokens = (0..world.ranks()).map(|r| world.problems[r / world.tp].tokens);
                let tokens: Option<Vec<usize>> = agreed.then(|| tokens.collect());
                let tokens = tokens.as_deref();
                let first = world.run(backend.as_ref(), rank, halves, tokens, &mut ex)?;
                // Nothing of a call stays behind.
                assert_eq!(bits(&first), bits(&world.run(backend.as_ref(), rank, !halves, tokens, &mut ex)?));
                Ok(first)
            });
            for (rank, got) in results.into_iter().enumerate() {
                prop_assert_eq!(bits(&got.unwrap()), want[rank / world.tp].clone(), "{} on rank {}", name, rank);
            }
        }
    }
}

/// Segment s of the row of an expert: the sums of several ranks' segments make the row.
fn segment(e: usize, s: usize, row: &[f32]) -> Vec<f32> {
    expert(e, row).iter().map(|y| y * (s as f32 * 0.31 + 0.17)).collect()
}

/// The slot rows of experts that are cut: [S_local, T, K, H].
fn cut_experts(d: &Dispatched, first: usize, local: usize, width: usize) -> Result<Vec<f32>> {
    let (rows, ids) = (d.rows.view().cpu::<f32>()?, d.topk_ids()?);
    let (top_k, mut out) = (ids.dims()[1], Vec::new());
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
    fn cut_experts_give_the_bits_of_one_rank(
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
        let results = run_ranks(tp, |rank, comm| {
            let (backend, ex) = (TensorParallel::new(Arc::new(comm)), &mut Exec::cpu());
            let hidden = View::new(&p.rows, &[p.tokens, p.hidden])?;
            let ids = View::new(&p.ids, &[p.tokens, p.top_k])?;
            let d = backend.prepare(hidden, ids, View::new(&p.weights, &[p.tokens, p.top_k])?, None, ex)?;
            let y = cut_experts(&d, rank * local, local, p.hidden)?;
            let y = View::new(&y, &[local, p.tokens, p.top_k, p.hidden])?;
            let mut out = vec![f32::NAN; p.rows.len()];
            let to = ViewMut::new(&mut out, &[p.tokens, p.hidden])?;
            backend.finalize(y, &d, WeightAndReduce::Delegate, to, ex)?;
            Ok(out)
        });
        for got in results {
            prop_assert_eq!(bits(&got.unwrap()), bits(&want));
        }
    }
}

/// What crosses between ranks: a token's row goes to a rank once, however many of its experts are
/// there, and a token that several ranks see is sent by its owner alone.
#[test]
fn rows_travel_once() {
    let p = Problem {
        tokens: 4,
        hidden: 1,
        top_k: 3,
        rows: vec![1., 2., 3., 4.],
        ids: vec![0, 1, 0, 1, 0, 2, 3, 2, 3, 2, 2, 2],
        weights: vec![0.5; 12],
        map: (0..4).collect(),
        num_local: 4,
    };
    for (tp, groups, want) in [(1, 2, [4, 6]), (2, 1, [2, 3])] {
        let world = World {
            tp,
            placement: ExpertPlacement::Linear,
            problems: vec![p.clone(); groups],
            on_input: false,
        };
        let arrived = run_ranks(2, |rank, comm| {
            let backend = world.backend("high_throughput", Arc::new(comm))?;
            let hidden = View::new(&p.rows, &[4, 1])?;
            let (ids, weights) = (View::new(&p.ids, &[4, 3])?, View::new(&p.weights, &[4, 3])?);
            let d = backend.prepare(hidden, ids, weights, None, &mut Exec::cpu())?;
            let _ = rank;
            Ok(d.rows.view().rows())
        });
        // Experts 0 and 1: tokens 0 and 1; experts 2 and 3: tokens 1, 2 and 3.
        assert_eq!(arrived.into_iter().map(Result::unwrap).collect::<Vec<_>>(), want, "tp {tp}");
    }
}

/// Blocks are those of the step's most tokens, whatever the backend was built for, also in a step without any.
#[test]
fn low_latency_blocks_follow_the_step() {
    let p = |tokens: usize| Problem {
        tokens,
        hidden: 2,
        top_k: 2,
        rows: vec![1.; tokens * 2],
        ids: vec![0; tokens * 2],
        weights: vec![0.5; tokens * 2],
        map: (0..3).collect(),
        num_local: 3,
    };
    for (tokens, block) in [([0, 0], 0), ([0, 1], 1), ([5, 3], 5), ([100, 0], 100)] {
        let problems = tokens.map(p).to_vec();
        let world = World { tp: 1, placement: ExpertPlacement::Linear, problems, on_input: false };
        let dims = run_ranks(2, |rank, comm: ThreadComm| {
            let comm: Arc<dyn moe_dispatch::Communicator> = Arc::new(comm);
            let alone = comm.split(rank, 0, &mut Exec::cpu())?;
            let backend = LowLatency::new(EpRanks::new(&world.layout(rank), comm, alone)?, 100);
            let (p, ex) = (&world.problems[rank], &mut Exec::cpu());
            let (ids, weights) = (View::new(&p.ids, &[p.tokens, 2])?, View::new(&p.weights, &[p.tokens, 2])?);
            let d = backend.prepare(View::new(&p.rows, &[p.tokens, 2])?, ids, weights, None, ex)?;
            let dims = d.rows.view().dims().to_vec();
            assert_eq!(d.is_empty(), block == 0);
            let y = run_named_experts::<f32>(&d, |slot| slot)?;
            let mut out = vec![f32::NAN; p.rows.len()];
            let to = ViewMut::new(&mut out, &[p.tokens, 2])?;
            backend.finalize(View::new(&y, &d.expert_out_dims()?)?, &d, WeightAndReduce::Delegate, to, ex)?;
            assert!(out.iter().all(|y| y.is_finite()));
            Ok(dims)
        });
        let dims: Vec<_> = dims.into_iter().map(Result::unwrap).collect();
        assert_eq!(dims, [[2, 2 * block, 2], [1, 2 * block, 2]], "{tokens:?}");
    }
}

#[test]
fn contracts() {
    let p = Problem {
        tokens: 3,
        hidden: 2,
        top_k: 1,
        rows: vec![1.; 6],
        ids: vec![0, 1, 2],
        weights: vec![1.; 3],
        map: (0..5).collect(),
        num_local: 5,
    };
    let world = World { tp: 2, placement: ExpertPlacement::Linear, problems: vec![p], on_input: false };
    run_ranks(2, |rank, comm: ThreadComm| {
        let comm: Arc<dyn moe_dispatch::Communicator> = Arc::new(comm);
        for name in BACKENDS {
            let b = world.backend(name, comm.clone())?;
            assert!(b.output_is_reduced() && b.num_dispatchers() == 2 && !b.applies_router_weight_on_input());
            assert_eq!(b.topk_ids_dtype(), moe_dispatch::candle::DType::U32);
            assert_eq!(b.local_experts().map(|e| (e.num_experts(), e.num_local())), Some((5, 3 - rank)));
            let (low_latency, format) = (name == "low_latency", format!("{:?}", b.activation_format()));
            assert_eq!(b.max_num_tokens_per_rank(), low_latency.then_some(3));
            assert_eq!(format, if low_latency { "BatchedExperts" } else { "Standard" });
            // The collective runs after the whole call: nothing is in flight.
            assert!(!b.supports_async());
        }
        Ok(())
    })
    .into_iter()
    .for_each(|r| r.unwrap());
}
