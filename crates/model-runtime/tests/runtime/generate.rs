//! Batched generation: what a request gets does not depend on how it is run.

use std::ops::ControlFlow;

use candle_core::{DType, Result};
use model_runtime::generate::{PromptError, check_prompt};
use model_runtime::{
    CausalLm, Exec, FinishReason, GenerateOptions, GenerateRequest, Generated, KvCache, LogitsRows, Observed,
    Observer, SamplingParams, SequenceStep, Step, TokenEvent, View, generate, run_step,
};

use crate::message;
use crate::tiny::{Tiny, VOCAB};

const DYNAMIC: &str = r#"{"rope_scaling": {"type": "dynamic", "factor": 4.0}}"#;

fn prompt(seed: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| (i * i * 7 + i * seed + seed) % VOCAB as u32).collect()
}

fn request(seed: u32, len: usize, max_new_tokens: usize) -> GenerateRequest {
    let sampling = SamplingParams { temperature: 1.0, seed: seed as u64, ..SamplingParams::default() };
    GenerateRequest { prompt: prompt(seed, len), sampling, max_new_tokens, stop_ids: vec![] }
}

fn run(
    model: &Tiny,
    requests: &[GenerateRequest],
    options: GenerateOptions,
    blocks: usize,
    block_size: usize,
) -> Result<Vec<Generated>> {
    let mut kv = KvCache::new(model.info().kv, blocks, block_size)?;
    generate(model, requests, &options, &mut kv, &mut Exec::cpu(), |_| ControlFlow::Continue(()))
}

#[test]
fn a_request_does_not_depend_on_batch_chunks_or_blocks() -> Result<()> {
    for (dtype, rope, window) in [(DType::F32, DYNAMIC, None), (DType::BF16, "{}", Some(9))] {
        let model = Tiny::new(dtype, rope, window)?;
        // The dynamic case crosses max_position_embeddings = 64.
        let len = if rope == DYNAMIC { 70 } else { 30 };
        let requests: Vec<_> =
            [(1, 5), (2, len), (3, 1), (4, 17)].map(|(seed, n)| request(seed, n, 20)).into();
        let alone: Vec<Generated> = requests
            .iter()
            .map(|r| Ok(run(&model, std::slice::from_ref(r), GenerateOptions::default(), 100, 16)?.remove(0)))
            .collect::<Result<_>>()?;
        assert!(alone.iter().all(|g| g.token_ids.len() == 20 && g.finish_reason == FinishReason::Length));
        assert_ne!(alone[0].token_ids, alone[1].token_ids);
        for (max_step_tokens, max_num_seqs, blocks, block_size) in
            [(512, 256, 100, 16), (7, 256, 400, 1), (3, 2, 40, 5), (1, 256, 100, 64), (33, 3, 13, 7)]
        {
            let options = GenerateOptions { max_step_tokens, max_num_seqs, max_model_len: None };
            assert_eq!(
                run(&model, &requests, options, blocks, block_size)?,
                alone,
                "{options:?} {blocks} {block_size}"
            );
        }
    }
    Ok(())
}

/// Collects logits and hidden states by position.
#[derive(Default)]
struct Seen(Vec<(Observed, Vec<f32>)>);

impl Observer for Seen {
    fn observe(&mut self, what: Observed, data: View) -> Result<()> {
        self.0.push((what, data.cpu::<f32>()?.to_vec()));
        Ok(())
    }
}

/// Logits of all positions of a sequence that is run in parts, [T * V].
fn teacher_forced(
    model: &Tiny,
    tokens: &[u32],
    cuts: &[usize],
    ex: &mut Exec,
    mut seen: Option<&mut Seen>,
) -> Result<Vec<f32>> {
    let mut kv = KvCache::new(model.info().kv, 20, 8)?;
    let blocks: Vec<u32> = (0..20).rev().collect();
    let mut logits = Vec::new();
    let mut start = 0;
    for &end in cuts.iter().chain([&tokens.len()]) {
        let step = Step::new(
            [SequenceStep {
                token_ids: &tokens[start..end],
                start,
                prompt_len: tokens.len(),
                blocks: &blocks,
                logits: LogitsRows::All,
            }],
            8,
        )?;
        let observer = seen.as_deref_mut().map(|s| s as &mut dyn Observer);
        logits.extend(run_step(model, &step, &mut kv, observer, ex)?.view().cpu::<f32>()?);
        start = end;
    }
    Ok(logits)
}

#[test]
fn logits_bits_do_not_depend_on_chunking_threads_or_observer() -> Result<()> {
    let model = Tiny::new(DType::F32, DYNAMIC, None)?;
    let tokens = prompt(9, 90);
    let whole = teacher_forced(&model, &tokens, &[], &mut Exec::cpu().with_threads(1)?, None)?;
    assert_eq!(whole.len(), 90 * VOCAB);
    let every: Vec<usize> = (1..90).collect();
    for cuts in [&[1usize][..], &[64], &[3, 65, 66], &every] {
        assert!(teacher_forced(&model, &tokens, cuts, &mut Exec::cpu(), None)? == whole, "{cuts:?}");
    }
    let mut seen = Seen::default();
    let observed = teacher_forced(&model, &tokens, &[], &mut Exec::cpu().with_threads(3)?, Some(&mut seen))?;
    assert!(observed == whole);
    let kinds: Vec<Observed> = seen.0.iter().map(|(what, _)| *what).collect();
    assert_eq!(kinds, [0, 1, 2].map(Observed::HiddenStates));
    assert!(seen.0.iter().all(|(_, rows)| rows.len() == 90 * model.info().hidden_size));
    Ok(())
}

#[test]
fn tokens_stream_and_stop() -> Result<()> {
    let model = Tiny::new(DType::F32, "{}", None)?;
    let free = run(&model, &[request(1, 5, 12)], GenerateOptions::default(), 10, 16)?.remove(0);
    // Stop at the fourth token that was generated freely (at its first occurrence).
    let stop = free.token_ids[3];
    let first = free.token_ids.iter().position(|&t| t == stop).unwrap();
    let stopping = GenerateRequest { stop_ids: vec![stop], ..request(1, 5, 12) };
    let mut events: Vec<TokenEvent> = Vec::new();
    let mut kv = KvCache::new(model.info().kv, 20, 16)?;
    let requests = [stopping, request(1, 5, 12), request(8, 3, 0)];
    let out = generate(&model, &requests, &GenerateOptions::default(), &mut kv, &mut Exec::cpu(), |e| {
        events.push(e);
        if e.request == 1 && e.position == 1 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })?;
    assert_eq!(
        out[0],
        Generated { token_ids: free.token_ids[..=first].to_vec(), finish_reason: FinishReason::Stop }
    );
    assert_eq!(
        out[1],
        Generated { token_ids: free.token_ids[..2].to_vec(), finish_reason: FinishReason::Cancelled }
    );
    assert_eq!(out[2], Generated { token_ids: vec![], finish_reason: FinishReason::Length });
    let streamed =
        |request| events.iter().filter(|e| e.request == request).map(|e| e.token_id).collect::<Vec<_>>();
    assert_eq!(streamed(0), out[0].token_ids);
    assert_eq!(streamed(1), out[1].token_ids);
    let last = events.iter().rfind(|e| e.request == 0).unwrap();
    assert_eq!((last.position, last.finish_reason), (first, Some(FinishReason::Stop)));
    Ok(())
}

#[test]
fn the_context_ends_a_request() -> Result<()> {
    let model = Tiny::new(DType::F32, "{}", None)?;
    let out = run(&model, &[request(2, 60, 100)], GenerateOptions::default(), 4, 16)?.remove(0);
    assert_eq!((out.token_ids.len(), out.finish_reason), (4, FinishReason::Length));
    let options = GenerateOptions { max_model_len: Some(62), ..GenerateOptions::default() };
    assert_eq!(run(&model, &[request(2, 60, 100)], options, 4, 16)?[0].token_ids, out.token_ids[..2]);
    Ok(())
}

#[test]
fn bad_prompts_are_refused_before_anything_runs() -> Result<()> {
    let model = Tiny::new(DType::F32, "{}", None)?;
    let run =
        |r: GenerateRequest| message(run(&model, &[request(1, 4, 2), r], GenerateOptions::default(), 4, 16));
    assert!(run(request(1, 0, 5)).contains("request 1: the prompt is empty"));
    let e = run(request(1, 64, 5));
    assert!(
        e.contains(
            "the prompt of 64 tokens is longer than the context: at most 63 fit the model length of 64"
        ),
        "{e}"
    );
    let unknown = GenerateRequest { prompt: vec![0, VOCAB as u32], ..request(1, 1, 5) };
    assert!(run(unknown).contains("token id 37 at position 1 is outside of the vocabulary of 37"));
    let wrong = SamplingParams { top_p: 2.0, ..SamplingParams::default() };
    assert!(
        run(GenerateRequest { sampling: wrong, ..request(1, 1, 5) }).contains("request 1: top_p must be")
    );
    let small = super::generate::run(&model, &[request(1, 30, 20)], GenerateOptions::default(), 2, 16);
    assert!(message(small).contains("it needs 4 KV blocks of 16 tokens, the cache has 2"));
    let none = GenerateOptions { max_step_tokens: 0, ..GenerateOptions::default() };
    assert!(message(super::generate::run(&model, &[], none, 2, 16)).contains("must be at least 1"));

    assert_eq!(check_prompt(&[], 5, 10), Err(PromptError::Empty));
    assert_eq!(check_prompt(&[4; 9], 5, 10), Ok(()));
    assert_eq!(check_prompt(&[4; 10], 5, 10), Err(PromptError::TooLong { len: 10, max_model_len: 10 }));
    Ok(())
}

#[test]
fn no_requests_is_no_error() -> Result<()> {
    let model = Tiny::new(DType::F32, "{}", None)?;
    assert!(run(&model, &[], GenerateOptions::default(), 1, 16)?.is_empty());
    Ok(())
}

#[test]
fn sampling_sees_the_prompt_and_the_output() -> Result<()> {
    let model = Tiny::new(DType::F32, "{}", None)?;
    let generated = |sampling, max_new_tokens| -> Result<Vec<u32>> {
        let request = GenerateRequest { prompt: vec![3, 9], sampling, max_new_tokens, stop_ids: vec![] };
        Ok(run(&model, &[request], GenerateOptions::default(), 8, 16)?.remove(0).token_ids)
    };
    let allowed = |ids: &[u32]| SamplingParams {
        allowed_token_ids: Some(ids.to_vec()),
        logit_bias: ids.iter().map(|&id| (id, 50.0)).collect(),
        ..SamplingParams::default()
    };
    // Of 3 and 4, only 3 is in the prompt.
    let repeated = SamplingParams { repetition_penalty: 10.0, ..allowed(&[3, 4]) };
    assert_eq!(generated(repeated, 1)?, [4]);
    // Where neither may follow itself, they alternate.
    let words = SamplingParams { bad_words: vec![vec![3, 3], vec![4, 4]], ..allowed(&[3, 4]) };
    let tokens = generated(words, 12)?;
    assert!(tokens.windows(2).all(|pair| pair[0] != pair[1]), "{tokens:?}");
    Ok(())
}
