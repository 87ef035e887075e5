//! Faults in each collective of each backend cause an error on every rank in bounded time.

mod common;
#[path = "common/saboteur.rs"]
mod saboteur;
#[path = "common/world.rs"]
mod world;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::Problem;
use moe_comm::{Collectives, ExpertPlacement, run_ranks_with};
use moe_dispatch::candle::{Error, Result};
use moe_dispatch::{
    EpRanks, Exec, ExpertLayout, NoEp, OverRanks, PrepareFinalize, ThreadComm, View, WeightAndReduce, WhoAdds,
};
use saboteur::{Fault, Saboteur};
use world::{BACKENDS, BOTH, DISABLED, World};

/// Far below every timeout of the tests, and far above the delays of a busy machine.
const SOON: Duration = Duration::from_secs(10);
const TIMEOUT: Duration = Duration::from_millis(250);

/// All backends over several ranks.
fn backends() -> impl Iterator<Item = (&'static str, WhoAdds)> {
    BACKENDS.into_iter().chain([DISABLED]).flat_map(|name| BOTH.map(|who| (name, who)))
}

/// Whether the ranks have the same tokens.
fn is_replicated(name: &str) -> bool {
    name == "local_allreduce" || name == DISABLED
}

fn world(tp: usize, groups: usize) -> World {
    let problem = |tokens: usize| {
        let ids = (0..tokens as u32 * 2).map(|i| i % 6).collect();
        Problem { ids, ..Problem::ones(tokens, 3, 2, 6) }
    };
    let problems = (0..groups).map(|g| problem(5 + g)).collect();
    World { tp, placement: ExpertPlacement::RoundRobin, problems, on_input: false }
}

fn text(e: &Error) -> String {
    match e {
        Error::WithBacktrace { inner, .. } => text(inner),
        e => e.to_string(),
    }
}

/// Runs a call on every rank, with a fault in collective number `at` of rank 1. Returns the ranks' errors, or `None` if
/// there are fewer collectives.
fn errors(world: &World, (name, who): (&str, WhoAdds), fault: Fault, at: usize) -> Option<Vec<String>> {
    let start = Instant::now();
    let timeout = if fault == Fault::Stall { TIMEOUT } else { SOON * 6 };
    let comms = ThreadComm::world_with_timeout(world.ranks(), timeout);
    let results = run_ranks_with(comms, |rank, comm| {
        let comm: Arc<dyn moe_dispatch::Communicator> = match rank {
            1 => Arc::new(Saboteur::new(Arc::new(comm), fault, at)),
            _ => Arc::new(comm),
        };
        let backend = world.backend(name, who, comm.clone())?;
        match name {
            DISABLED => world.run_disabled(rank, &backend, &mut Exec::cpu())?,
            _ => world.run(&backend, rank, false, None, &mut Exec::cpu())?,
        };
        // Ranks that finished their part before the fault learn of it at this barrier.
        comm.barrier(&mut Exec::cpu())
    });
    assert!(start.elapsed() < SOON, "{name} {fault:?} {at}: took {:?}", start.elapsed());
    if results.iter().all(Result::is_ok) {
        return None;
    }
    Some(results.iter().map(|r| r.as_ref().err().map_or("no error".to_string(), text)).collect())
}

#[test]
fn a_fault_in_any_collective_is_an_error_on_every_rank() {
    for (name, who) in backends() {
        let world = if is_replicated(name) { world(4, 1) } else { world(2, 2) };
        for (fault, cause) in [
            (Fault::Panic, "rank 1 panicked: sabotaged"),
            (Fault::Error, "rank 1 failed: sabotaged"),
            (Fault::Other, "ranks disagree about the collective"),
            (Fault::Stall, "stalled: others waited for"),
        ] {
            // With expert parallelism the first collective is the split into groups.
            let mut at = 0;
            while let Some(errors) = errors(&world, (name, who), fault, at) {
                for (rank, error) in errors.iter().enumerate() {
                    let own = rank == 1 && error.contains("sabotaged");
                    assert!(
                        own || error.contains(cause),
                        "{name} {who:?} {fault:?} {at}, rank {rank}: {error}"
                    );
                }
                at += 1;
            }
            assert!(at > 1, "{name}: only {at} collectives were reached");
        }
    }
}

#[test]
fn ranks_that_disagree_on_shapes_all_fail() {
    for (name, who) in backends() {
        let mut world = if is_replicated(name) { world(2, 1) } else { world(1, 2) };
        let wide =
            Problem { hidden: 4, rows: vec![1.; world.problems[0].tokens * 4], ..world.problems[0].clone() };
        let odd = World { problems: vec![wide; world.problems.len()], ..world.clone() };
        world.problems[0].tokens = world.problems[0].rows.len() / 3;
        let comms = ThreadComm::world_with_timeout(2, SOON);
        let results = run_ranks_with(comms, |rank, comm| {
            let world = if rank == 1 { &odd } else { &world };
            let backend = world.backend(name, who, Arc::new(comm))?;
            match name {
                DISABLED => world.run_disabled(rank, &backend, &mut Exec::cpu()),
                _ => world.run(&backend, rank, false, None, &mut Exec::cpu()),
            }
        });
        for result in results {
            let e = text(&result.unwrap_err());
            assert!(e.contains("ranks disagree about the dims"), "{name} {who:?}: {e}");
        }
    }
}

/// Mistakes that one rank can find by itself are errors before any rank waits for it.
#[test]
fn wrong_calls_are_refused() -> Result<()> {
    let comm = || -> Arc<dyn moe_dispatch::Communicator> { Arc::new(moe_comm::SelfComm::new()) };
    let layout = ExpertLayout::new(2, 1, 0, ExpertPlacement::Linear).unwrap();
    let ranks = || EpRanks::new(&layout, comm(), comm());
    let by_slot = WhoAdds::BySlot;
    let backend = OverRanks::high_throughput(ranks()?, by_slot);
    let ex = &mut Exec::cpu();
    let p = Problem { ids: vec![0, 1], ..Problem::ones(2, 2, 1, 2) };
    let unknown = Problem { ids: vec![0, 2], ..p.clone() };
    let prepare = |backend: &OverRanks, p: &Problem, agreed: Option<&[usize]>| {
        text(&backend.prepare(p.inputs().unwrap(), agreed, &mut Exec::cpu()).unwrap_err())
    };
    let small = OverRanks::low_latency(ranks()?, 1, by_slot);
    let gather = OverRanks::allgather_reducescatter(ranks()?, by_slot);
    for (got, want) in [
        (
            prepare(&backend, &unknown, None),
            "deepep high_throughput: expert id 2 is out of range; expected 0..2",
        ),
        (prepare(&small, &p, None), "expected at most 1 tokens per rank, got 2"),
        (prepare(&gather, &p, Some(&[3])), "rank 0 of 1 brings 2 tokens, but the step agreed on [3]"),
    ] {
        assert!(got.contains(want), "{got}");
    }

    let d = backend.prepare(p.inputs()?, None, ex)?;
    let no_ep = NoEp::new();
    let plain = no_ep.prepare(p.inputs()?, None, ex)?;
    let other = OverRanks::low_latency(ranks()?, 4, by_slot);
    let finalize = |backend: &OverRanks, d, dims: &[usize], strategy| {
        let y = View::new(&[0f32; 4], dims)?;
        let result = p.output::<f32>(|out| backend.finalize(y, d, strategy, out, &mut Exec::cpu()));
        Ok::<_, Error>(text(&result.unwrap_err()))
    };
    use WeightAndReduce::{Delegate, NoOp};
    for (got, want) in [
        (finalize(&backend, &d, &[2, 1, 2], NoOp), "only a token's owner can weight them"),
        (finalize(&backend, &d, &[2, 2], Delegate), "expected expert_out with dims [2, 1, 2], got [2, 2]"),
        (finalize(&other, &d, &[2, 1, 2], Delegate), "were prepared by deepep high_throughput"),
        (finalize(&backend, &plain, &[2, 1, 2], Delegate), "expected rows that carry a"),
    ] {
        let got = got?;
        assert!(got.contains(want), "{got}");
    }
    Ok(())
}

#[test]
fn groups_that_do_not_fit_are_refused() {
    let one = || -> Arc<dyn moe_dispatch::Communicator> { Arc::new(moe_comm::SelfComm::new()) };
    let two = || -> Arc<dyn moe_dispatch::Communicator> { Arc::new(ThreadComm::world(2).remove(1)) };
    let layout = |ep, rank| ExpertLayout::new(4, ep, rank, ExpertPlacement::Linear).unwrap();
    let refused = |layout: ExpertLayout, ep, tp| text(&EpRanks::new(&layout, ep, tp).unwrap_err());
    let e = refused(layout(1, 0), one(), two());
    assert!(e.contains("tensor-parallel rank 1 of 2 is no part of rank 0 of 1"), "{e}");
    for wrong in [layout(2, 0), layout(3, 1)] {
        let e = refused(wrong, two(), one());
        assert!(e.contains("is not that of rank 1 of 2"), "{e}");
    }
    let ranks = EpRanks::new(&layout(2, 1), two(), one()).unwrap();
    let e = text(&OverRanks::local_allreduce(ranks, WhoAdds::ByRank).unwrap_err());
    assert!(e.contains("expected one tensor-parallel group of all 2 ranks, got groups of 1"), "{e}");
}
