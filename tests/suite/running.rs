//! Running requests for the tests of the engine.

use std::collections::BTreeMap;

use model_runtime::sampling::TokenLogprobs;
use model_runtime::{CausalLm, Exec, RoutedExperts, SamplingParams};
use moe_engine::engine::{Engine, EngineConfig, FinishReason, Output, Request, RequestId};

/// The result of a choice.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Done {
    pub tokens: Vec<u32>,
    pub text: String,
    pub finish: Option<FinishReason>,
    pub logprobs: Vec<TokenLogprobs>,
    pub prompt_logprobs: Option<Vec<TokenLogprobs>>,
    pub routed: Option<RoutedExperts>,
}

pub type Results = BTreeMap<(RequestId, usize), Done>;

pub fn collect(results: &mut Results, output: Output) {
    let done = results.entry((output.request, output.choice)).or_default();
    assert!(done.finish.is_none(), "an output after the last one");
    done.tokens.extend(output.token_id);
    done.text += &output.text;
    done.logprobs.extend(output.logprobs);
    done.prompt_logprobs = done.prompt_logprobs.take().or(output.prompt_logprobs);
    done.routed = output.routed_experts;
    done.finish = output.finish;
}

pub fn engine<'m>(model: &'m dyn CausalLm, config: &EngineConfig) -> Engine<'m> {
    Engine::new(model, Exec::cpu(), None, config).unwrap()
}

/// Runs requests together; returns the results in the order of requests and choices.
pub fn run(model: &dyn CausalLm, requests: &[Request], config: &EngineConfig) -> Vec<Done> {
    let mut engine = engine(model, config);
    for request in requests {
        engine.add(request.clone()).unwrap();
    }
    let mut results = Results::new();
    engine.run(|output| collect(&mut results, output)).unwrap();
    results.into_values().collect()
}

pub fn kv_blocks(model: &dyn CausalLm, blocks: usize, block_size: usize) -> EngineConfig {
    let bytes = model.info().states.bytes_per_token().unwrap() * blocks * block_size;
    EngineConfig { kv_cache_memory: Some(bytes), block_size, ..EngineConfig::default() }
}

pub fn prompt(vocab: usize, len: usize, seed: u32) -> Vec<u32> {
    (0..len as u32).map(|i| (i.wrapping_mul(i) * 7 + i * seed + 3 * seed) % vocab as u32).collect()
}

/// Requests with sampling, different lengths and different parameters.
pub fn requests(model: &dyn CausalLm, lengths: &[usize], max_tokens: usize) -> Vec<Request> {
    let vocab = model.info().vocab_size;
    let request = |(i, &len): (usize, &usize)| Request {
        sampling: SamplingParams {
            temperature: 1.0,
            seed: i as u64,
            top_p: if i % 2 == 0 { 1.0 } else { 0.9 },
            repetition_penalty: if i % 3 == 0 { 1.2 } else { 1.0 },
            frequency_penalty: if i % 4 == 1 { 0.5 } else { 0.0 },
            allowed_token_ids: (i % 4 == 3).then(|| (0..vocab as u32).step_by(2).collect()),
            ..SamplingParams::default()
        },
        max_tokens: Some(max_tokens),
        ..Request::new(prompt(vocab, len, i as u32 + 1))
    };
    lengths.iter().enumerate().map(request).collect()
}
