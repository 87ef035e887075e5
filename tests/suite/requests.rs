//! What a request may ask of the engine, and what happens to one request while others run.

use std::sync::Arc;
use std::time::Duration;

use candle_core::DType;
use model_runtime::sampling::{TokenLogprobs, token_logprobs};
use model_runtime::{CausalLm, Exec, RoutedExperts, SamplingParams};
use moe_engine::engine::{Engine, EngineConfig, FinishReason, Request, RequestError, StopReason};
use moe_engine::tokenizer::Tokenizer;
use moe_tests::{Schedule, all_logits, fixture, load, load_hybrid};

use crate::running::{Results, collect, engine, kv_blocks, requests, run};

#[test]
fn ids_end_a_request_but_not_too_early() {
    let model = load("base", DType::F32).unwrap();
    let free = requests(&model, &[9], 20).remove(0);
    let tokens = run(&model, std::slice::from_ref(&free), &EngineConfig::default()).remove(0).tokens;
    let stop = tokens[4];
    let first = tokens.iter().position(|&t| t == stop).unwrap();
    let run = |r: Request| run(&model, &[r], &EngineConfig::default()).remove(0);

    let by_id = run(Request { stop_token_ids: vec![stop], ..free.clone() });
    assert_eq!(by_id.tokens, tokens[..=first]);
    assert_eq!(by_id.finish, Some(FinishReason::Stop(StopReason::Token(stop))));
    let by_eos = run(Request { eos_token_ids: vec![stop], ..free.clone() });
    assert_eq!(
        (by_eos.tokens.len(), by_eos.finish),
        (first + 1, Some(FinishReason::Stop(StopReason::EndOfSequence)))
    );
    let ignored = run(Request { eos_token_ids: vec![stop], ignore_eos: true, ..free.clone() });
    assert_eq!(ignored.tokens, tokens);
    let later = run(Request { stop_token_ids: vec![stop], min_tokens: first + 3, ..free.clone() });
    assert!(later.tokens.len() >= first + 3 && !later.tokens[..first + 3].contains(&stop));
}

#[test]
fn stop_strings_end_the_text() {
    let model = load("text", DType::F32).unwrap();
    let tokenizer = Tokenizer::from_dir(&fixture("text")).unwrap();
    let run = |request: Request| {
        let mut engine =
            Engine::new(&model, Exec::cpu(), Some(tokenizer.clone()), &EngineConfig::default()).unwrap();
        engine.add(request).unwrap();
        let mut results = Results::new();
        engine.run(|output| collect(&mut results, output)).unwrap();
        results.into_values().next().unwrap()
    };
    let free = Request { max_tokens: Some(40), ..Request::new(tokenizer.encode("the").unwrap()) };
    let whole = run(free.clone());
    assert_eq!(whole.text, tokenizer.decode(&whole.tokens).unwrap());
    let mut cut = whole.text.char_indices().map(|(i, _)| i).skip(whole.text.chars().count() / 2);
    let from = cut.next().unwrap();
    let to = cut.nth(2).unwrap();
    let stop = whole.text[from..to].to_string();
    let at = whole.text.find(&stop).unwrap();
    let stopped = run(Request { stop: vec!["\u{1}".into(), stop.clone()], ..free.clone() });
    assert_eq!(stopped.text, whole.text[..at]);
    assert_eq!(stopped.finish, Some(FinishReason::Stop(StopReason::Text(stop.clone()))));
    assert!(whole.tokens.starts_with(&stopped.tokens) && stopped.tokens.len() < whole.tokens.len());
    let kept = run(Request { stop: vec![stop.clone()], include_stop_str_in_output: true, ..free });
    assert_eq!(kept.text, whole.text[..at + stop.len()]);
}

#[test]
fn logprobs_are_those_of_the_logits() {
    let model = load("base", DType::F32).unwrap();
    let vocab = model.info().vocab_size;
    // The longer prompt is scored in two pieces of a step.
    for (len, rows, ahead) in [(33, 10, false), (33, 10, true), (300, 400, true)] {
        let mut request = requests(&model, &[len], 6).remove(0);
        request.sampling.logprobs = Some(4);
        request.prompt_logprobs = Some(2);
        let config =
            EngineConfig { max_num_batched_tokens: rows, async_scheduling: ahead, ..EngineConfig::default() };
        let done = run(&model, std::slice::from_ref(&request), &config).remove(0);
        let sequence = [&request.prompt[..], &done.tokens].concat();
        let schedule = Schedule { chunk: 1000, block_size: 16, together: true };
        let logits = all_logits(&model, std::slice::from_ref(&sequence), schedule, &mut Exec::cpu())
            .unwrap()
            .remove(0);
        let expected = |from: usize, to: usize, n| -> Vec<TokenLogprobs> {
            let row = |p: usize| &logits[p * vocab..(p + 1) * vocab];
            (from..to).map(|p| token_logprobs(row(p - 1), sequence[p], n).unwrap()).collect()
        };
        assert_eq!(done.prompt_logprobs, Some(expected(1, len, 2)));
        assert_eq!(done.logprobs, expected(len, len + 6, 4));
        // The formula itself: log of softmax.
        let row = &logits[(len - 1) * vocab..len * vocab];
        let chosen = &done.logprobs[0].chosen;
        let sum: f64 = row.iter().map(|&x| (x as f64).exp()).sum();
        let want = row[chosen.token_id as usize] as f64 - sum.ln();
        assert!((chosen.logprob as f64 - want).abs() < 1e-4, "{} {want}", chosen.logprob);
    }
}

#[test]
fn captured_routing_can_be_replayed() {
    let model = load("base", DType::F32).unwrap();
    let moe = model.info().moe.clone().unwrap();
    let plain = requests(&model, &[11, 6], 12);
    let capturing = Request { capture_routing: true, ..plain[0].clone() };
    let expected = run(&model, &plain, &EngineConfig::default());
    // Few blocks: the capturing request is preempted and computed again.
    let config = kv_blocks(&model, 9, 3);
    let done = run(&model, &[plain[1].clone(), capturing.clone()], &config);
    assert_eq!((&done[0].tokens, &done[1].tokens), (&expected[1].tokens, &expected[0].tokens));
    let routed = done[1].routed.clone().unwrap();
    assert_eq!(
        (routed.tokens(), routed.layers(), routed.top_k()),
        (11 + 12 - 1, moe.layers.len(), moe.top_k)
    );
    assert!(routed.ids().iter().all(|&id| (id as usize) < moe.num_experts));

    let replaying = Request { replay_routing: Some(Arc::new(routed.clone())), ..capturing.clone() };
    let again = run(&model, &[replaying], &EngineConfig::default()).remove(0);
    assert_eq!((again.tokens, again.routed), (expected[0].tokens.clone(), Some(routed.clone())));
    // Other experts give another text: the replay is really used.
    let shifted = routed.ids().iter().map(|id| (id + 1) % moe.num_experts as u32).collect();
    let shifted = RoutedExperts::from_ids(routed.tokens(), routed.layers(), routed.top_k(), shifted).unwrap();
    let other = Request { replay_routing: Some(Arc::new(shifted.clone())), ..capturing };
    let other = run(&model, &[other], &EngineConfig::default()).remove(0);
    assert_eq!(other.routed.unwrap().ids(), shifted.ids());
    assert_ne!(other.tokens, expected[0].tokens);
}

#[test]
fn blocks_of_dictated_experts_are_not_shared() {
    for (name, model) in
        [("base", load("base", DType::F32)), ("hybrid", load_hybrid("qwen3-next", DType::F32))]
    {
        let model = model.unwrap();
        let moe = model.info().moe.clone().unwrap();
        let plain = requests(&model, &[90], 6).remove(0);
        let want = run(&model, std::slice::from_ref(&plain), &EngineConfig::default());
        let ids: Vec<u32> = (0..90 * moe.layers.len()).flat_map(|_| 0..moe.top_k as u32).collect();
        let routed = RoutedExperts::from_ids(90, moe.layers.len(), moe.top_k, ids).unwrap();
        let replaying = Request { replay_routing: Some(Arc::new(routed)), ..plain.clone() };
        // One after the other: the second one would find the blocks of the first.
        let config = EngineConfig { max_num_seqs: 1, ..EngineConfig::default() };
        let done = run(&model, &[replaying, plain], &config);
        assert_ne!(done[0].tokens, want[0].tokens, "{name}: the replay is really used");
        assert!(done[1] == want[0], "{name}");
    }
}

#[test]
fn ending_one_request_leaves_the_others_alone() {
    let model = load("base", DType::F32).unwrap();
    let all = requests(&model, &[8, 9, 10], 16);
    let expected = run(&model, &all, &EngineConfig::default());
    for ahead in [false, true] {
        let mut engine = engine(&model, &EngineConfig { async_scheduling: ahead, ..EngineConfig::default() });
        let mut late = all[2].clone();
        late.timeout = Some(Duration::ZERO);
        let ids = [
            engine.add(all[0].clone()).unwrap(),
            engine.add(all[1].clone()).unwrap(),
            engine.add(late).unwrap(),
        ];
        let mut results = Results::new();
        for _ in 0..5 {
            engine.step().unwrap().into_iter().for_each(|o| collect(&mut results, o));
        }
        engine.cancel(ids[0]).unwrap();
        engine.cancel(ids[0]).unwrap();
        engine.run(|output| collect(&mut results, output)).unwrap();
        let of = |i: usize| &results[&(ids[i], 0)];
        assert_eq!(of(0).finish, Some(FinishReason::Cancelled));
        assert!(!of(0).tokens.is_empty() && expected[0].tokens.starts_with(&of(0).tokens));
        assert_eq!(of(1), &expected[1]);
        assert_eq!((of(2).finish.clone(), of(2).tokens.len()), (Some(FinishReason::TimedOut), 0));
        assert_eq!(engine.num_unfinished(), 0);
    }
}

#[test]
fn a_row_that_cannot_be_sampled_fails_alone() {
    let model = load("base", DType::F32).unwrap();
    let mut all = requests(&model, &[8, 9], 6);
    let expected = run(&model, &all[1..], &EngineConfig::default());
    // Every token of the vocabulary is a stop id that may not come yet.
    all[0].stop_token_ids = (0..model.info().vocab_size as u32).collect();
    all[0].min_tokens = 2;
    for ahead in [false, true] {
        let done = run(&model, &all, &EngineConfig { async_scheduling: ahead, ..EngineConfig::default() });
        assert!(
            matches!(&done[0].finish, Some(FinishReason::Failed(m)) if m.contains("no token can be sampled"))
        );
        assert_eq!(done[1], expected[0]);
    }
}

#[test]
fn wrong_requests_are_refused_and_nothing_changes() {
    let model = load("base", DType::F32).unwrap();
    let vocab = model.info().vocab_size;
    let context = model.info().max_context_len;
    let mut engine = engine(&model, &kv_blocks(&model, 3, 4));
    let good = Request { max_tokens: Some(2), ..Request::new(vec![1, 2]) };
    let mut refused = |request: Request, words: &str| {
        let e = engine.add(request).unwrap_err();
        assert!(e.to_string().contains(words), "{e}");
        e
    };
    assert_eq!(refused(Request::new(vec![]), "the prompt is empty"), RequestError::EmptyPrompt);
    refused(Request::new(vec![0; context]), "is longer than the context");
    refused(Request::new(vec![0, vocab as u32]), "at position 1 is outside of the vocabulary");
    refused(Request { max_tokens: Some(20), ..good.clone() }, "need 6 KV blocks; the cache has 3");
    refused(Request { max_tokens: Some(0), ..good.clone() }, "max_tokens must be at least 1");
    refused(Request { min_tokens: 3, ..good.clone() }, "min_tokens must be at most max_tokens = 2");
    refused(Request { n: 0, ..good.clone() }, "n must be from 1");
    refused(Request { stop: vec!["x".into()], ..good.clone() }, "empty without a tokenizer");
    let top_p = SamplingParams { top_p: 2.0, ..SamplingParams::default() };
    refused(Request { sampling: top_p, ..good.clone() }, "top_p must be");
    let foreign = RoutedExperts::empty(2, 9, 1).unwrap();
    refused(
        Request { replay_routing: Some(Arc::new(foreign)), ..good.clone() },
        "routed_experts must be [T,",
    );
    assert!(engine.is_idle());
    engine.add(good).unwrap();
    let mut tokens = 0;
    engine.run(|_| tokens += 1).unwrap();
    assert_eq!(tokens, 2);
}

#[test]
fn an_answer_without_a_limit_gets_what_the_kv_cache_holds() {
    let model = load("base", DType::F32).unwrap();
    let config = kv_blocks(&model, 3, 4);
    let mut engine = engine(&model, &config);
    assert_eq!(engine.max_model_len(), 13, "of the last token no key is kept");
    let endless = Request { ignore_eos: true, ..Request::new(vec![1, 2, 3]) };
    let done = run(&model, std::slice::from_ref(&endless), &config);
    assert_eq!((done[0].tokens.len(), &done[0].finish), (10, &Some(FinishReason::Length)));
    // A request that does not fit is refused as a whole, and its length is not cut.
    let error = engine.add(Request { max_tokens: Some(11), ..endless.clone() }).unwrap_err().to_string();
    assert!(error.contains("it can come to 14 tokens, which need 4 KV blocks; the cache has 3"), "{error}");
    assert!(engine.add(Request { max_tokens: Some(10), ..endless.clone() }).is_ok());
    let error = engine.add(Request::new(vec![1; 13])).unwrap_err().to_string();
    assert!(error.contains("at most 12 fit the model length of 13"), "{error}");
    let fits = EngineConfig { max_model_len: Some(13), ..config };
    assert_eq!(run(&model, &[endless], &fits), done);
}

#[test]
fn absurd_settings_are_errors() {
    let model = load("base", DType::F32).unwrap();
    let fails = |config: EngineConfig, words: &str| {
        let e = Engine::new(&model, Exec::cpu(), None, &config).err().unwrap().to_string();
        assert!(e.contains(words), "{e}");
    };
    let default = EngineConfig::default;
    for max_num_seqs in [0, 1 << 16, usize::MAX] {
        fails(EngineConfig { max_num_seqs, ..default() }, "`max_num_seqs` must be from 1 to 65535, got");
    }
    fails(
        EngineConfig { max_num_batched_tokens: 0, ..default() },
        "`max_num_batched_tokens` must be from 1 to 16777216, got 0",
    );
    fails(EngineConfig { block_size: 0, ..default() }, "`block_size` must be from 1");
    fails(EngineConfig { max_model_len: Some(1 << 40), ..default() }, "expected 1 to");
    fails(EngineConfig { kv_cache_memory: Some(1), ..default() }, "holds no block");
    // Blocks of 50 MB, one for each sequence: 3 TB.
    let max_num_seqs = EngineConfig::MAX_NUM_SEQS;
    let block_size = 1 << 16;
    let all = EngineConfig { kv_cache_memory: Some(usize::MAX >> 1), max_num_seqs, block_size, ..default() };
    fails(all, "are available");
    let short = EngineConfig { max_model_len: Some(14), ..kv_blocks(&model, 3, 4) };
    fails(short, "holds 13 tokens, and a sequence may have 14: raise `kv_cache_memory`");
}
