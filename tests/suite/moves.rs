//! Experts that move while a model runs: no bit of a token changes, whatever moves, whatever breaks, and with the load
//! balancer of the engine.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use candle_core::DType;
use model_deepseekv2_legacy::DeepseekV2Family;
use model_qwen3moe::Qwen3MoeFamily;
use moe_comm::{EpBackend, ExpertMap, ParallelConfig, ReplicaChoice};
use moe_engine::ModelFamily;
use moe_engine::engine::DpEngine;
use moe_engine::eplb::{EplbConfig, EplbPolicy};
use moe_layer::{ExpertPlacements, FaultKind, MoePath, MoveFault, MoveStatus};

use crate::geometries::{Case, Origin, Outcome, one_rank, outcome_with};
use crate::placements::{Numbers, expert_parallel, moe_of, random_layer};

/// Other experts in the same slots: all renamed, so that every expert keeps a slot and none is twice on a rank.
fn renamed(map: &ExpertMap, numbers: &mut Numbers) -> Vec<u32> {
    let mut names: Vec<u32> = (0..map.num_experts() as u32).collect();
    numbers.shuffle(&mut names);
    map.phy2log().iter().map(|&expert| names[expert as usize]).collect()
}

/// Random uneven places of a case's experts, to be moved.
fn movable<F: ModelFamily>(
    origin: &Origin<F>,
    case: &Case,
    numbers: &mut Numbers,
) -> (ExpertPlacements, usize) {
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

/// Runs a case while all layers' experts move before every step; the moves and how many were rolled back.
fn run_moving<F: ModelFamily>(
    case: &Case,
    numbers: &mut Numbers,
    fault: Option<MoveFault>,
) -> anyhow::Result<[usize; 2]> {
    let (want, origin) = (one_rank::<F>(case), Origin::<F>::open(case.model));
    let (placements, layers) = movable(&origin, case, numbers);
    let replicas = origin.load_placed(case, &ExpertPlacements { fault, ..placements })?;
    let mut seen = [0; 2];
    let shift = |engine: &mut DpEngine<'_>| {
        for layer in 0..layers {
            let before = engine.expert_map(layer).unwrap();
            let target = renamed(&before, numbers);
            // From a part of an expert to everything at once.
            let bytes = [3000, 50_000, usize::MAX][numbers.below(3)];
            let status = engine.move_experts(layer, &target, bytes)?;
            let after = engine.expert_map(layer).unwrap();
            match status {
                MoveStatus::Moved => assert_eq!(after.phy2log(), target),
                MoveStatus::RolledBack(faults) => {
                    seen[1] += 1;
                    assert_eq!(after, before);
                    let rank = fault.unwrap().rank;
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
    let (mut numbers, mut seen) = (Numbers(11), BTreeMap::new());
    let qwen =
        ["base", "packed", "embedded", "quant-awq", "quant-compressed-fp8", "quant-gptq-int4-act-order"];
    let deepseek =
        ["deepseek-v2", "deepseek-packed-hub", "deepseek-quant-gptq-int4", "deepseek-quant-fp8-block"];
    for (i, parallel) in expert_parallel().into_iter().enumerate() {
        let dtype = if i % 2 == 0 { DType::F32 } else { DType::BF16 };
        let path = Some(if i % 4 < 2 { MoePath::Fused } else { MoePath::Legacy });
        let chunk = [None, Some(1), Some(7)][i % 3];
        let case = |model: &'static str| Case { chunk, ..Case::new(model, dtype, parallel) };
        if let Some(case) = first_that_loads::<Qwen3MoeFamily>(&qwen, i, case) {
            let moves = run_moving::<Qwen3MoeFamily>(&case, &mut numbers, None);
            assert!(moves.unwrap_or_else(|e| panic!("{case:?}: {e:#}"))[0] > 1);
            *seen.entry(case.model).or_insert(0) += 1;
        }
        let case = |model: &'static str| Case { chunk, path, ..Case::new(model, dtype, parallel) };
        if let Some(case) = first_that_loads::<DeepseekV2Family>(&deepseek, i, case) {
            let moves = run_moving::<DeepseekV2Family>(&case, &mut numbers, None);
            assert!(moves.unwrap_or_else(|e| panic!("{case:?}: {e:#}"))[0] > 1);
            *seen.entry(case.model).or_insert(0) += 1;
        }
    }
    assert!(seen.len() == qwen.len() + deepseek.len(), "{seen:?}");
}

/// The case of the first model, from `turn` on, that its geometry can cut.
fn first_that_loads<F: ModelFamily>(
    models: &[&'static str],
    turn: usize,
    case: impl Fn(&'static str) -> Case,
) -> Option<Case> {
    let turned = models.iter().cycle().skip(turn % models.len()).take(models.len());
    turned.map(|model| case(model)).find(|case| Origin::<F>::open(case.model).load(case).is_ok())
}

fn four(tp: usize, backend: EpBackend) -> ParallelConfig {
    let base = ParallelConfig { tp, dp: 4 / tp, enable_expert_parallel: true, ..ParallelConfig::default() };
    ParallelConfig { backend: backend.into(), ..base }
}

/// Two ranks that lead a group and two that follow; and one group of all.
fn geometries() -> [ParallelConfig; 2] {
    [four(2, EpBackend::DeepEp), four(4, EpBackend::LocalAllreduce)]
}

#[test]
fn a_corrupt_transfer_is_found_rolled_back_and_named() {
    for parallel in geometries() {
        for rank in 0..4 {
            let case = Case::new("base", DType::BF16, parallel);
            let fault = Some(MoveFault { rank, kind: FaultKind::Corrupt });
            let [moves, back] = run_moving::<Qwen3MoeFamily>(&case, &mut Numbers(3), fault).unwrap();
            assert!(back > 0 && back <= moves, "{back} of {moves}");
        }
    }
}

#[test]
fn a_rank_that_dies_in_any_phase_of_a_move_ends_the_run_by_name_and_a_rerun_completes() {
    for kind in [FaultKind::DieSending, FaultKind::DieVoting, FaultKind::DieWriting] {
        for parallel in geometries() {
            // The first rank of the only group runs on this thread.
            for rank in usize::from(parallel.dp == 1)..3 {
                let case = Case::new("base", DType::F32, parallel);
                let (fault, start) = (Some(MoveFault { rank, kind }), Instant::now());
                let error = run_moving::<Qwen3MoeFamily>(&case, &mut Numbers(5), fault).unwrap_err();
                let text = format!("{error:#}");
                assert!(
                    text.contains(&format!("rank {rank}")) && text.contains("panicked"),
                    "{kind:?} {rank}: {text}"
                );
                assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
            }
            let moves =
                run_moving::<Qwen3MoeFamily>(&Case::new("base", DType::F32, parallel), &mut Numbers(5), None);
            assert!(moves.unwrap()[0] > 0);
        }
    }
}

#[test]
fn what_cannot_move_is_refused_and_nothing_changes() {
    let parallel = four(2, EpBackend::DeepEp);
    let case = Case::new("base", DType::F32, parallel);
    let (want, origin) = (one_rank::<Qwen3MoeFamily>(&case), Origin::<Qwen3MoeFamily>::open("base"));
    let (placements, layers) = movable(&origin, &case, &mut Numbers(1));
    let replicas = origin.load_placed(&case, &placements).unwrap();
    let got = outcome_with(&replicas, true, None, |engine| {
        let map = engine.expert_map(0).unwrap();
        let mut twice = map.phy2log().to_vec();
        twice.pop();
        let refused = |e: anyhow::Result<MoveStatus>| format!("{:#}", e.unwrap_err());
        let text = refused(engine.move_experts(0, &twice, 1));
        assert!(text.contains("layer 0") && text.contains("expected the experts of"), "{text}");
        assert!(refused(engine.move_experts(layers, map.phy2log(), 1)).contains("no map places its experts"));
        Ok(())
    });
    same(&case, &got.unwrap(), &want);
    // Experts that were not loaded for it.
    let fixed = ExpertPlacements { movable: false, ..placements };
    let replicas = origin.load_placed(&case, &fixed).unwrap();
    let error = outcome_with(&replicas, true, None, |engine| {
        let target = renamed(&engine.expert_map(0).unwrap(), &mut Numbers(2));
        engine.move_experts(0, &target, 1).map(drop)
    });
    assert!(format!("{:#}", error.unwrap_err()).contains("--enable-eplb"));
}

#[test]
fn the_balancer_moves_experts_and_changes_no_bit() {
    let (mut moved, mut rolled_back) = (0, 0);
    for (i, policy) in EplbPolicy::ALL.into_iter().enumerate() {
        let parallel = geometries()[i % 2];
        let case = Case::new(["base", "packed"][i / 2], DType::BF16, parallel);
        let (want, origin) = (one_rank::<Qwen3MoeFamily>(&case), Origin::<Qwen3MoeFamily>::open(case.model));
        let experts = moe_of(&origin.load(&case).unwrap()).num_experts;
        let num_redundant_experts = (experts + 1).next_multiple_of(4) - experts;
        let placements =
            ExpertPlacements { num_redundant_experts, movable: true, ..ExpertPlacements::default() };
        let config = EplbConfig {
            window: 4,
            interval: 1,
            plan_steps: 1,
            policy,
            bytes_per_step: 20_000,
            min_gain: 0.0,
            must_pay: false,
            ..EplbConfig::default()
        };
        for corrupt in [false, true] {
            let fault = MoveFault { rank: 3, kind: FaultKind::Corrupt };
            let placements = ExpertPlacements { fault: corrupt.then_some(fault), ..placements.clone() };
            let replicas = origin.load_placed(&case, &placements).unwrap();
            let mut stats = None;
            let got = outcome_with(&replicas, parallel.dp > 1, Some(config.clone()), |engine| {
                // The planner has a step's time.
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
