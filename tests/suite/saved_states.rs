//! Prefixes of models whose layers keep recurrent states: a state that is saved at the end of a prefix spares its
//! computation, and no bit of a result depends on it.

use candle_core::DType;
use model_runtime::CausalLm;
use moe_comm::ParallelConfig;
use moe_engine::engine::{EngineConfig, Request, SavedStates, Stats};
use moe_tests::load_hybrid;

use crate::geometries::{Case, Origin};
use crate::running::{Done, Results, collect, engine, prompt, requests, run};

/// Requests that have their first `common` tokens in common, and then these numbers of others.
fn sharing(model: &dyn CausalLm, common: usize, ends: &[usize], max_tokens: usize) -> Vec<Request> {
    let vocab = model.info().vocab_size;
    let mut requests = requests(model, ends, max_tokens);
    for request in &mut requests {
        let own = std::mem::take(&mut request.prompt);
        request.prompt = [prompt(vocab, common, 5), own].concat();
    }
    requests
}

fn uncached(model: &dyn CausalLm, requests: &[Request]) -> Vec<Done> {
    let config = EngineConfig { enable_prefix_caching: false, ..EngineConfig::default() };
    requests.iter().flat_map(|r| run(model, std::slice::from_ref(r), &config)).collect()
}

/// The results of requests, each of which is added when the one before has ended, and the counters.
fn one_by_one(model: &dyn CausalLm, requests: &[Request], config: &EngineConfig) -> (Vec<Done>, Stats) {
    let mut engine = engine(model, config);
    let mut results = Results::new();
    for request in requests {
        engine.add(request.clone()).unwrap();
        engine.run(|output| collect(&mut results, output)).unwrap();
    }
    (results.into_values().collect(), engine.stats())
}

#[test]
fn a_common_prefix_is_computed_once() {
    let model = load_hybrid("qwen3-next", DType::F32).unwrap();
    // The first prompt saves its state after 192 tokens. The last full block of the common part ends there, too.
    let short = sharing(&model, 200, &[5, 30, 1, 17], 8);
    let (done, stats) = one_by_one(&model, &short, &EngineConfig::default());
    assert!(done == uncached(&model, &short));
    assert_eq!(stats.cached_prompt_tokens, 3 * 192);
    // Three of the answers come to the end of a block, after 208 and 224 tokens.
    let SavedStates { restored, saved, evicted, bytes } = stats.saved_states;
    let state = model.info().states.bytes_per_sequence().unwrap() as u64;
    assert_eq!((restored, saved, evicted, bytes), (3, 1 + 3, 0, 4 * state));
    // The first request saves its state at its own end. The second one finds only blocks, and saves the state where the
    // two prompts begin to differ.
    let long = sharing(&model, 200, &[90, 80, 100, 110], 8);
    let (done, stats) = one_by_one(&model, &long, &EngineConfig::default());
    assert!(done == uncached(&model, &long));
    assert_eq!((stats.cached_prompt_tokens, stats.saved_states.restored), (2 * 192, 2));
    assert_eq!(stats.saved_states.saved, 1 + 2 + 2 + 1);
}

#[test]
fn the_state_that_was_used_last_stays() {
    let model = load_hybrid("qwen3_5", DType::F32).unwrap();
    let state = model.info().states.bytes_per_sequence().unwrap();
    let config = EngineConfig { prefix_state_memory: Some(2 * state), ..EngineConfig::default() };
    let others = requests(&model, &[70, 71, 72, 73], 4);
    let shared = sharing(&model, 100, &[5, 6, 7, 8], 4);
    let mixed: Vec<Request> = shared.into_iter().zip(others).flat_map(|(a, b)| [a, b]).collect();
    let (done, stats) = one_by_one(&model, &mixed, &config);
    assert!(done == uncached(&model, &mixed));
    assert_eq!(stats.cached_prompt_tokens, 3 * 96);
    let SavedStates { restored, saved, evicted, bytes } = stats.saved_states;
    assert_eq!((restored, saved, evicted, bytes), (3, 5, 3, 2 * state as u64));
}

/// The request that says the tokens `more` after the answer to another one.
fn next_turn(turn: &Request, answer: &[u32], more: &[u32]) -> Request {
    Request { prompt: [&turn.prompt[..], answer, more].concat(), ..turn.clone() }
}

#[test]
fn the_next_turn_begins_at_the_end_of_the_answer() {
    for (name, dtype) in [("qwen3-next", DType::F32), ("qwen3_5", DType::BF16)] {
        let model = load_hybrid(name, dtype).unwrap();
        for (block_size, ahead) in [(16, false), (16, true), (7, true), (1, false), (1, true)] {
            let config = EngineConfig { block_size, async_scheduling: ahead, ..EngineConfig::default() };
            let mut engine = engine(&model, &config);
            let mut turn = requests(&model, &[5], 61).remove(0);
            let mut computed = 0;
            for more in [3, 20, 70, 1] {
                let before = engine.stats().cached_prompt_tokens;
                engine.add(turn.clone()).unwrap();
                let mut results = Results::new();
                engine.run(|output| collect(&mut results, output)).unwrap();
                let done = results.into_values().next().unwrap();
                let place = format!("{name}, blocks of {block_size}, ahead {ahead}, {computed} tokens");
                assert!(done == uncached(&model, std::slice::from_ref(&turn))[0], "{place}");
                let cached = engine.stats().cached_prompt_tokens - before;
                assert_eq!(cached, computed / block_size as u64 * block_size as u64, "{place}");
                // The last token of an answer is not computed.
                computed = (turn.prompt.len() + done.tokens.len() - 1) as u64;
                turn = next_turn(&turn, &done.tokens, &prompt(model.info().vocab_size, more, 9));
            }
            assert_eq!(engine.stats().saved_states.restored, 3);
        }
    }
}

#[test]
fn each_choice_has_a_next_turn() {
    let model = load_hybrid("qwen3-next", DType::F32).unwrap();
    let first = Request { n: 3, ..requests(&model, &[40], 50).remove(0) };
    for ahead in [false, true] {
        let config = EngineConfig { async_scheduling: ahead, ..EngineConfig::default() };
        let mut engine = engine(&model, &config);
        engine.add(first.clone()).unwrap();
        let mut results = Results::new();
        engine.run(|output| collect(&mut results, output)).unwrap();
        let answers: Vec<Done> = results.into_values().collect();
        assert!(answers[0].tokens != answers[1].tokens && answers[1].tokens != answers[2].tokens);
        let before = engine.stats().cached_prompt_tokens;
        let turn = Request { n: 1, ..first.clone() };
        let turns: Vec<Request> =
            answers.iter().map(|done| next_turn(&turn, &done.tokens, &[1, 2, 3])).collect();
        for turn in &turns {
            engine.add(turn.clone()).unwrap();
        }
        let mut results = Results::new();
        engine.run(|output| collect(&mut results, output)).unwrap();
        assert!(results.into_values().eq(uncached(&model, &turns)), "ahead {ahead}");
        assert_eq!(engine.stats().cached_prompt_tokens - before, 3 * 80, "ahead {ahead}");
    }
}

#[test]
fn answers_displace_one_another_before_prompts() {
    let model = load_hybrid("qwen3-next", DType::F32).unwrap();
    let state = model.info().states.bytes_per_sequence().unwrap();
    let config = EngineConfig { prefix_state_memory: Some(4 * state), ..EngineConfig::default() };
    let shared = sharing(&model, 100, &[5, 6, 7, 8, 9, 10], 40);
    let want = uncached(&model, &shared);
    let turn = |i: usize| next_turn(&shared[i], &want[i].tokens, &[3, 2, 1]);
    let last = turn(5);
    let all: Vec<Request> = shared.iter().cloned().chain([last]).collect();
    let (done, stats) = one_by_one(&model, &all, &config);
    assert!(done == uncached(&model, &all));
    // The state after the first 96 tokens stays. Each answer ends a block three times and keeps one place, of which
    // three were free. The last request begins at the end of the last answer, after 144 tokens, and leaves one more.
    assert_eq!(stats.cached_prompt_tokens, 5 * 96 + 144);
    let SavedStates { restored, saved, evicted, bytes } = stats.saved_states;
    assert_eq!((restored, saved, evicted, bytes), (6, 1 + 6 * 3 + 3, 3 + 1, 4 * state as u64));
    // With one place, which is not for answers, a turn begins where the prompts part.
    let one = EngineConfig { prefix_state_memory: Some(state), ..EngineConfig::default() };
    let (done, stats) = one_by_one(&model, &[shared[5].clone(), turn(5)], &one);
    assert!(done == uncached(&model, &[shared[5].clone(), turn(5)]));
    assert_eq!((stats.cached_prompt_tokens, stats.saved_states.saved), (96, 1));
}

#[test]
fn no_result_depends_on_saved_states() {
    for (name, dtype) in [("qwen3-next", DType::F32), ("qwen3_5", DType::BF16)] {
        let model = load_hybrid(name, dtype).unwrap();
        let state = model.info().states.bytes_per_sequence().unwrap();
        let mut requests = sharing(&model, 130, &[5, 70, 1, 17, 90, 2], 12);
        requests[3].n = 3;
        requests[1].prompt_logprobs = Some(1);
        let want = uncached(&model, &requests);
        let mut restored = 0;
        for (seqs, tokens, block_size, places) in
            [(64, 512, 16, 100), (2, 40, 8, 100), (3, 63, 7, 1), (1, 128, 16, 2), (64, 90, 64, 100)]
        {
            for ahead in [false, true] {
                let config = EngineConfig {
                    max_num_seqs: seqs,
                    max_num_batched_tokens: tokens,
                    block_size,
                    async_scheduling: ahead,
                    prefix_state_memory: Some(places * state),
                    ..EngineConfig::default()
                };
                let mut engine = engine(&model, &config);
                for request in &requests {
                    engine.add(request.clone()).unwrap();
                }
                let mut results = Results::new();
                engine.run(|output| collect(&mut results, output)).unwrap();
                assert!(results.into_values().eq(want.iter().cloned()), "{name}: {config:?}");
                restored += engine.stats().saved_states.restored;
            }
        }
        assert!(restored > 20, "{name}: {restored}");
    }
}

/// A preempted sequence continues from the saved state of its prompt, if the blocks of the prompt still exist.
#[test]
fn preempted_sequences_go_on_from_saved_states() {
    let model = load_hybrid("qwen3-next", DType::F32).unwrap();
    let states = &model.info().states;
    let state = states.bytes_per_sequence().unwrap();
    let blocks = 40 * 8 * states.bytes_per_token().unwrap();
    let config = EngineConfig {
        max_num_seqs: 4,
        max_num_batched_tokens: 64,
        block_size: 8,
        kv_cache_memory: Some(blocks + (4 + 3) * state),
        prefix_state_memory: Some(3 * state),
        ..EngineConfig::default()
    };
    let requests = sharing(&model, 100, &[20, 9, 31, 4, 15], 120);
    let mut engine = engine(&model, &config);
    for request in &requests {
        engine.add(request.clone()).unwrap();
    }
    let mut results = Results::new();
    engine.run(|output| collect(&mut results, output)).unwrap();
    assert!(results.into_values().eq(uncached(&model, &requests)));
    let stats = engine.stats();
    assert!(stats.preemptions > 0 && stats.saved_states.restored > 3, "{stats:?}");
}

#[test]
fn ranks_save_and_restore_the_same_states() {
    let model = load_hybrid("qwen3-next", DType::F32).unwrap();
    let requests = sharing(&model, 130, &[5, 70, 20], 6);
    let want = uncached(&model, &requests);
    for tp in [2, 4] {
        let parallel = ParallelConfig { tp, ..ParallelConfig::default() };
        let replicas =
            Origin::open("qwen3-next").load(&Case::new("qwen3-next", DType::F32, parallel)).unwrap();
        let (done, stats) = one_by_one(replicas[0].model.as_ref(), &requests, &EngineConfig::default());
        assert!(done == want, "{tp} ranks");
        assert_eq!((stats.cached_prompt_tokens, stats.saved_states.restored), (2 * 128, 2), "{tp} ranks");
    }
}

/// Measures how much time saved states save, in a cut of four layers with random weights: `cargo test --release -p
/// moe-tests --test suite -- --ignored --nocapture first_tokens_of_100_requests`.
#[test]
#[ignore = "a measurement of minutes"]
fn first_tokens_of_100_requests_that_share_a_prompt() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/bench/configs");
    let text = std::fs::read_to_string(format!("{folder}/qwen3_5moe-0.9b-a0.2b.json")).unwrap();
    let cut = text.replace("\"num_hidden_layers\":16", "\"num_hidden_layers\":4");
    let case = Case::new("cut", DType::BF16, ParallelConfig::default());
    let replicas = Origin::open(&cut).load(&case).unwrap();
    let model = replicas[0].model.as_ref();
    let requests = sharing(model, 4000, &[20; 100], 2);
    let mut results = Vec::new();
    for enable_prefix_caching in [true, false] {
        let config =
            EngineConfig { enable_prefix_caching, max_model_len: Some(4096), ..EngineConfig::default() };
        let mut engine = engine(model, &config);
        for request in &requests {
            engine.add(request.clone()).unwrap();
        }
        let mut done = Results::new();
        engine.run(|output| collect(&mut done, output)).unwrap();
        println!("prefix caching {enable_prefix_caching}:\n{}", engine.stats());
        results.push(done);
    }
    assert!(results[0] == results[1]);
}
