//! Many steps with many moves: no text changes, and no memory is lost. The long run must be requested by name: `cargo
//! test --release -p moe-tests --test suite -- --ignored --nocapture soak_of`, with SOAK_STEPS=100000 by default.

use candle_core::DType;
use moe_comm::{EpBackend, ParallelConfig};
use moe_engine::engine::{DpEngine, EngineConfig};
use moe_layer::ExpertPlacements;
use moe_tests::soak::{Soak, Soaked, resident_bytes, soak};

use crate::geometries::{Case, Origin};
use crate::placements::moe_of;

/// Two data-parallel ranks on threads, which share the experts and four copies.
fn run(asked: &Soak) -> Soaked {
    let parallel = ParallelConfig {
        dp: 2,
        enable_expert_parallel: true,
        backend: EpBackend::AllgatherReducescatter.into(),
        ..ParallelConfig::default()
    };
    let case = Case::new("base", DType::F32, parallel);
    let placements =
        ExpertPlacements { num_redundant_experts: 4, movable: true, ..ExpertPlacements::default() };
    let replicas = Origin::open("base").load_placed(&case, &placements).unwrap();
    let moe = moe_of(&replicas);
    let info = replicas[0].model.info().clone();
    let config = EngineConfig {
        kv_cache_memory: Some(info.states.bytes_per_token().unwrap() * 4096),
        enable_prefix_caching: false,
        ranks: 2,
        lockstep: true,
        ..EngineConfig::default()
    };
    let others = replicas[1..].to_vec();
    let first = (replicas[0].model.as_ref(), replicas[0].ex.clone(), replicas[0].world.clone());
    let mut engine = DpEngine::new(first, others, None, &config).unwrap();
    let memory = || vec![resident_bytes().unwrap()];
    soak(&mut engine, (moe.layers.len(), info.vocab_size), asked, memory).unwrap()
}

#[test]
fn texts_stay_over_some_moves() {
    let soaked = run(&Soak { steps: 400, every: 8, requests: 6, tokens: 20 });
    // Memory is only checked by the long run, in a process without other tests.
    assert!(soaked.rebalances >= 50 && soaked.texts[0] > 100 && soaked.texts[1] == 0, "{soaked:?}");
}

#[test]
#[ignore = "minutes"]
fn soak_of_many_steps() {
    let steps = std::env::var("SOAK_STEPS").map_or(100_000, |steps| steps.parse().unwrap());
    let soaked = run(&Soak { steps, every: 50, requests: 6, tokens: 20 });
    println!("{soaked:?}");
    assert_eq!(soaked.texts[1], 0, "{soaked:?}");
    let [before, after] = [soaked.memory[0][0], soaked.memory[1][0]];
    assert!(after <= before + before / 50 + (2 << 20), "{before} bytes became {after}: {soaked:?}");
}
