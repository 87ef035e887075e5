//! The backends that add the ranks' sums: any geometry gives the layer's definition within the rounding
//! of f32 sums, whether the experts weight and reduce by themselves or not.

#![allow(clippy::unwrap_used)] // Helpers fail by panicking, like the tests that call them.

mod common;
#[path = "common/world.rs"]
mod world;

use std::sync::Arc;

use common::{Problem, run_named_experts};
use moe_comm::ExpertPlacement;
use moe_dispatch::candle::{DType, Device, Result};
use moe_dispatch::{
    Communicator, Dispatched, EpRanks, Exec, LocalExperts, NO_EXPERT, PrepareFinalize, SumAllReduce,
    SumAllToAll, SumGather, View, ViewMut, WeightAndReduce, mask_nonlocal_into, run_ranks, weighted_sum_into,
};
use proptest::prelude::*;
use world::World;

const BACKENDS: [&str; 4] = ["all_reduce", "gather", "batched", "all_to_all"];

fn worlds() -> impl Strategy<Value = World> {
    let groups = prop::sample::select(vec![(1usize, 1usize), (2, 1), (4, 1), (1, 2), (1, 3), (2, 2), (2, 3)]);
    let placement = prop::sample::select(ExpertPlacement::ALL.to_vec());
    (groups, 1usize..5, 1usize..4, 3usize..9, placement).prop_flat_map(
        |((tp, dp), hidden, top_k, experts, placement)| {
            let tokens = prop::collection::vec(prop_oneof![1 => Just(0usize), 3 => 1usize..8], dp);
            tokens.prop_flat_map(move |tokens| {
                let problems: Vec<_> = tokens.iter().map(|&t| problem(t, hidden, top_k, experts)).collect();
                let on_input = false;
                problems.prop_map(move |problems| World { tp, placement, problems, on_input })
            })
        },
    )
}

/// Tokens with distinct experts, some of them absent; or all with the same one or two, so that they go to one
/// rank and name an expert more than once, as recordings may.
fn problem(tokens: usize, hidden: usize, top_k: usize, experts: usize) -> impl Strategy<Value = Problem> {
    let all: Vec<u32> = (0..experts as u32).collect();
    let token = Just(all).prop_shuffle().prop_flat_map(move |ids| {
        prop::collection::vec(prop::bool::weighted(0.1), top_k).prop_map(move |absent| {
            let slot = |(id, absent): (&u32, &bool)| if *absent { NO_EXPERT } else { *id };
            ids.iter().zip(&absent).map(slot).collect::<Vec<u32>>()
        })
    });
    let crowded = prop::collection::vec(0..2u32, top_k);
    let token = prop_oneof![3 => token, 1 => crowded];
    (
        prop::collection::vec(-4f32..4., tokens * hidden),
        prop::collection::vec(token, tokens),
        prop::collection::vec(-1f32..1.5, tokens * top_k),
    )
        .prop_map(move |(rows, ids, weights)| Problem {
            tokens,
            hidden,
            top_k,
            rows,
            ids: ids.concat(),
            weights,
            map: (0..experts as i32).collect(),
            num_local: experts,
        })
}

fn backend(world: &World, name: &str, ep: Arc<dyn Communicator>) -> Result<Box<dyn PrepareFinalize>> {
    let rank = ep.rank();
    let layout = world.layout(rank);
    let tp = ep.split(rank / world.tp, rank % world.tp, &mut Exec::cpu())?;
    let ranks = EpRanks::new(&layout, ep.clone(), tp)?.on(&Device::Cpu)?;
    Ok(match name {
        "all_reduce" => {
            let experts = match &layout.expert_map {
                Some(map) => LocalExperts::from_map(map, layout.num_local_experts())?,
                None => LocalExperts::all(layout.num_experts()),
            };
            Box::new(SumAllReduce::of_whole_experts(experts, ep))
        }
        "gather" => Box::new(SumGather::standard(ranks)),
        "batched" => Box::new(SumGather::batched(ranks, world.max_tokens())),
        _ => Box::new(SumAllToAll::new(ranks)),
    })
}

/// What experts that reduce by themselves return for the rows that arrived, [T', H].
fn reduced(d: &Dispatched, slots: &[f32], ex: &mut Exec) -> Result<Vec<f32>> {
    let dims = d.expert_out_dims()?;
    let mut ids = ex.scratch(DType::U32, &dims[..2])?;
    match d.expert_map {
        Some(map) => mask_nonlocal_into(d.topk_ids()?, map, ids.view_mut(), ex)?,
        None => ids.view_mut().cpu_mut::<u32>()?.copy_from_slice(d.topk_ids()?.cpu()?),
    }
    let mut out = vec![f32::NAN; dims[0] * dims[2]];
    let to = ViewMut::new(&mut out, &[dims[0], dims[2]])?;
    weighted_sum_into(View::new(slots, &dims)?, ids.view(), d.topk_weights()?, to, ex)?;
    Ok(out)
}

/// What rank `rank` gets for its tokens.
fn run(
    world: &World,
    b: &dyn PrepareFinalize,
    rank: usize,
    reduces: bool,
    agreed: Option<&[usize]>,
    ex: &mut Exec,
) -> Result<Vec<f32>> {
    let p = &world.problems[rank / world.tp];
    let local = world.layout(rank).local_experts;
    let mut out = vec![f32::NAN; p.rows.len()];
    let (hidden, ids) =
        (View::new(&p.rows, &[p.tokens, p.hidden])?, View::new(&p.ids, &[p.tokens, p.top_k])?);
    let d = b.prepare(hidden, ids, View::new(&p.weights, &[p.tokens, p.top_k])?, agreed, ex)?;
    let slots = run_named_experts::<f32>(&d, |slot| local[slot] as usize)?;
    let mut to = ViewMut::new(&mut out, &[p.tokens, p.hidden])?;
    if !reduces {
        b.finalize(View::new(&slots, &d.expert_out_dims()?)?, &d, WeightAndReduce::Delegate, to, ex)?;
        return Ok(out);
    }
    let sums = reduced(&d, &slots, ex)?;
    if b.finalize_copies_reduced() {
        // As a layer does it: the experts write the output themselves.
        to.cpu_mut::<f32>()?.copy_from_slice(&sums);
        b.complete_reduced(to, ex)?;
    } else {
        let sums = View::new(&sums, &[d.rows.view().rows(), p.hidden])?;
        b.finalize(sums, &d, WeightAndReduce::NoOp, to, ex)?;
    }
    Ok(out)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn sums_of_all_ranks_are_the_layer(world in worlds(), agreed: bool, reduces: bool) {
        for name in BACKENDS {
            if name == "all_reduce" && world.problems.len() > 1 {
                continue;
            }
            let results = run_ranks(world.ranks(), |rank, comm| {
                let backend = backend(&world, name, Arc::new(comm))?;
                assert!(backend.adds_partial_sums() && backend.output_is_reduced());
                let mut ex = Exec::cpu();
                let tokens = (0..world.ranks()).map(|r| world.problems[r / world.tp].tokens);
                let tokens: Option<Vec<usize>> = agreed.then(|| tokens.collect());
                let tokens = tokens.as_deref();
                let first = run(&world, backend.as_ref(), rank, reduces, tokens, &mut ex)?;
                // Nothing of a call stays behind.
                let again = run(&world, backend.as_ref(), rank, reduces, tokens, &mut ex)?;
                assert_eq!(common::bits(&first), common::bits(&again));
                Ok(first)
            });
            for (rank, got) in results.into_iter().enumerate() {
                let (got, want) = (got.unwrap(), world.problems[rank / world.tp].definition::<f32>());
                let close = got.iter().zip(&want).all(|(a, b)| (a - b).abs() < 1e-3);
                prop_assert!(close && got.len() == want.len(), "{name} on rank {rank}: {got:?}, expected {want:?}");
            }
        }
    }
}

/// Only rows that a rank's experts need go there, each once.
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
        let placement = ExpertPlacement::Linear;
        let world = World { tp, placement, problems: vec![p.clone(); groups], on_input: false };
        let arrived = run_ranks(2, |_, comm| {
            let backend = backend(&world, "all_to_all", Arc::new(comm))?;
            let (ids, weights) = (View::new(&p.ids, &[4, 3])?, View::new(&p.weights, &[4, 3])?);
            let d = backend.prepare(View::new(&p.rows, &[4, 1])?, ids, weights, None, &mut Exec::cpu())?;
            Ok(d.rows.view().rows())
        });
        // Experts 0 and 1: tokens 0 and 1; experts 2 and 3: tokens 1, 2 and 3.
        assert_eq!(arrived.into_iter().map(Result::unwrap).collect::<Vec<_>>(), want, "tp {tp}");
    }
}
