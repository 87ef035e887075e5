//! Scheduling: which rows of which sequences run in the next step.
//!
//! As in vLLM's v1 scheduler there are no prefill and decode phases: a sequence has tokens that
//! are not computed yet, one or a whole prompt, and each step computes some of them. Sequences
//! that run go first, in the order in which they started, then waiting ones are admitted while rows, places
//! and KV blocks last, in the order of the policy. If a running sequence needs a block and none is free, the one that started
//! last gives all of its blocks back and waits again, to be recomputed from its tokens. All of it
//! is a function of the requests and the limits: no clock, no randomness.

use std::cmp::Reverse;
use std::collections::VecDeque;

use candle_core::Result;
use model_runtime::{BlockAllocator, PrefixId, Step};

use super::config::SchedulingPolicy;
use super::sequence::{IN_FLIGHT, Key, Sequence};

/// What bounds a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub max_num_seqs: usize,
    pub max_num_batched_tokens: usize,
    pub policy: SchedulingPolicy,
    pub block_size: usize,
    pub prefix_caching: bool,
    /// Prefixes are shared only between prompts of one length.
    pub prefix_by_prompt_len: bool,
}

/// The rows of one sequence in a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub key: Key,
    /// Position of its first row.
    pub start: usize,
    pub rows: usize,
    /// Whether its last row samples a token, and which output position that is.
    pub samples: Option<usize>,
}

/// A step and whose rows it has.
pub(super) struct Plan {
    pub step: Step,
    pub parts: Vec<Part>,
    /// Rows whose token is in flight, with the sequence that it was sampled for.
    pub in_flight: Vec<(usize, Key)>,
}

pub(super) struct Scheduler {
    limits: Limits,
    /// Sequences that gave way stand before those that never ran; these are in the order of the policy.
    pub waiting: VecDeque<Sequence>,
    pub running: Vec<Sequence>,
    pub allocator: BlockAllocator,
    pub num_preemptions: u64,
    pub num_cached_tokens: u64,
}

impl Scheduler {
    pub fn new(limits: Limits, num_blocks: usize) -> Result<Self> {
        let allocator = match limits.prefix_caching {
            true => BlockAllocator::with_prefix_cache(num_blocks, limits.block_size)?,
            false => BlockAllocator::new(num_blocks)?,
        };
        Ok(Self {
            limits,
            waiting: VecDeque::new(),
            running: Vec::new(),
            allocator,
            num_preemptions: 0,
            num_cached_tokens: 0,
        })
    }

    /// Takes a new sequence.
    pub fn add(&mut self, sequence: Sequence) {
        let place = match self.limits.policy {
            SchedulingPolicy::Fcfs => self.waiting.len(),
            SchedulingPolicy::LongestFirst => {
                let longest = sequence.most_output();
                self.waiting.partition_point(|other| other.has_run() || other.most_output() >= longest)
            }
        };
        self.waiting.insert(place, sequence);
    }

    /// The next step; `None` if no sequence has anything to compute.
    pub fn schedule(&mut self) -> Result<Option<Plan>> {
        self.announce()?;
        let mut budget = self.limits.max_num_batched_tokens;
        let mut rows = Vec::with_capacity(self.running.len());
        let preempted = self.continue_running(&mut rows, &mut budget)?;
        if !preempted {
            self.admit(&mut rows, &mut budget)?;
        }
        if rows.iter().all(|&rows| rows == 0) { Ok(None) } else { self.plan(&rows).map(Some) }
    }

    /// Rows for running sequences, in order; whether one had to give way.
    fn continue_running(&mut self, rows: &mut Vec<usize>, budget: &mut usize) -> Result<bool> {
        let before = self.num_preemptions;
        while rows.len() < self.running.len() {
            let (i, block_size) = (rows.len(), self.limits.block_size);
            let sequence = &mut self.running[i];
            let want = sequence.remaining().min(*budget);
            if sequence.blocks.reserve(sequence.computed + want, block_size, &mut self.allocator) {
                rows.push(want);
                *budget -= want;
            } else {
                // The last one, which may be this one; then the loop ends.
                self.preempt_last()?;
            }
        }
        Ok(self.num_preemptions > before)
    }

    fn preempt_last(&mut self) -> Result<()> {
        if let Some(mut last) = self.running.pop() {
            last.release(&mut self.allocator)?;
            self.waiting.push_front(last);
            self.num_preemptions += 1;
        }
        Ok(())
    }

    /// Starts waiting sequences in order.
    fn admit(&mut self, rows: &mut Vec<usize>, budget: &mut usize) -> Result<()> {
        let Limits { block_size, max_num_seqs, .. } = self.limits;
        while *budget > 0 && self.running.len() < max_num_seqs {
            let Some(mut sequence) = self.waiting.pop_front() else { break };
            if self.limits.prefix_caching {
                sequence.take_prefix(self.root(&sequence), block_size, &mut self.allocator);
            }
            let want = sequence.remaining().min(*budget);
            if !sequence.blocks.reserve(sequence.computed + want, block_size, &mut self.allocator) {
                sequence.release(&mut self.allocator)?;
                self.waiting.push_front(sequence);
                break;
            }
            let cached = sequence.computed;
            if sequence.num_cached_tokens.is_none() {
                sequence.num_cached_tokens = Some(cached);
                self.num_cached_tokens += cached as u64;
            }
            rows.push(want);
            *budget -= want;
            self.running.push(sequence);
        }
        Ok(())
    }

    /// Assembles the step and moves the sequences on.
    fn plan(&mut self, rows: &[usize]) -> Result<Plan> {
        // Sequences that decode come first: Step::decode_rows. Of them the longest first: a GPU begins attention in the order of
        // rows, and a long row that begins last is waited for.
        let mut order: Vec<usize> = (0..rows.len()).filter(|&i| rows[i] > 0).collect();
        let length = |i: usize| if rows[i] > 1 { 0 } else { self.running[i].computed };
        order.sort_by_key(|&i| (rows[i] > 1, Reverse(length(i))));
        let step = Step::new(order.iter().map(|&i| self.running[i].step(rows[i])), self.limits.block_size)?;
        let (mut parts, mut in_flight, mut first) = (Vec::new(), Vec::new(), 0);
        for i in order {
            let (s, rows) = (&mut self.running[i], rows[i]);
            let start = s.computed;
            s.computed += rows;
            if s.tokens[start..s.computed].last() == Some(&IN_FLIGHT) {
                in_flight.push((first + rows - 1, s.key));
            }
            first += rows;
            let samples = (s.computed == s.tokens.len()).then(|| s.generated());
            if samples.is_some() {
                s.tokens.push(IN_FLIGHT);
                s.in_flight += 1;
            }
            parts.push(Part { key: s.key, start, rows, samples });
        }
        Ok(Plan { step, parts, in_flight })
    }

    /// Announces blocks that are full, so that other sequences can share them.
    fn announce(&mut self) -> Result<()> {
        if self.limits.prefix_caching {
            for i in 0..self.running.len() {
                let root = self.root(&self.running[i]);
                self.running[i].announce(root, self.limits.block_size, &mut self.allocator)?;
            }
        }
        Ok(())
    }

    fn root(&self, sequence: &Sequence) -> PrefixId {
        let salt = if self.limits.prefix_by_prompt_len { sequence.prompt_len() as u32 } else { 0 };
        PrefixId::root(salt)
    }

    /// The sequence, waiting or running; `None` once it has ended.
    pub fn get_mut(&mut self, key: Key) -> Option<&mut Sequence> {
        match self.running.iter().position(|s| s.key == key) {
            Some(i) => self.running.get_mut(i),
            None => self.waiting.iter_mut().find(|s| s.key == key),
        }
    }

    /// Takes a sequence out and gives its blocks back. Rows of it that are still under way write
    /// to those blocks before any later step does.
    pub fn remove(&mut self, key: Key) -> Result<Option<Sequence>> {
        let found = match self.running.iter().position(|s| s.key == key) {
            Some(i) => Some(self.running.remove(i)),
            None => self.waiting.iter().position(|s| s.key == key).and_then(|i| self.waiting.remove(i)),
        };
        let Some(mut sequence) = found else { return Ok(None) };
        if self.limits.prefix_caching {
            sequence.announce(self.root(&sequence), self.limits.block_size, &mut self.allocator)?;
        }
        sequence.release(&mut self.allocator)?;
        Ok(Some(sequence))
    }

    /// KV blocks in use and in all.
    pub fn kv_blocks(&self) -> (usize, usize) {
        let all = self.allocator.num_blocks();
        (all - self.allocator.num_free(), all)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Instant;

    use model_runtime::SequenceBlocks;

    use super::super::request::Request;
    use super::*;

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
            chain: Vec::new(),
            num_cached_tokens: None,
            text: None,
            constraint: None,
            routed: None,
            prompt_logprobs: Vec::new(),
            prompt_logprobs_given: false,
            added: Instant::now(),
            last_token: None,
        }
    }

    #[test]
    fn sequences_with_one_row_stand_first_in_the_step() -> Result<()> {
        let limits = Limits {
            max_num_seqs: 8,
            max_num_batched_tokens: 8,
            block_size: 4,
            policy: SchedulingPolicy::Fcfs,
            prefix_caching: false,
            prefix_by_prompt_len: false,
        };
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
        // The longest of those with one row before the others.
        assert_eq!(keys, [vec![0, 1], vec![0, 2, 1], vec![1, 0, 2]]);
        Ok(())
    }

    /// The order in which sequences of these lengths of output start, two at a time, on four KV blocks of four tokens.
    fn order_of_starts(policy: SchedulingPolicy, output: &[usize]) -> Result<(Vec<u64>, u64)> {
        let (max_num_seqs, max_num_batched_tokens, block_size) = (2, 8, 4);
        let (prefix_caching, prefix_by_prompt_len) = (false, false);
        let limits = Limits {
            max_num_seqs,
            max_num_batched_tokens,
            policy,
            block_size,
            prefix_caching,
            prefix_by_prompt_len,
        };
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
                let Some(s) = scheduler.get_mut(part.key) else {
                    candle_core::bail!("{:?} is gone", part.key)
                };
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
    fn the_longest_start_first_and_those_of_one_length_as_they_came() -> Result<()> {
        let output = [3, 9, 3, 1, 9, 12];
        assert_eq!(order_of_starts(SchedulingPolicy::Fcfs, &output)?.0, [0, 1, 2, 3, 4, 5]);
        let (order, preemptions) = order_of_starts(SchedulingPolicy::LongestFirst, &output)?;
        assert_eq!(order, [5, 1, 4, 0, 2, 3]);
        assert!(preemptions > 0, "sequences that gave way go on before new ones");
        Ok(())
    }
}
