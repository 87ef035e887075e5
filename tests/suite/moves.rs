//! Experts that move while a model runs: no bit of a token changes, whatever moves or fails, also with the load
//! balancer of the engine.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use candle_core::DType;
use moe_comm::{Communicator, EpBackend, ExpertMap, ParallelConfig, ReplicaChoice, ThreadComm};
use moe_engine::engine::DpEngine;
use moe_engine::eplb::{EplbConfig, EplbPolicy};
use moe_engine::parallel::Replica;
use moe_layer::{ExpertPlacements, MoePath, MoveRound, MoveStatus};

use crate::geometries::{Case, Origin, Outcome, one_rank, outcome_with};
use crate::placements::{Numbers, expert_parallel, moe_of, random_layer};
use crate::saboteur::{Fault, Saboteur};

/// How long a rank waits for the others in one collective.
const PATIENCE: Duration = Duration::from_secs(60);

/// A fault in moves, and the rank that has it.
#[derive(Clone, Copy)]
struct Broken {
    rank: usize,
    fault: Fault,
}

/// A case over several ranks, one of which may break moves.
fn load(
    origin: &Origin,
    case: &Case,
    placements: &ExpertPlacements,
    broken: Option<Broken>,
    patience: Duration,
) -> Vec<Replica> {
    let ranks = case.parallel.world_size().unwrap();
    let world = ThreadComm::world_with_timeout(ranks, patience).into_iter().enumerate();
    let world = world.map(|(rank, comm)| -> Arc<dyn Communicator> {
        match broken.filter(|broken| broken.rank == rank) {
            Some(Broken { fault, .. }) => Arc::new(Saboteur::new(Arc::new(comm), fault)),
            None => Arc::new(comm),
        }
    });
    origin.load_over(case, placements, world.collect()).unwrap_or_else(|e| panic!("{case:?}: {e:#}"))
}

/// A round of a move without a time limit.
fn round(layer: usize, phy2log: &[u32], bytes: usize) -> MoveRound {
    MoveRound { layer, phy2log: phy2log.to_vec(), sole: Vec::new(), bytes, limit: Duration::MAX }
}

/// Other experts in the same slots: all are renumbered, so that every expert keeps a slot and no rank holds one twice.
fn renamed(map: &ExpertMap, numbers: &mut Numbers) -> Vec<u32> {
    let mut names: Vec<u32> = (0..map.num_experts() as u32).collect();
    numbers.shuffle(&mut names);
    map.phy2log().iter().map(|&expert| names[expert as usize]).collect()
}

/// Random uneven places of a case's experts, which may be moved.
fn movable(origin: &Origin, case: &Case, numbers: &mut Numbers) -> (ExpertPlacements, usize) {
    let moe = moe_of(&origin.load(case).unwrap_or_else(|e| panic!("{case:?}: {e:#}")));
    let ranks = case.parallel.tp * case.parallel.dp;
    let redundant = numbers.below(2 * ranks);
    let layer = |_| random_layer(moe.num_experts, redundant, ranks, numbers);
    let table: Vec<_> = (0..moe.layers.len()).map(layer).collect();
    let replicas = ReplicaChoice::ALL[ranks % 3];
    let placements = ExpertPlacements {
        table: Some(table.into()),
        replicas,
        movable: true,
        ..ExpertPlacements::default()
    };
    (placements, moe.layers.len())
}

/// Runs a case while all layers' experts move before every step. Returns the number of moves, and how many were rolled
/// back.
fn run_moving(case: &Case, numbers: &mut Numbers, broken: Option<Broken>) -> anyhow::Result<[usize; 2]> {
    let want = one_rank(case);
    let origin = Origin::open(case.model);
    let (placements, layers) = movable(&origin, case, numbers);
    let replicas = load(&origin, case, &placements, broken, PATIENCE);
    let mut seen = [0; 2];
    let shift = |engine: &mut DpEngine<'_>| {
        for layer in 0..layers {
            let before = engine.expert_map(layer).unwrap();
            let target = renamed(&before, numbers);
            // The limit of bytes lets a round move a part of an expert, some experts, or all of them.
            let bytes = [3000, 50_000, usize::MAX][numbers.below(3)];
            let status = engine.move_experts(&round(layer, &target, bytes))?;
            let after = engine.expert_map(layer).unwrap();
            match status {
                MoveStatus::Moved => assert_eq!(after.phy2log(), target),
                MoveStatus::RolledBack(faults) => {
                    seen[1] += 1;
                    assert_eq!(after, before);
                    let rank = broken.unwrap().rank;
                    let named =
                        |f: &String| f.contains(&format!("of rank {rank} from")) && f.contains("checksum");
                    assert!(faults.iter().all(named), "{faults:?}");
                }
                MoveStatus::Underway => panic!("a move that never ends"),
            }
            seen[0] += 1;
        }
        Ok(())
    };
    let got = outcome_with(&replicas, case.parallel.dp > 1, None, shift)?;
    same(case, &got, &want);
    Ok(seen)
}

fn same(case: &Case, got: &Outcome, want: &Outcome) {
    assert!(got.1 == want.1, "{case:?}: other logits");
    assert!(got.0 == want.0, "{case:?}: other results");
}

#[test]
fn experts_that_move_before_every_step_change_no_bit() {
    let mut numbers = Numbers(11);
    let mut seen = BTreeMap::new();
    let qwen = ["base", "packed", "embedded", "quant-awq", "quant-compressed-fp8", "quant-auto-round"];
    let deepseek =
        ["deepseek-v2", "deepseek-packed-hub", "deepseek-quant-gptq-int4", "deepseek-quant-fp8-block"];
    for (i, parallel) in expert_parallel().into_iter().enumerate() {
        let dtype = if i % 2 == 0 { DType::F32 } else { DType::BF16 };
        let path = Some(if i % 4 < 2 { MoePath::Fused } else { MoePath::Legacy });
        let chunk = [None, Some(1), Some(7)][i % 3];
        let case = |model: &'static str| Case { chunk, ..Case::new(model, dtype, parallel) };
        if let Some(case) = first_that_loads(&qwen, i, case) {
            let moves = run_moving(&case, &mut numbers, None);
            assert!(moves.unwrap_or_else(|e| panic!("{case:?}: {e:#}"))[0] > 1);
            *seen.entry(case.model).or_insert(0) += 1;
        }
        let case = |model: &'static str| Case { chunk, path, ..Case::new(model, dtype, parallel) };
        if let Some(case) = first_that_loads(&deepseek, i, case) {
            let moves = run_moving(&case, &mut numbers, None);
            assert!(moves.unwrap_or_else(|e| panic!("{case:?}: {e:#}"))[0] > 1);
            *seen.entry(case.model).or_insert(0) += 1;
        }
    }
    assert!(seen.len() == qwen.len() + deepseek.len(), "{seen:?}");
}

/// The first model, from number `turn` on, that this case's geometry can cut.
fn first_that_loads(
    models: &[&'static str],
    turn: usize,
    case: impl Fn(&'static str) -> Case,
) -> Option<Case> {
    let turned = models.iter().cycle().skip(turn % models.len()).take(models.len());
    turned.map(|model| case(model)).find(|case| Origin::open(case.model).load(case).is_ok())
}

#[test]
fn experts_with_an_order_of_columns_cannot_move() {
    let parallel = ParallelConfig { dp: 2, enable_expert_parallel: true, ..ParallelConfig::default() };
    let case = Case::new("quant-gptq-int4-act-order", DType::BF16, parallel);
    let origin = Origin::open(case.model);
    let (placements, _) = movable(&origin, &case, &mut Numbers(5));
    let world = ThreadComm::world_with_timeout(2, PATIENCE).into_iter();
    let world = world.map(|comm| -> Arc<dyn Communicator> { Arc::new(comm) });
    let error = origin.load_over(&case, &placements, world.collect()).err().unwrap();
    let text = format!("{error:#}");
    assert!(text.contains("act-order") && text.contains("cannot move"), "{text}");
}

fn four(tp: usize, backend: EpBackend) -> ParallelConfig {
    let base = ParallelConfig { tp, dp: 4 / tp, enable_expert_parallel: true, ..ParallelConfig::default() };
    ParallelConfig { backend: backend.into(), ..base }
}

/// Two ranks that lead a group and two that follow; and one group of all ranks.
fn geometries() -> [ParallelConfig; 2] {
    [four(2, EpBackend::DeepEp), four(4, EpBackend::LocalAllreduce)]
}

#[test]
fn a_corrupt_transfer_is_found_rolled_back_and_named() {
    for parallel in geometries() {
        for rank in 0..4 {
            let case = Case::new("base", DType::BF16, parallel);
            let broken = Some(Broken { rank, fault: Fault::Corrupt });
            let [moves, back] = run_moving(&case, &mut Numbers(3), broken).unwrap();
            assert!(back > 0 && back <= moves, "{back} of {moves}");
        }
    }
}

#[test]
fn a_rank_that_dies_in_any_phase_of_a_move_ends_the_run_by_name_and_a_rerun_completes() {
    for fault in [Fault::DieSending, Fault::DieVoting, Fault::DieWriting] {
        for parallel in geometries() {
            // The first rank of the only group runs on this thread.
            for rank in usize::from(parallel.dp == 1)..3 {
                let case = Case::new("base", DType::F32, parallel);
                let broken = Some(Broken { rank, fault });
                let start = Instant::now();
                let error = run_moving(&case, &mut Numbers(5), broken).unwrap_err();
                let text = format!("{error:#}");
                assert!(
                    text.contains(&format!("rank {rank}")) && text.contains("panicked"),
                    "{fault:?} {rank}: {text}"
                );
                assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
            }
            let moves = run_moving(&Case::new("base", DType::F32, parallel), &mut Numbers(5), None);
            assert!(moves.unwrap()[0] > 0);
        }
    }
}

#[test]
fn what_cannot_move_is_refused_and_nothing_changes() {
    let parallel = four(2, EpBackend::DeepEp);
    let case = Case::new("base", DType::F32, parallel);
    let want = one_rank(&case);
    let origin = Origin::open("base");
    let (placements, layers) = movable(&origin, &case, &mut Numbers(1));
    let replicas = origin.load_placed(&case, &placements).unwrap();
    let got = outcome_with(&replicas, true, None, |engine| {
        let map = engine.expert_map(0).unwrap();
        let mut twice = map.phy2log().to_vec();
        twice.pop();
        let refused = |e: moe_engine::Result<MoveStatus>| format!("{:#}", e.unwrap_err());
        let text = refused(engine.move_experts(&round(0, &twice, 1)));
        assert!(text.contains("layer 0") && text.contains("expected the experts of"), "{text}");
        let none = engine.move_experts(&round(layers, map.phy2log(), 1));
        assert!(refused(none).contains("no map places its experts"));
        Ok(())
    });
    same(&case, &got.unwrap(), &want);
    // These experts were not loaded to be moved.
    let fixed = ExpertPlacements { movable: false, ..placements };
    let replicas = origin.load_placed(&case, &fixed).unwrap();
    let error = outcome_with(&replicas, true, None, |engine| {
        let target = renamed(&engine.expert_map(0).unwrap(), &mut Numbers(2));
        engine.move_experts(&round(0, &target, 1))?;
        Ok(())
    });
    assert!(format!("{:#}", error.unwrap_err()).contains("`eplb`"));
}

/// A balancer that moves as many experts as it can, as often as it can.
fn often(policy: EplbPolicy) -> EplbConfig {
    EplbConfig {
        window: 4,
        interval: 1,
        plan_steps: 1,
        policy,
        bytes_per_step: 20_000,
        min_gain: 0.0,
        must_pay: false,
        ..EplbConfig::default()
    }
}

#[test]
fn the_balancer_moves_experts_and_changes_no_bit() {
    let mut moved = 0;
    let mut rolled_back = 0;
    for (i, policy) in EplbPolicy::ALL.into_iter().enumerate() {
        let parallel = geometries()[i % 2];
        let case = Case::new(["base", "packed"][i / 2], DType::BF16, parallel);
        let want = one_rank(&case);
        let origin = Origin::open(case.model);
        let experts = moe_of(&origin.load(&case).unwrap()).num_experts;
        let num_redundant_experts = (experts + 1).next_multiple_of(4) - experts;
        let placements =
            ExpertPlacements { num_redundant_experts, movable: true, ..ExpertPlacements::default() };
        let config = often(policy);
        for corrupt in [false, true] {
            let broken = corrupt.then_some(Broken { rank: 3, fault: Fault::Corrupt });
            let replicas = load(&origin, &case, &placements, broken, PATIENCE);
            let mut stats = None;
            let got = outcome_with(&replicas, parallel.dp > 1, Some(config.clone()), |engine| {
                // The planner gets the time of a step.
                std::thread::sleep(Duration::from_millis(20));
                stats = engine.eplb_stats();
                Ok(())
            });
            same(&case, &got.unwrap(), &want);
            let stats = stats.unwrap();
            assert!(stats.steps > 2 && stats.static_par() > 0.99, "{stats:?}");
            assert!(corrupt || stats.rolled_back == 0, "{stats:?}");
            moved += if corrupt { 0 } else { stats.layers };
            rolled_back += stats.rolled_back;
        }
    }
    assert!(moved >= 2 && rolled_back > 0, "{moved} {rolled_back}");
}

/// A rank is late once. Data that comes too late is dropped on all ranks, and the next move is in time.
#[test]
fn experts_that_arrive_too_late_stay_where_they_were() {
    let limit = Duration::from_secs(1);
    for (rank, parallel) in [(0, geometries()[0]), (3, geometries()[1])] {
        let case = Case::new("base", DType::F32, parallel);
        let want = one_rank(&case);
        let origin = Origin::open("base");
        let mut numbers = Numbers(7);
        let late = Fault::Late(2 * limit);
        let (placements, _) = movable(&origin, &case, &mut numbers);
        let replicas = load(&origin, &case, &placements, Some(Broken { rank, fault: late }), PATIENCE);
        let mut seen = Vec::new();
        let got = outcome_with(&replicas, parallel.dp > 1, None, |engine| {
            let before = engine.expert_map(0).unwrap();
            let target = renamed(&before, &mut numbers);
            // There are several rounds, the first of which is late.
            let limit = if seen.is_empty() { limit } else { Duration::MAX };
            let status = engine.move_experts(&MoveRound { limit, ..round(0, &target, 20_000) })?;
            let after = engine.expert_map(0).unwrap();
            assert_eq!(
                after.phy2log(),
                if status == MoveStatus::Moved { &target[..] } else { before.phy2log() }
            );
            seen.push(status);
            Ok(())
        });
        same(&case, &got.unwrap(), &want);
        let MoveStatus::RolledBack(faults) = seen.remove(0) else { panic!("in time") };
        // Every rank has waited.
        let waited = |rank: usize| {
            let named = format!("layer 0: rank {rank} has waited");
            faults.iter().any(|f| f.contains(&named) && f.contains("longer than 1s"))
        };
        assert!((0..4).all(waited), "{faults:?}");
        assert!(seen.len() > 1 && seen.iter().all(|status| *status == MoveStatus::Moved));
    }
}

/// A rank that never arrives ends the run with an error that names it, as in any collective; no move waits until its
/// own limit.
#[test]
fn a_rank_that_hangs_in_a_move_ends_the_run_by_name() {
    for parallel in geometries() {
        let case = Case::new("base", DType::F32, parallel);
        let origin = Origin::open("base");
        let (placements, _) = movable(&origin, &case, &mut Numbers(9));
        let broken = Some(Broken { rank: 2, fault: Fault::Hang });
        let replicas = load(&origin, &case, &placements, broken, Duration::from_secs(3));
        let start = Instant::now();
        let error = outcome_with(&replicas, parallel.dp > 1, None, |engine| {
            let target = renamed(&engine.expert_map(0).unwrap(), &mut Numbers(2));
            engine.move_experts(&round(0, &target, usize::MAX))?;
            Ok(())
        });
        let text = format!("{:#}", error.unwrap_err());
        assert!(text.contains("rank 2") && text.contains("stalled"), "{text}");
        assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    }
}

/// A report that is made after the error still contains the counters of balancing.
#[test]
fn counters_of_balancing_outlive_a_move_that_ends_the_run() {
    let case = Case::new("base", DType::BF16, geometries()[0]);
    let origin = Origin::open("base");
    let experts = moe_of(&origin.load(&case).unwrap()).num_experts;
    let num_redundant_experts = (experts + 1).next_multiple_of(4) - experts;
    let placements = ExpertPlacements { num_redundant_experts, movable: true, ..ExpertPlacements::default() };
    let broken = Some(Broken { rank: 3, fault: Fault::DieSending });
    let replicas = load(&origin, &case, &placements, broken, PATIENCE);
    let mut stats = None;
    let error = outcome_with(&replicas, true, Some(often(EplbPolicy::Joint)), |engine| {
        loop {
            std::thread::sleep(Duration::from_millis(20));
            if let Err(e) = engine.step() {
                stats = engine.eplb_stats();
                return Err(e.into());
            }
            assert!(!engine.is_idle(), "nothing moves");
        }
    });
    assert!(format!("{:#}", error.unwrap_err()).contains("moving experts"));
    assert!(stats.unwrap().steps > 0);
}

#[test]
fn the_balancer_rolls_back_what_takes_longer_than_its_limit() {
    let case = Case::new("base", DType::BF16, geometries()[0]);
    let origin = Origin::open("base");
    let want = one_rank(&case);
    let experts = moe_of(&origin.load(&case).unwrap()).num_experts;
    let num_redundant_experts = (experts + 1).next_multiple_of(4) - experts;
    let placements = ExpertPlacements { num_redundant_experts, movable: true, ..ExpertPlacements::default() };
    // No move is as fast as this limit.
    let config = EplbConfig { move_timeout: Duration::from_nanos(1), ..often(EplbPolicy::Joint) };
    let replicas = origin.load_placed(&case, &placements).unwrap();
    let mut stats = None;
    let got = outcome_with(&replicas, true, Some(config), |engine| {
        std::thread::sleep(Duration::from_millis(20));
        stats = engine.eplb_stats();
        Ok(())
    });
    same(&case, &got.unwrap(), &want);
    let stats = stats.unwrap();
    assert!(stats.rolled_back > 0 && stats.layers == 0, "{stats:?}");
}
