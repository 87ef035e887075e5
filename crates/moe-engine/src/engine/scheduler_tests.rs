//! Tests of the scheduler: which sequences it starts, and which rows they get in a step.

use std::sync::Arc;
use std::time::Instant;

use candle_core::Result;
use model_runtime::SequenceBlocks;

use super::budget::MixedLimit;
use super::config::SchedulingPolicy;
use super::plan::IN_FLIGHT;
use super::request::Request;
use super::scheduler::{Limits, Scheduler};
use super::sequence::Sequence;

fn sequence(number: u64, prompt_len: usize) -> Sequence {
    let request = Request::new(vec![1; prompt_len]);
    Sequence {
        key: (number, 0),
        sampling: request.sampling.clone(),
        tokens: request.prompt.clone(),
        request: Arc::new(request),
        in_flight: 0,
        max_len: 100,
        computed: 0,
        blocks: SequenceBlocks::default(),
        state: None,
        chain: Vec::new(),
        num_cached_tokens: None,
        text: None,
        constraint: None,
        bad_words: None,
        routed: None,
        prompt_logprobs: Vec::new(),
        prompt_logprobs_given: false,
        added: Instant::now(),
        last_token: None,
    }
}

/// Limits of sequences and rows only. The policy is first come, first served, and blocks have four tokens.
fn limits(max_num_seqs: usize, max_num_batched_tokens: usize) -> Limits {
    Limits {
        max_num_seqs,
        max_num_batched_tokens,
        mixed: MixedLimit::NONE,
        policy: SchedulingPolicy::Fcfs,
        block_size: 4,
        prefix_caching: false,
        num_states: None,
        num_saved: 0,
        prefix_by_prompt_len: false,
    }
}

#[test]
fn sequences_with_one_row_stand_first_in_the_step() -> Result<()> {
    let limits = limits(8, 8);
    let mut scheduler = Scheduler::new(limits, 32)?;
    [sequence(0, 1), sequence(1, 12), sequence(2, 1)].into_iter().for_each(|s| scheduler.add(s));
    let mut keys = Vec::new();
    for (decode_rows, rows) in [(1, &[1, 7][..]), (2, &[1, 1, 5]), (3, &[1, 1, 1])] {
        let Some(plan) = scheduler.schedule()? else { candle_core::bail!("nothing to compute") };
        assert_eq!(plan.step.decode_rows(), decode_rows);
        assert_eq!(plan.parts.iter().map(|part| part.rows).collect::<Vec<_>>(), rows);
        keys.push(plan.parts.iter().map(|part| part.key.0).collect::<Vec<_>>());
        for &(row, key) in &plan.in_flight {
            let first: usize = plan.parts.iter().take_while(|part| part.key != key).map(|p| p.rows).sum();
            assert_eq!(row, first, "the row whose token is in flight");
        }
    }
    // Sequences with one row come first, the longest of them before the others.
    assert_eq!(keys, [vec![0, 1], vec![0, 2, 1], vec![1, 0, 2]]);
    Ok(())
}

#[test]
fn rows_of_a_prompt_are_scored_by_the_token_behind_them() -> Result<()> {
    let mut scheduler = Scheduler::new(limits(8, 4), 32)?;
    let prompt: Vec<u32> = (10..20).collect();
    let request = Request { prompt_logprobs: Some(0), ..Request::new(prompt.clone()) };
    scheduler.add(Sequence { tokens: prompt.clone(), request: Arc::new(request), ..sequence(0, 10) });
    // The last token of the prompt has no next token to score, but a token is sampled from its row.
    for (scored, logits) in [(&prompt[1..5], 0), (&prompt[5..9], 0), (&prompt[9..], 1), (&[], 1)] {
        let Some(plan) = scheduler.schedule()? else { candle_core::bail!("nothing to compute") };
        assert_eq!((plan.step.scored_tokens(0), plan.step.num_logits()), (scored, logits));
    }
    Ok(())
}

/// Returns the order in which sequences with these numbers of output tokens start, and the number of preemptions. Two
/// run at a time, on four KV blocks of four tokens.
fn order_of_starts(policy: SchedulingPolicy, output: &[usize]) -> Result<(Vec<u64>, u64)> {
    let limits = Limits { policy, ..limits(2, 8) };
    let mut scheduler = Scheduler::new(limits, 4)?;
    for (number, output) in output.iter().enumerate() {
        scheduler.add(Sequence { max_len: 2 + output, ..sequence(number as u64, 2) });
    }
    let mut started = Vec::new();
    while let Some(plan) = scheduler.schedule()? {
        for part in plan.parts {
            if part.start == 0 && !started.contains(&part.key.0) {
                started.push(part.key.0);
            }
            let Some(s) = scheduler.get_mut(part.key) else { candle_core::bail!("{:?} is gone", part.key) };
            s.tokens.iter_mut().filter(|id| **id == IN_FLIGHT).for_each(|id| *id = 1);
            s.in_flight = 0;
            if s.tokens.len() >= s.max_len {
                scheduler.remove(part.key)?;
            }
        }
    }
    assert_eq!(scheduler.kv_blocks().0, 0);
    Ok((started, scheduler.num_preemptions))
}

#[test]
fn the_last_start_by_length_and_others_as_they_came() -> Result<()> {
    let output = [3, 9, 3, 1, 9, 12];
    assert_eq!(order_of_starts(SchedulingPolicy::Fcfs, &output)?.0, [0, 1, 2, 3, 4, 5]);
    let (order, preemptions) = order_of_starts(SchedulingPolicy::LongestFirst, &output)?;
    // With two sequences at a time, the three shortest ones are kept for the end, the longest of them first. The others
    // start in the order in which they came.
    assert_eq!(order, [1, 4, 5, 0, 2, 3]);
    let order = order_of_starts(SchedulingPolicy::LongestFirst, &[3, 9])?.0;
    assert_eq!(order, [1, 0]);
    assert!(preemptions > 0, "sequences that gave way go on before new ones");
    Ok(())
}

#[test]
fn the_shortest_prompts_come_before_anything_decodes() -> Result<()> {
    let limits = Limits { policy: SchedulingPolicy::LongestFirst, ..limits(2, 64) };
    let mut scheduler = Scheduler::new(limits, 64)?;
    for (number, (prompt, output)) in [(9, 9), (3, 8), (7, 9), (4, 9), (1, 2), (1, 3)].into_iter().enumerate()
    {
        let sequence = Sequence { max_len: prompt + output, ..sequence(number as u64, prompt) };
        scheduler.add(sequence);
    }
    let order: Vec<u64> = scheduler.waiting.iter().map(|s| s.key.0).collect();
    assert_eq!(order, [0, 2, 3, 1, 5, 4]);
    let Some(plan) = scheduler.schedule()? else { candle_core::bail!("nothing to compute") };
    assert_eq!(plan.parts.iter().map(|part| part.key.0).collect::<Vec<_>>(), [3, 2]);
    // Both places are taken, so later sequences start in the order of the queue.
    scheduler.remove((3, 0))?;
    let Some(plan) = scheduler.schedule()? else { candle_core::bail!("nothing to compute") };
    assert_eq!(plan.parts.iter().map(|part| part.key.0).collect::<Vec<_>>(), [2, 0]);
    Ok(())
}

fn limited(max_num_seqs: usize) -> Result<Scheduler> {
    let mixed = MixedLimit { decode_rows: 2, prompt_rows: 5 };
    let limits = Limits { mixed, ..limits(max_num_seqs, 64) };
    Scheduler::new(limits, 64)
}

fn rows(scheduler: &mut Scheduler) -> Result<Vec<usize>> {
    let Some(plan) = scheduler.schedule()? else { candle_core::bail!("nothing to compute") };
    Ok(plan.parts.iter().map(|part| part.rows).collect())
}

#[test]
fn prompts_next_to_decoding_rows_have_a_limit_of_their_own() -> Result<()> {
    let mut scheduler = limited(4)?;
    [(0, 20), (1, 3), (2, 2), (3, 2), (4, 7), (5, 6)]
        .into_iter()
        .for_each(|(id, n)| scheduler.add(sequence(id, n)));
    // Nothing decodes in the first step, and all places are taken.
    assert_eq!(rows(&mut scheduler)?, [20, 3, 2, 2]);
    scheduler.remove((2, 0))?;
    scheduler.remove((3, 0))?;
    // In later steps every decoding row has a place.
    for expected in [vec![1, 1, 5], vec![1, 1, 2, 3], vec![1, 1, 1, 3]] {
        assert_eq!(rows(&mut scheduler)?, expected);
    }
    Ok(())
}

#[test]
fn a_burst_that_fills_the_places_has_no_limit() -> Result<()> {
    let mut scheduler = limited(8)?;
    [(0, 60), (1, 4), (2, 40), (3, 30)].into_iter().for_each(|(id, n)| scheduler.add(sequence(id, n)));
    assert_eq!(rows(&mut scheduler)?, [60, 4]);
    assert_eq!(rows(&mut scheduler)?, [1, 1, 40, 22]);
    // No sequence is waiting any more.
    assert_eq!(rows(&mut scheduler)?, [1, 1, 1, 5]);
    Ok(())
}

#[test]
fn a_prompt_that_others_need_is_waited_for() -> Result<()> {
    let cached = |limits: Limits| Scheduler::new(Limits { prefix_caching: true, ..limits }, 64);
    let mut scheduler = cached(limits(4, 64))?;
    (0..3).for_each(|number| scheduler.add(sequence(number, 10)));
    assert_eq!(rows(&mut scheduler)?, [10]);
    // The other sequences find two blocks of four tokens in the cache.
    assert_eq!(rows(&mut scheduler)?, [1, 2, 2]);
    assert_eq!(scheduler.num_cached_tokens, 16);
    // Less than half of the prompt is in common, so both start at once.
    let mut scheduler = cached(limits(4, 64))?;
    let other = [vec![1; 4], vec![2; 6]].concat();
    scheduler.add(sequence(0, 10));
    scheduler.add(Sequence { tokens: other, ..sequence(1, 10) });
    assert_eq!(rows(&mut scheduler)?, [10, 10]);
    // Without the cache nothing is shared.
    let mut scheduler = Scheduler::new(limits(4, 64), 64)?;
    (0..3).for_each(|number| scheduler.add(sequence(number, 10)));
    assert_eq!(rows(&mut scheduler)?, [10, 10, 10]);
    Ok(())
}
