//! Structured output on a whole model: the text follows its grammar however it is run, and with all other parameters.

use std::sync::Arc;

use candle_core::DType;
use model_runtime::{CausalLm, Exec, SamplingParams};
use moe_engine::engine::{Engine, EngineConfig, FinishReason, Request, RequestError, StopReason};
use moe_engine::structured::StructuredOutput;
use moe_engine::tokenizer::Tokenizer;
use moe_tests::{fixture, load};
use serde_json::{Value, json};

use crate::running::{Done, Results, collect, kv_blocks};

const COMPLETE: FinishReason = FinishReason::Stop(StopReason::EndOfSequence);

fn tokenizer() -> Tokenizer {
    Tokenizer::from_dir(&fixture("text")).unwrap()
}

fn schema() -> StructuredOutput {
    let value = json!({"type": "object", "additionalProperties": false, "required": ["name", "age", "tags"], "properties": {
        "name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "maxItems": 3, "items": {"enum": ["red", "green", "blue"]}}}});
    StructuredOutput::JsonSchema(value.to_string())
}

fn is_valid(text: &str) -> bool {
    let Ok(Value::Object(value)) = serde_json::from_str(text) else { return false };
    let name = value["name"].as_str().is_some_and(|name| name.chars().count() <= 12);
    let age = value["age"].as_u64().is_some_and(|age| age <= 150);
    let colour = |tag: &Value| ["red", "green", "blue"].iter().any(|colour| tag == colour);
    let tags = value["tags"].as_array().is_some_and(|tags| tags.len() <= 3 && tags.iter().all(colour));
    value.len() == 3 && name && age && tags
}

/// A request for this output. It is sampled, except for seed 0.
fn request(output: StructuredOutput, seed: u64) -> Request {
    let temperature = if seed == 0 { 0.0 } else { 1.0 };
    Request {
        sampling: SamplingParams { temperature, seed, ..SamplingParams::default() },
        structured_output: Some(Arc::new(output)),
        max_tokens: Some(300),
        eos_token_ids: vec![299, 297],
        ..Request::new(tokenizer().encode("The experts").unwrap())
    }
}

/// The results in the order of requests and choices, and the number of preemptions.
fn run_counting(model: &dyn CausalLm, requests: &[Request], config: &EngineConfig) -> (Vec<Done>, u64) {
    let mut engine = Engine::new(model, Exec::cpu(), Some(tokenizer()), config).unwrap();
    for request in requests {
        engine.add(request.clone()).unwrap();
    }
    let mut results = Results::new();
    engine.run(|output| collect(&mut results, output)).unwrap();
    (results.into_values().collect(), engine.stats().preemptions)
}

fn run(model: &dyn CausalLm, requests: &[Request]) -> Vec<Done> {
    run_counting(model, requests, &EngineConfig::default()).0
}

#[test]
fn the_text_follows_its_schema_however_it_is_run() {
    let model = load("text", DType::F32).unwrap();
    let mut requests: Vec<Request> = (0..5).map(|seed| request(schema(), seed)).collect();
    requests[3].n = 3;
    // One request without a constraint runs with the others.
    requests[4] = Request { structured_output: None, max_tokens: Some(40), ..requests[4].clone() };
    let alone: Vec<Done> = requests.iter().flat_map(|r| run(&model, std::slice::from_ref(r))).collect();
    for done in &alone[..6] {
        assert!(is_valid(&done.text), "{:?}", done.text);
        assert_eq!(done.finish, Some(COMPLETE));
    }
    assert!(alone[1].text != alone[2].text && alone[3].text != alone[4].text && !is_valid(&alone[6].text));
    let longest = alone.iter().map(|done| done.tokens.len()).max().unwrap() + requests[0].prompt.len();
    let few = longest.div_ceil(4) + 2;
    for (seqs, tokens, blocks, block_size) in [(256, 512, 1000, 16), (256, 7, few, 4), (2, 3, 2 * few, 4)] {
        for (prefix, ahead) in [(true, false), (false, false), (true, true), (false, true)] {
            let config = EngineConfig {
                max_num_seqs: seqs,
                max_num_batched_tokens: tokens,
                enable_prefix_caching: prefix,
                async_scheduling: ahead,
                ..kv_blocks(&model, blocks, block_size)
            };
            let fitting: Vec<Request> = requests
                .iter()
                .map(|r| Request {
                    max_tokens: r.max_tokens.map(|max| max.min(few * 4 - r.prompt.len())),
                    ..r.clone()
                })
                .collect();
            let (got, preemptions) = run_counting(&model, &fitting, &config);
            assert!(got == alone, "{config:?}");
            assert_eq!(preemptions > 0, blocks == few, "{config:?}");
        }
    }
}

#[test]
fn it_ends_where_the_text_is_complete() {
    let model = load("text", DType::F32).unwrap();
    let of = |change: &dyn Fn(&mut Request)| {
        let mut request = request(StructuredOutput::Choice(vec!["yes".into(), "no".into()]), 1);
        change(&mut request);
        run(&model, &[request]).remove(0)
    };
    let plain = of(&|_| {});
    assert!(plain.text == "yes" || plain.text == "no", "{}", plain.text);
    assert_eq!(plain.finish, Some(COMPLETE));
    // Nothing can follow, whatever is requested, and no id that ends texts is needed.
    assert_eq!(of(&|r| r.ignore_eos = true), plain);
    assert_eq!(of(&|r| r.eos_token_ids.clear()), plain);
    assert_eq!(of(&|r| r.min_tokens = 100), plain);
    // A text that is cut off is not complete.
    let cut = of(&|r| r.max_tokens = Some(1));
    assert_eq!((cut.finish, cut.tokens.len()), (Some(FinishReason::Length), 1));
    assert!(plain.text.starts_with(&cut.text));
}

#[test]
fn an_end_is_taken_only_where_the_text_may_end() {
    let model = load("text", DType::F32).unwrap();
    let eos = 299;
    let mut request = request(StructuredOutput::Regex("(ab)+".into()), 1);
    // The id is as likely as possible, from the first token on.
    request.sampling.logit_bias = vec![(eos, 100.0)];
    let done = run(&model, std::slice::from_ref(&request)).remove(0);
    assert_eq!((done.text.as_str(), done.tokens.last(), done.finish), ("ab", Some(&eos), Some(COMPLETE)));
    let later = Request { min_tokens: 5, ..request.clone() };
    let later = run(&model, &[later]).remove(0);
    assert_eq!((later.text.as_str(), later.tokens.len()), ("ababab", 7));
    let never = Request { ignore_eos: true, max_tokens: Some(9), ..request.clone() };
    let never = run(&model, &[never]).remove(0);
    assert_eq!((never.text.as_str(), never.finish), ("ababababa", Some(FinishReason::Length)));
    // An id of stop_token_ids ends the text in the same places.
    let stop = Request { eos_token_ids: Vec::new(), stop_token_ids: vec![eos], ..request };
    let stop = run(&model, &[stop]).remove(0);
    assert_eq!((stop.text.as_str(), stop.finish), ("ab", Some(FinishReason::Stop(StopReason::Token(eos)))));
}

#[test]
fn other_parameters_work_next_to_it() {
    let model = load("text", DType::F32).unwrap();
    let id = |text: &str| tokenizer().token_to_id(text).unwrap();
    let of = |change: &dyn Fn(&mut Request)| {
        let mut request = request(StructuredOutput::Regex("[a-h]{8}".into()), 2);
        change(&mut request);
        run(&model, &[request]).remove(0)
    };
    let allowed = of(&|r| r.sampling.allowed_token_ids = Some(vec![id("a"), id("c"), id("!")]));
    assert!(
        allowed.text.len() == 8 && allowed.text.chars().all(|c| c == 'a' || c == 'c'),
        "{}",
        allowed.text
    );
    let bad: Vec<u32> = "abcdefg".chars().map(|c| id(&c.to_string())).collect();
    let no_bad = of(&|r| r.bad_words = "abcdefg".chars().map(String::from).collect());
    assert!(
        no_bad.text.len() == 8 && no_bad.text.chars().all(|c| ('a'..='h').contains(&c)),
        "{}",
        no_bad.text
    );
    assert!(
        of(&|_| {}).tokens.iter().any(|id| bad.contains(id))
            && !no_bad.tokens.iter().any(|id| bad.contains(id))
    );
    let biased = of(&|r| r.sampling.logit_bias = vec![(id("g"), 100.0), (id("!"), 100.0)]);
    assert_eq!(biased.text, "gggggggg");
    let stopped = of(&|r| {
        r.sampling.logit_bias = vec![(id("g"), 100.0)];
        r.stop = vec!["ggg".into()];
    });
    assert_eq!((stopped.text.as_str(), stopped.tokens.len()), ("", 3));
    assert_eq!(stopped.finish, Some(FinishReason::Stop(StopReason::Text("ggg".into()))));
    // Log-probabilities are the model's, whatever is excluded.
    let logprobs = of(&|r| r.sampling.logprobs = Some(2));
    assert_eq!(logprobs.text, of(&|_| {}).text);
    assert!(logprobs.logprobs.iter().all(|l| l.chosen.logprob.is_finite() && l.top.len() == 2));
}

#[test]
fn a_text_that_cannot_go_on_fails_alone() {
    let model = load("text", DType::F32).unwrap();
    let id = |text: &str| tokenizer().token_to_id(text).unwrap();
    let mut stuck = request(StructuredOutput::Regex("a+b".into()), 1);
    stuck.sampling.allowed_token_ids = Some(vec![id("x")]);
    // This becomes too complex after some letters, and the limits end it.
    let deep = StructuredOutput::Regex("((([a-z]{1,1000}){1,1000}){1,1000}){1,1000}".into());
    let requests = [stuck, request(schema(), 1), Request { ignore_eos: true, ..request(deep, 1) }];
    for ahead in [false, true] {
        let config = EngineConfig { async_scheduling: ahead, ..EngineConfig::default() };
        let (done, _) = run_counting(&model, &requests, &config);
        let failed = |i: usize, words: &str| match &done[i].finish {
            Some(FinishReason::Failed(message)) => assert!(message.contains(words), "{message}"),
            other => panic!("{other:?}"),
        };
        failed(0, "every logit is -inf; structured_output, allowed_token_ids");
        assert!(is_valid(&done[1].text) && done[1].finish == Some(COMPLETE));
        failed(2, "structured_output: lexer error");
    }
}

#[test]
fn what_cannot_be_compiled_is_refused() {
    let model = load("text", DType::F32).unwrap();
    let config = EngineConfig::default();
    let mut engine = Engine::new(&model, Exec::cpu(), Some(tokenizer()), &config).unwrap();
    let bad = request(StructuredOutput::Regex("a(".into()), 0);
    let error = engine.add(bad.clone()).unwrap_err();
    assert!(matches!(error, RequestError::StructuredOutput(_)), "{error}");
    assert!(
        error.to_string().starts_with("structured_output: the regular expression cannot be used: "),
        "{error}"
    );
    assert!(engine.is_idle());
    let mut engine = Engine::new(&model, Exec::cpu(), None, &config).unwrap();
    let error = engine.add(bad).unwrap_err().to_string();
    assert_eq!(error, "structured_output must be left out without a tokenizer, got some");
}
