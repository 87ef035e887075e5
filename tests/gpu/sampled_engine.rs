//! Requests that need more than sampling from their logits, on the device: the engine gives the tokens and
//! log-probabilities of the CPU's engine, bit for bit, while slots are shared, sequences are preempted, and steps are
//! replayed or sampled by the host.
//!
//! The model is a table, so that logits have the same bits everywhere: the row of the last token.

use candle_core::{DType, Result};
use model_runtime::{
    CausalLm, KvCache, KvLayout, LogitsOut, ModelInfo, SamplingParams, StepViews, TokenLogprobs,
};
use model_runtime::{Observer, cuda::device_calls};
use moe_engine::engine::{Engine, EngineConfig, FinishReason, Request, Stats};
use moe_kernels::{Buffer, Exec, StepContext, embedding_into};
use std::collections::BTreeMap;

use crate::common::*;

const VOCAB: usize = 600;

struct Table {
    info: ModelInfo,
    rows: Buffer,
}

impl Table {
    fn new(rows: &Buffer, ex: &Exec) -> Self {
        let kv = KvLayout { num_kv_heads: 1, head_dim: 8, value_dim: None, dtype: DType::F32 };
        let info = ModelInfo {
            vocab_size: VOCAB,
            hidden_size: 8,
            num_layers: 1,
            max_context_len: 512,
            keys_depend_on_prompt_len: false,
            dtype: DType::F32,
            states: kv.layers(1),
            moe: None,
        };
        let mut on_device = ex.zeros(DType::F32, rows.dims()).unwrap();
        ex.copy_from_host(rows.view(), on_device.view_mut()).unwrap();
        Self { info, rows: on_device }
    }
}

impl CausalLm for Table {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn forward(
        &self,
        step: &StepViews,
        _: &mut KvCache,
        logits: LogitsOut,
        _: Option<&mut dyn Observer>,
        _: &mut StepContext,
        ex: &mut Exec,
    ) -> Result<()> {
        let mut all = ex.scratch(DType::F32, &[step.num_tokens(), VOCAB])?;
        embedding_into(self.rows.view(), step.token_ids, all.view_mut(), ex)?;
        embedding_into(all.view(), step.logits_rows, logits.rows, ex)?;
        let Some(scorer) = logits.scorer else { return Ok(()) };
        // The logits are scored in pieces of three rows.
        for first in (0..step.num_scored()).step_by(3) {
            let rows = step.scored_rows.narrow(first, 3.min(step.num_scored() - first))?;
            let mut piece = ex.scratch(DType::F32, &[rows.elem_count(), VOCAB])?;
            embedding_into(all.view(), rows, piece.view_mut(), ex)?;
            scorer.score(first, piece.view(), ex)?;
        }
        Ok(())
    }
}

fn table(rng: &mut Rng) -> Buffer {
    let logits = (0..VOCAB * VOCAB).map(|_| 5.0 * rng.float()).collect();
    Buffer::from_vec::<f32>(logits, &[VOCAB, VOCAB]).unwrap()
}

/// Requests of all kinds; the device can sample for every one of them.
fn requests(rng: &mut Rng, count: usize, max_tokens: usize) -> Vec<Request> {
    let request = |i: usize| {
        let id = |rng: &mut Rng| rng.below(VOCAB) as u32;
        let sampling = SamplingParams {
            temperature: [1.0, 0.0, 0.7][i % 3],
            top_k: [0, 40][i / 2 % 2],
            top_p: [1.0, 0.9, 1.0][i / 3 % 3],
            repetition_penalty: [1.0, 1.3, 1.0, 0.8][i % 4],
            presence_penalty: [0.0, 0.8][i / 3 % 2],
            frequency_penalty: [0.0, 0.0, 0.5][i / 2 % 3],
            logit_bias: if i % 5 == 2 { (0..9).map(|_| (id(rng), 4.0)).collect() } else { Vec::new() },
            logprobs: [None, None, Some(4)][i / 4 % 3],
            seed: i as u64,
            ..SamplingParams::default()
        };
        Request {
            sampling,
            max_tokens: Some(max_tokens - i % 3),
            min_tokens: [0, 6, 0][i % 3],
            // The stop tokens are a tenth of the vocabulary, so that sequences end early and at different steps.
            stop_token_ids: if i % 3 == 1 { (0..60).map(|_| id(rng)).collect() } else { Vec::new() },
            n: 1 + usize::from(i % 6 == 5),
            prompt_logprobs: [None, Some(0), None, Some(3), Some(32)][i % 5],
            ..Request::new((0..3 + i % 9).map(|_| id(rng)).collect())
        }
    };
    (0..count).map(request).collect()
}

/// Tokens, their log-probabilities, the log-probabilities of the prompt, and the reason for the end.
type Done = (Vec<u32>, Vec<TokenLogprobs>, Option<Vec<TokenLogprobs>>, Option<FinishReason>);

struct Ran {
    done: Vec<Done>,
    graph_steps: u64,
    stats: Stats,
}

fn run(table: &Buffer, requests: &[Request], config: &EngineConfig, ex: Exec) -> Ran {
    let model = Table::new(table, &ex);
    let mut engine = Engine::new(&model, ex, None, config).unwrap();
    for request in requests {
        engine.add(request.clone()).unwrap();
    }
    let mut done = BTreeMap::<_, Done>::new();
    let collect = |output: moe_engine::engine::Output| {
        let (tokens, logprobs, prompt, finish) = done.entry((output.request, output.choice)).or_default();
        tokens.extend(output.token_id);
        logprobs.extend(output.logprobs);
        *prompt = prompt.take().or(output.prompt_logprobs);
        *finish = output.finish;
    };
    engine.run(collect).unwrap();
    Ran { done: done.into_values().collect(), graph_steps: engine.num_graph_steps(), stats: engine.stats() }
}

fn config(max_num_seqs: usize, blocks: usize) -> EngineConfig {
    // 32 bytes of keys per token, blocks of 4 tokens.
    let kv_cache_memory = Some(blocks * 4 * 32);
    EngineConfig {
        max_num_seqs,
        kv_cache_memory,
        block_size: 4,
        max_model_len: Some(80),
        ..EngineConfig::default()
    }
}

#[test]
fn the_engine_draws_what_the_cpu_draws() {
    let mut rng = Rng::new();
    let table = table(&mut rng);
    let requests = requests(&mut rng, 48, 40);
    for (seqs, blocks, eager) in
        [(1, 400, false), (7, 400, false), (16, 400, true), (16, 400, false), (9, 40, false)]
    {
        let config = EngineConfig { enforce_eager: eager, ..config(seqs, blocks) };
        let cpu = run(&table, &requests, &config, Exec::cpu());
        let gpu = run(&table, &requests, &config, cuda());
        for (i, (gpu, cpu)) in gpu.done.iter().zip(&cpu.done).enumerate() {
            assert_eq!(gpu, cpu, "{seqs} sequences, {blocks} blocks, choice {i}");
        }
        assert_eq!(gpu.done.len(), cpu.done.len());
        assert_eq!(gpu.graph_steps > 0, !eager, "{}", gpu.graph_steps);
        assert_eq!(gpu.stats.preemptions > 0, blocks == 40, "{:?}", gpu.stats);
    }
}

/// Steps move to the host and back: a request that only the host can sample runs together with others for a while.
#[test]
fn steps_of_host_and_device_take_turns() {
    let mut rng = Rng::new();
    let table = table(&mut rng);
    let mut requests = requests(&mut rng, 40, 40);
    for (i, request) in requests.iter_mut().enumerate().filter(|(i, _)| i % 8 == 3) {
        request.max_tokens = Some(5);
        (request.min_tokens, request.stop_token_ids) = (0, Vec::new());
        request.sampling.allowed_token_ids =
            Some(if i % 16 == 3 { (7..90).collect() } else { (0..300).collect() });
    }
    // This is more than the device lists.
    requests[20].prompt_logprobs = Some(40);
    let config = config(8, 400);
    let cpu = run(&table, &requests, &config, Exec::cpu());
    let gpu = run(&table, &requests, &config, cuda());
    for (i, (gpu, cpu)) in gpu.done.iter().zip(&cpu.done).enumerate() {
        assert_eq!(gpu, cpu, "choice {i}");
    }
    assert!(gpu.graph_steps > 0);
}

/// A request with all of these is sampled by replayed graphs from its third token on.
#[test]
fn penalties_bias_minimum_and_logprobs_stay_on_the_device() {
    let mut rng = Rng::new();
    let table = table(&mut rng);
    let sampling = SamplingParams {
        temperature: 0.9,
        top_p: 0.95,
        repetition_penalty: 1.2,
        presence_penalty: 0.3,
        frequency_penalty: 0.2,
        logit_bias: vec![(3, 2.0)],
        logprobs: Some(20),
        ..SamplingParams::default()
    };
    let request = Request {
        sampling,
        max_tokens: Some(40),
        min_tokens: 30,
        stop_token_ids: vec![3],
        ..Request::new(vec![1, 2, 3])
    };
    let all = [request];
    let cpu = run(&table, &all, &config(4, 400), Exec::cpu());
    let gpu = run(&table, &all, &config(4, 400), cuda());
    assert_eq!(gpu.done, cpu.done);
    let tokens = gpu.done[0].0.len() as u64;
    assert!(tokens >= 30 && gpu.done[0].1.len() as u64 == tokens);
    assert!(gpu.graph_steps + 3 >= tokens, "{} of {tokens}", gpu.graph_steps);
}

/// Inside a step, with graphs and without, there is no allocation, and the only wait is for reading back the tokens.
/// This is counted where this project allocates and waits, and by the device's free memory.
#[test]
fn a_step_allocates_nothing_and_waits_for_its_tokens_only() {
    let mut rng = Rng::new();
    let table = table(&mut rng);
    for eager in [false, true] {
        let ex = cuda();
        let model = Table::new(&table, &ex);
        let config = EngineConfig { enforce_eager: eager, ..config(16, 400) };
        let mut engine = Engine::new(&model, ex.clone(), None, &config).unwrap();
        for mut request in requests(&mut rng, 16, 60) {
            (request.n, request.max_tokens, request.stop_token_ids) = (1, Some(60), Vec::new());
            engine.add(request).unwrap();
        }
        (0..6).for_each(|_| drop(engine.step().unwrap()));
        let memory = ex.device_memory().unwrap().0;
        let bytes = ex.workspace().bytes();
        let mut waits = 0;
        for step in 0..40 {
            let before = device_calls();
            assert_eq!(engine.step().unwrap().len(), 16);
            let after = device_calls();
            assert_eq!(
                (after.allocations, after.synchronizations),
                (before.allocations, before.synchronizations),
                "step {step}"
            );
            assert!(after.waits <= before.waits + 1, "step {step}: {before:?} {after:?}");
            waits += after.waits - before.waits;
        }
        assert_eq!((ex.device_memory().unwrap().0, ex.workspace().bytes()), (memory, bytes));
        println!("{waits} of 40 steps waited for their tokens");
        // This shows that the counters count: reading everything waits, and a new buffer is an allocation.
        let before = device_calls();
        ex.to_host(ex.zeros(DType::F32, &[4]).unwrap().view()).unwrap();
        let after = device_calls();
        assert_eq!(
            (after.allocations, after.synchronizations),
            (before.allocations + 1, before.synchronizations + 1)
        );
    }
}
