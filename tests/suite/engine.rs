//! The engine on whole models: the result of a request does not depend on how it is run.

use candle_core::DType;
use moe_engine::engine::{EngineConfig, FinishReason, Request, SchedulingPolicy};
use moe_tests::load;
use proptest::prelude::*;

use crate::running::{Done, Results, collect, engine, kv_blocks, requests, run};

#[test]
fn results_do_not_depend_on_how_requests_are_run() {
    for (name, dtype) in
        [("base", DType::F32), ("rope-dynamic-crossing", DType::BF16), ("long-window", DType::BF16)]
    {
        let model = load(name, dtype).unwrap();
        let requests = requests(&model, &[5, 40, 1, 17, 40, 9], 24);
        let alone: Vec<Done> = requests
            .iter()
            .flat_map(|r| run(&model, std::slice::from_ref(r), &EngineConfig::default()))
            .collect();
        assert!(alone.iter().all(|d| d.tokens.len() == 24 && d.finish == Some(FinishReason::Length)));
        assert_ne!(alone[0].tokens, alone[1].tokens);
        for (seqs, tokens, blocks, block_size) in
            [(256, 512, 1000, 16), (256, 7, 70, 1), (2, 3, 40, 5), (256, 1, 5, 16), (3, 33, 10, 7)]
        {
            for (prefix, ahead) in [(true, false), (false, false), (true, true), (false, true)] {
                let config = EngineConfig {
                    max_num_seqs: seqs,
                    max_num_batched_tokens: tokens,
                    enable_prefix_caching: prefix,
                    async_scheduling: ahead,
                    ..kv_blocks(&model, blocks, block_size)
                };
                let got = run(&model, &requests, &config);
                assert!(got == alone, "{name}: {config:?}");
            }
        }
    }
}

#[test]
fn few_blocks_preempt_and_nothing_is_lost() {
    let model = load("base", DType::F32).unwrap();
    let requests = requests(&model, &[20, 20, 20, 20], 30);
    let roomy = run(&model, &requests, &EngineConfig::default());
    for ahead in [false, true] {
        // There are 13 blocks of 4. One request needs 13 blocks, so four requests cannot all stay.
        let config = EngineConfig { async_scheduling: ahead, ..kv_blocks(&model, 13, 4) };
        let mut engine = engine(&model, &config);
        for request in &requests {
            engine.add(request.clone()).unwrap();
        }
        let mut results = Results::new();
        engine.run(|output| collect(&mut results, output)).unwrap();
        assert_eq!(results.into_values().collect::<Vec<_>>(), roomy);
        let stats = engine.stats();
        assert!(stats.preemptions > 0 && stats.peak_kv_blocks <= 13, "{stats:?}");
        assert_eq!((stats.requests, stats.finished, stats.generated_tokens), (4, 4, 120));
    }
}

#[test]
fn a_common_prefix_is_computed_once() {
    let model = load("base", DType::F32).unwrap();
    let all = requests(&model, &[50], 8);
    let longer = Request { prompt: [all[0].prompt.clone(), vec![1, 2, 3]].concat(), ..all[0].clone() };
    let expected = run(&model, std::slice::from_ref(&longer), &EngineConfig::default());

    let mut engine = engine(&model, &EngineConfig::default());
    let mut results = Results::new();
    engine.add(all[0].clone()).unwrap();
    engine.run(|output| collect(&mut results, output)).unwrap();
    let mut cached = Vec::new();
    for request in [&all[0], &longer] {
        engine.add(request.clone()).unwrap();
        engine
            .run(|output| {
                cached.push(output.num_cached_tokens);
                collect(&mut results, output);
            })
            .unwrap();
    }
    let done: Vec<Done> = results.into_values().collect();
    assert_eq!((&done[1], &done[2]), (&done[0], &expected[0]));
    // Three full blocks of the 50 tokens.
    assert!(cached.iter().all(|&n| n == 48), "{cached:?}");
    assert_eq!(engine.stats().cached_prompt_tokens, 96);
}

#[test]
fn choices_differ_by_seed_and_keep_their_bits() {
    let model = load("base", DType::F32).unwrap();
    let mut request = requests(&model, &[12], 10).remove(0);
    request.n = 3;
    let together = run(&model, std::slice::from_ref(&request), &EngineConfig::default());
    assert_eq!(together.len(), 3);
    assert!(together[0].tokens != together[1].tokens && together[1].tokens != together[2].tokens);
    let mut one = request.clone();
    (one.n, one.sampling.seed) = (1, request.sampling.seed + 2);
    assert_eq!(run(&model, &[one], &EngineConfig::default())[0], together[2]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn any_limits_give_the_same_results(
        lengths in prop::collection::vec(1usize..30, 1..6),
        max_num_seqs in 1usize..6,
        max_num_batched_tokens in 1usize..40,
        block_size in 1usize..20,
        spare in 0usize..12,
        enable_prefix_caching: bool,
        async_scheduling: bool,
        longest_first: bool,
    ) {
        let model = load("narrow-experts", DType::BF16).unwrap();
        let mut requests = requests(&model, &lengths, 9);
        requests.iter_mut().enumerate().for_each(|(i, request)| request.max_tokens = Some(9 - i * 3 % 7));
        let scheduling_policy =
            if longest_first { SchedulingPolicy::LongestFirst } else { SchedulingPolicy::Fcfs };
        let longest = lengths.iter().max().unwrap() + 8;
        let config = EngineConfig {
            max_num_seqs, max_num_batched_tokens, scheduling_policy, enable_prefix_caching, async_scheduling,
            ..kv_blocks(&model, longest.div_ceil(block_size) + spare, block_size)
        };
        let expected: Vec<Done> =
            requests.iter().flat_map(|r| run(&model, std::slice::from_ref(r), &EngineConfig::default())).collect();
        prop_assert_eq!(run(&model, &requests, &config), expected);
    }
}
