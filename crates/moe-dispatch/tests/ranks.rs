//! The contract over several ranks: a backend that sends rows between threads gives each owner the bits of one rank,
//! with uneven and empty ranks, and with several calls in progress.

mod common;
#[path = "common/mesh.rs"]
mod mesh;

use common::{Problem, bits, expert, run_named_experts};
use mesh::{HighThroughput, Mesh, Peer, Placement};
use moe_dispatch::candle::Result;
use moe_dispatch::{Exec, NO_EXPERT, NoEp, PrepareFinalize, Tokens, View, ViewMut, WeightAndReduce};
use proptest::prelude::*;

/// The tokens of every rank, and the rank that holds each expert.
fn worlds() -> impl Strategy<Value = (Vec<Problem>, Placement)> {
    (1usize..4, 1usize..5, 1usize..4, 1usize..7).prop_flat_map(|(ranks, hidden, top_k, physical)| {
        let owners = prop_oneof![
            4 => proptest::collection::vec(0..ranks, physical),
            1 => (0..ranks).prop_map(move |rank| vec![rank; physical]),
        ];
        let tokens = proptest::collection::vec(prop_oneof![1 => Just(0usize), 3 => 1usize..6], ranks);
        (tokens, owners).prop_flat_map(move |(tokens, owners)| {
            let mut next = vec![0; ranks];
            let place = |&rank: &usize| {
                next[rank] += 1;
                (rank, next[rank] - 1)
            };
            let placement = Placement(owners.iter().map(place).collect());
            let problems: Vec<_> = tokens.iter().map(|&t| problem(t, hidden, top_k, physical)).collect();
            (problems, Just(placement))
        })
    })
}

fn problem(tokens: usize, hidden: usize, top_k: usize, physical: usize) -> impl Strategy<Value = Problem> {
    let id = prop_oneof![6 => 0..physical as u32, 1 => Just(NO_EXPERT)];
    (
        proptest::collection::vec(-4f32..4., tokens * hidden),
        proptest::collection::vec(id, tokens * top_k),
        proptest::collection::vec(-1f32..1.5, tokens * top_k),
    )
        .prop_map(move |(rows, ids, weights)| Problem {
            tokens,
            hidden,
            top_k,
            rows,
            ids,
            weights,
            map: (0..physical as i32).collect(),
            num_local: physical,
        })
}

/// One rank's step: its tokens in two calls. The second call is prepared before the first is finalized.
fn two_calls_in_flight(
    backend: &dyn PrepareFinalize,
    p: &Problem,
    placement: &Placement,
    rank: usize,
) -> Result<Vec<f32>> {
    let name = |local| placement.0.iter().position(|&at| at == (rank, local)).unwrap_or(usize::MAX);
    let ex = &mut Exec::cpu();
    let mut out = vec![f32::NAN; p.rows.len()];
    let hidden = View::new(&p.rows, &[p.tokens, p.hidden])?;
    let ids = View::new(&p.ids, &[p.tokens, p.top_k])?;
    let weights = View::new(&p.weights, &[p.tokens, p.top_k])?;
    let first = p.tokens / 3;
    let rest = p.tokens - p.tokens / 3;
    let (out_a, out_b) = ViewMut::new(&mut out, &[p.tokens, p.hidden])?.split_at(first)?;
    let mut prepare = |start, n| {
        let ids = ids.narrow(start, n)?;
        let weights = weights.narrow(start, n)?;
        backend.prepare(Tokens::new(hidden.narrow(start, n)?, ids, weights), None, ex)
    };
    let a = prepare(0, first)?;
    let b = prepare(first, rest)?;
    let ya = run_named_experts::<f32>(&a, name)?;
    let yb = run_named_experts::<f32>(&b, name)?;
    let ya = View::new(&ya, &a.expert_out_dims()?)?;
    let yb = View::new(&yb, &b.expert_out_dims()?)?;
    let strategy = WeightAndReduce::Delegate;
    backend.finalize(ya, &a, strategy, out_a, ex)?;
    backend.finalize(yb, &b, strategy, out_b, ex)?;
    Ok(out)
}

fn check(problems: &[Problem], placement: &Placement) {
    let meshes = Mesh::connect(problems.len());
    std::thread::scope(|scope| {
        let threads: Vec<_> = meshes
            .into_iter()
            .enumerate()
            .map(|(rank, mesh)| {
                scope.spawn(move || -> Result<()> {
                    let p = &problems[rank];
                    let backend = HighThroughput(Peer::new(placement, rank, mesh)?);
                    let want = bits(&p.run::<f32>(&NoEp::new(), &mut Exec::cpu())?);
                    for _ in 0..2 {
                        let got = two_calls_in_flight(&backend, p, placement, rank)?;
                        assert_eq!(bits(&got), want, "{}, rank {rank}", backend.name());
                    }
                    Ok(())
                })
            })
            .collect();
        for thread in threads {
            match thread.join() {
                Ok(result) => result.unwrap_or_else(|e| panic!("{e}")),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]
    #[test]
    fn an_all_to_all_gives_the_bits_of_one_rank((problems, placement) in worlds()) {
        check(&problems, &placement);
    }
}

#[test]
fn a_foreign_handle_is_refused() -> Result<()> {
    let placement = Placement(vec![(0, 0)]);
    let peers = || -> Result<Peer> { Peer::new(&placement, 0, Mesh::connect(1).remove(0)) };
    let rows = [1f32, 2.];
    let ids = [0u32];
    let weights = [1f32];
    let ids = View::new(&ids, &[1, 1])?;
    let weights = View::new(&weights, &[1, 1])?;
    let hidden = View::new(&rows, &[1, 2])?;
    let ex = &mut Exec::cpu();
    let throughput = HighThroughput(peers()?);
    let d = NoEp::new();
    let d = d.prepare(Tokens::new(hidden, ids, weights), None, ex)?;
    let y = expert(0, &rows);
    let mut out = [0f32; 2];
    let y = View::new(&y, &[1, 1, 2])?;
    let out = ViewMut::new(&mut out, &[1, 2])?;
    let e = throughput.finalize(y, &d, WeightAndReduce::Delegate, out, ex).unwrap_err().to_string();
    assert!(e.contains("HighThroughput: expected rows that carry a"), "{e}");
    Ok(())
}
