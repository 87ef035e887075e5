//! Many requests through one engine of a model with recurrent states: with shared prefixes, several answers,
//! preemption and cancelled requests. Every result is the one of the request alone, and memory does not grow. The
//! long run must be requested by name: `cargo test --release -p moe-tests --test suite -- --ignored --nocapture
//! soak_of_many_requests`, with SOAK_REQUESTS=20000 by default.

use std::collections::HashMap;

use candle_core::DType;
use model_runtime::CausalLm;
use moe_engine::engine::{Engine, EngineConfig, FinishReason, Request, RequestId, Stats};
use moe_tests::load_hybrid;
use moe_tests::soak::resident_bytes;

use crate::running::{Done, Results, collect, engine, prompt, requests, run};

/// Numbers that look random and are the same in each run.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % bound
    }
}

/// Requests with four common beginnings, and their results alone.
fn known(model: &dyn CausalLm) -> Vec<(Request, Vec<Done>)> {
    let vocab = model.info().vocab_size;
    let ends: Vec<usize> = (0..32).map(|i| 1 + i * 7 % 40).collect();
    let uncached = EngineConfig { enable_prefix_caching: false, ..EngineConfig::default() };
    let known = requests(model, &ends, 1).into_iter().enumerate().map(|(i, mut request)| {
        let common = prompt(vocab, [0, 70, 100, 150][i % 4], 90 + i as u32 % 4);
        request.prompt = [common, request.prompt].concat();
        request.max_tokens = Some(1 + i * 5 % 23);
        request.n = 1 + usize::from(i % 5 == 0);
        let want = run(model, std::slice::from_ref(&request), &uncached);
        (request, want)
    });
    known.collect()
}

/// A run of `count` requests; bytes in use after a tenth of them and at the end.
fn soak(count: usize) -> ([u64; 2], Stats) {
    let model = load_hybrid("qwen3-next", DType::F32).unwrap();
    let known = known(&model);
    let states = &model.info().states;
    let state = states.bytes_per_sequence().unwrap();
    let blocks = 60 * 8 * states.bytes_per_token().unwrap();
    let config = EngineConfig {
        max_num_seqs: 6,
        max_num_batched_tokens: 96,
        block_size: 8,
        kv_cache_memory: Some(blocks + (6 + 5) * state),
        prefix_state_memory: Some(5 * state),
        ..EngineConfig::default()
    };
    let mut engine = engine(&model, &config);
    let mut running: HashMap<RequestId, usize> = HashMap::new();
    let mut results = Results::new();
    let mut random = Random(7);
    let mut memory = [0; 2];
    for number in 0..count {
        let which = random.below(known.len());
        running.insert(engine.add(known[which].0.clone()).unwrap(), which);
        if random.below(20) == 0 {
            let request = *running.keys().min().unwrap();
            engine.cancel(request).unwrap();
        }
        if number == count / 10 {
            memory[0] = resident_bytes().unwrap();
        }
        while engine.num_unfinished() > 9 || number + 1 == count && !engine.is_idle() {
            step(&mut engine, &mut results, &mut running, &known);
        }
    }
    assert!(running.is_empty() && results.is_empty(), "requests without an end");
    memory[1] = resident_bytes().unwrap();
    (memory, engine.stats())
}

/// Runs a step, and compares the requests that have ended.
fn step(
    engine: &mut Engine,
    results: &mut Results,
    running: &mut HashMap<RequestId, usize>,
    known: &[(Request, Vec<Done>)],
) {
    let mut ended = Vec::new();
    for output in engine.step().unwrap() {
        if output.finish.is_some() {
            ended.push(output.request);
        }
        collect(results, output);
    }
    for request in ended {
        let Some(&which) = running.get(&request) else { continue };
        let (asked, want) = &known[which];
        let choices = (0..asked.n).map(|choice| results.get(&(request, choice)));
        let Some(got) =
            choices.collect::<Option<Vec<_>>>().filter(|got| got.iter().all(|d| d.finish.is_some()))
        else {
            continue;
        };
        for (got, want) in got.into_iter().zip(want) {
            match &got.finish {
                Some(FinishReason::Cancelled) => assert!(want.tokens.starts_with(&got.tokens), "{asked:?}"),
                _ => assert!(got == want, "{asked:?}: {got:?}, expected {want:?}"),
            }
        }
        results.retain(|key, _| key.0 != request);
        running.remove(&request);
    }
}

fn check(stats: &Stats, count: usize) {
    let saved = stats.saved_states;
    assert_eq!(stats.requests, count as u64);
    assert!(stats.preemptions > 0 && saved.restored > count as u64 / 10 && saved.evicted > 0, "{stats:?}");
}

#[test]
fn requests_leave_nothing_to_each_other() {
    let (_, stats) = soak(300);
    // Memory is only checked by the long run, in a process without other tests.
    check(&stats, 300);
}

#[test]
#[ignore = "minutes"]
fn soak_of_many_requests() {
    let count = std::env::var("SOAK_REQUESTS").map_or(20_000, |count| count.parse().unwrap());
    let ([before, after], stats) = soak(count);
    println!("{before} bytes, then {after}: {stats}");
    check(&stats, count);
    assert!(after <= before + before / 50 + (2 << 20), "{before} bytes became {after}");
}
