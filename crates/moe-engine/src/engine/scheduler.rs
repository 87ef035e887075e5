//! Scheduling: which rows of which sequences run in the next step.
//!
//! As in vLLM's v1 scheduler there are no prefill and decode phases: a sequence has tokens that are not computed yet,
//! one or a whole prompt, and each step computes some of them. Sequences that run go first, in the order in which they
//! started, then waiting ones are admitted while rows, places and KV blocks last, in the order of the policy. If a
//! running sequence needs a block and none is free, the one that started last gives all of its blocks back and waits
//! again, to be recomputed from its tokens. All of it is a function of the requests and the limits: no clock, no
//! randomness.

use std::cmp::Reverse;
use std::collections::VecDeque;

use candle_core::Result;
use model_runtime::{BlockAllocator, PrefixId, Step};

use super::budget::{Budget, MixedLimit};
use super::config::SchedulingPolicy;
use super::plan::{IN_FLIGHT, Key, Part, Plan};
use super::sequence::Sequence;
use super::start_order;
use super::states::{Copies, FreeStates, PrefixStart};
use super::stats::SavedStates;

/// What bounds a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub max_num_seqs: usize,
    pub max_num_batched_tokens: usize,
    pub mixed: MixedLimit,
    pub policy: SchedulingPolicy,
    pub block_size: usize,
    pub prefix_caching: bool,
    /// Sequences that there are recurrent states for; `None`: layers have none.
    pub num_states: Option<usize>,
    /// Recurrent states that can be saved at the ends of prefixes.
    pub num_saved: usize,
    /// Prefixes are shared only between prompts of one length.
    pub prefix_by_prompt_len: bool,
}

pub(super) struct Scheduler {
    limits: Limits,
    /// Preempted sequences come first, then the sequences that never ran, in the order of the policy. With
    /// `LongestFirst` these are all but the shortest ones ([`start_order`]) in the order of arrival, and then the
    /// shortest ones, the longest of them first.
    pub waiting: VecDeque<Sequence>,
    /// Whether the first sequences are being started. This ends when no place or no block is free.
    filling: bool,
    pub running: Vec<Sequence>,
    pub allocator: BlockAllocator,
    states: FreeStates,
    pub num_preemptions: u64,
    pub num_cached_tokens: u64,
    /// How often a sequence began with a saved state, and how many states were saved.
    pub num_restored: u64,
    pub num_saves: u64,
}

impl Scheduler {
    pub fn new(limits: Limits, num_blocks: usize) -> Result<Self> {
        let allocator = match limits.prefix_caching {
            true => BlockAllocator::with_prefix_cache(num_blocks, limits.block_size, limits.num_saved)?,
            false => BlockAllocator::new(num_blocks)?,
        };
        Ok(Self {
            limits,
            waiting: VecDeque::new(),
            filling: true,
            running: Vec::new(),
            allocator,
            states: FreeStates::new(limits.num_states.unwrap_or(0)),
            num_preemptions: 0,
            num_cached_tokens: 0,
            num_restored: 0,
            num_saves: 0,
        })
    }

    /// Takes a new sequence.
    pub fn add(&mut self, sequence: Sequence) {
        match self.limits.policy {
            SchedulingPolicy::Fcfs => self.waiting.push_back(sequence),
            SchedulingPolicy::LongestFirst => {
                start_order::insert(&mut self.waiting, sequence, self.limits.max_num_seqs);
            }
        }
    }

    /// The next step; `None` if no sequence has anything to compute.
    pub fn schedule(&mut self) -> Result<Option<Plan>> {
        self.announce()?;
        self.filling |= self.running.is_empty();
        let Limits { max_num_batched_tokens, mixed, .. } = self.limits;
        let decoding = self.running.iter().filter(|sequence| sequence.remaining() == 1).count();
        // At the beginning of a burst of requests the limit does not apply: without it the places are filled in few
        // steps, and with it in many.
        let fills = self.filling && !self.waiting.is_empty();
        let limited = decoding >= mixed.decode_rows && !fills;
        let prompts = if limited { mixed.prompt_rows } else { usize::MAX };
        let mut budget = Budget { rows: max_num_batched_tokens, prompts };
        let mut rows = Vec::with_capacity(self.running.len());
        let preempted = self.continue_running(&mut rows, &mut budget)?;
        if !preempted {
            self.admit(&mut rows, &mut budget)?;
        }
        if rows.iter().all(|&rows| rows == 0) { Ok(None) } else { self.plan(&rows).map(Some) }
    }

    /// Chooses the rows of running sequences, in order. Returns whether a sequence was preempted.
    fn continue_running(&mut self, rows: &mut Vec<usize>, budget: &mut Budget) -> Result<bool> {
        let before = self.num_preemptions;
        while rows.len() < self.running.len() {
            let i = rows.len();
            let block_size = self.limits.block_size;
            let sequence = &mut self.running[i];
            let remaining = sequence.remaining();
            let want = sequence.rows(budget.rows(remaining), block_size);
            if sequence.blocks.reserve(sequence.computed + want, block_size, &mut self.allocator) {
                rows.push(want);
                budget.spend(remaining, want);
            } else {
                // If the last sequence is this one, the loop ends.
                self.preempt_last()?;
            }
        }
        Ok(self.num_preemptions > before)
    }

    fn preempt_last(&mut self) -> Result<()> {
        if let Some(mut last) = self.running.pop() {
            last.release(&mut self.allocator, &mut self.states)?;
            self.waiting.push_front(last);
            self.num_preemptions += 1;
        }
        Ok(())
    }

    /// Starts waiting sequences.
    fn admit(&mut self, rows: &mut Vec<usize>, budget: &mut Budget) -> Result<()> {
        let Limits { block_size, max_num_seqs, .. } = self.limits;
        while budget.rows > 0 && budget.prompts > 0 {
            if self.running.len() >= max_num_seqs {
                self.filling = false;
                break;
            }
            let place = match self.limits.policy {
                SchedulingPolicy::LongestFirst if self.filling => {
                    start_order::first(&self.waiting, max_num_seqs)
                }
                _ => 0,
            };
            let Some(mut sequence) = self.waiting.remove(place) else { break };
            let has_state = self.begin(&mut sequence);
            let remaining = sequence.remaining();
            let want = sequence.rows(budget.rows(remaining), block_size);
            let end = sequence.computed + want;
            let waits = self.waits_for_prefix(&sequence);
            if waits || !has_state || !sequence.blocks.reserve(end, block_size, &mut self.allocator) {
                sequence.release(&mut self.allocator, &mut self.states)?;
                self.waiting.insert(place, sequence);
                self.filling &= waits;
                break;
            }
            let cached = sequence.computed;
            if sequence.num_cached_tokens.is_none() {
                sequence.num_cached_tokens = Some(cached);
                self.num_cached_tokens += cached as u64;
            }
            rows.push(want);
            budget.spend(remaining, want);
            self.running.push(sequence);
        }
        Ok(())
    }

    /// Whether a running sequence is about to compute at least half of the tokens that this one needs. If this one
    /// started now, it would compute them too; a few steps later it finds them in the prefix cache.
    fn waits_for_prefix(&self, sequence: &Sequence) -> bool {
        if !self.limits.prefix_caching || !sequence.reads_prefixes() {
            return false;
        }
        let root = self.root(sequence);
        let shares = |other: &Sequence| {
            let common = sequence.common_prefix(other, self.limits.block_size);
            common > sequence.computed && 2 * (common - sequence.computed) >= sequence.remaining()
        };
        let computes = |other: &&Sequence| other.remaining() > 1 && other.writes_prefixes();
        self.running.iter().filter(computes).any(|other| self.root(other) == root && shares(other))
    }

    /// Gives a waiting sequence the blocks of a cached prefix, and a recurrent state if layers keep any. Returns false
    /// if it needs a state and none is free.
    fn begin(&mut self, sequence: &mut Sequence) -> bool {
        let Limits { block_size, num_states, num_saved, .. } = self.limits;
        let needs_state = num_states.is_some();
        if needs_state && self.states.is_empty() {
            return false;
        }
        let start = match self.limits.prefix_caching {
            true => sequence.take_prefix(self.root(sequence), block_size, needs_state, &mut self.allocator),
            false => PrefixStart::default(),
        };
        if needs_state {
            let last_edge = (sequence.prompt_len() - 1) / block_size * block_size;
            let saves = num_saved > 0 && sequence.writes_prefixes();
            sequence.state = self.states.take(&start, saves.then_some(last_edge));
        }
        true
    }

    /// Assembles the step, and counts its rows as computed.
    fn plan(&mut self, rows: &[usize]) -> Result<Plan> {
        // Sequences that decode come first, as `Step::decode_rows` requires, and the longest of them before the others.
        // A GPU begins attention in the order of rows, so a long row that began last would make the step wait.
        let mut order: Vec<usize> = (0..rows.len()).filter(|&i| rows[i] > 0).collect();
        let length = |i: usize| if rows[i] > 1 { 0 } else { self.running[i].computed };
        order.sort_by_key(|&i| (rows[i] > 1, Reverse(length(i))));
        let block_size = self.limits.block_size;
        let mut step = Step::new(order.iter().map(|&i| self.running[i].step(rows[i])), block_size)?;
        let mut copies = Copies::default();
        let mut parts = Vec::new();
        let mut in_flight = Vec::new();
        let mut first = 0;
        for i in order {
            let s = &mut self.running[i];
            let rows = rows[i];
            let start = s.computed;
            s.computed += rows;
            if let Some(state) = &mut s.state {
                copies.add(state, s.computed, block_size, &mut self.allocator);
            }
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
        if self.limits.num_states.is_some() {
            self.num_restored += copies.restores.len() as u64;
            self.num_saves += copies.saves.len() as u64;
            step = step.with_states(copies.states, copies.restores, copies.saves)?;
        }
        Ok(Plan { step, parts, in_flight })
    }

    /// Announces blocks that are full, so that other sequences can share them.
    fn announce(&mut self) -> Result<()> {
        for i in 0..self.running.len() {
            let root = self.root(&self.running[i]);
            if self.limits.prefix_caching && self.running[i].writes_prefixes() {
                self.running[i].announce(root, self.limits.block_size, &mut self.allocator)?;
            }
        }
        Ok(())
    }

    fn root(&self, sequence: &Sequence) -> PrefixId {
        let salt = if self.limits.prefix_by_prompt_len { sequence.prompt_len() as u32 } else { 0 };
        PrefixId::root(salt)
    }

    /// Whether a choice of this request waits or runs.
    pub fn knows(&self, request: u64) -> bool {
        self.running.iter().chain(&self.waiting).any(|s| s.key.0 == request)
    }

    /// The sequence, waiting or running; `None` once it has ended.
    pub fn get_mut(&mut self, key: Key) -> Option<&mut Sequence> {
        match self.running.iter().position(|s| s.key == key) {
            Some(i) => self.running.get_mut(i),
            None => self.waiting.iter_mut().find(|s| s.key == key),
        }
    }

    /// Removes a sequence and gives its blocks back. Its rows that are still running write to these blocks before any
    /// later step does.
    pub fn remove(&mut self, key: Key) -> Result<Option<Sequence>> {
        let found = match self.running.iter().position(|s| s.key == key) {
            Some(i) => Some(self.running.remove(i)),
            None => self.waiting.iter().position(|s| s.key == key).and_then(|i| self.waiting.remove(i)),
        };
        let Some(mut sequence) = found else { return Ok(None) };
        if self.limits.prefix_caching && sequence.writes_prefixes() {
            sequence.announce(self.root(&sequence), self.limits.block_size, &mut self.allocator)?;
        }
        sequence.release(&mut self.allocator, &mut self.states)?;
        Ok(Some(sequence))
    }

    /// Counters of saved states, which take this many bytes each.
    pub fn saved_states(&self, bytes: usize) -> SavedStates {
        let (kept, evicted) = self.allocator.saved_states();
        let bytes = (kept * bytes) as u64;
        SavedStates { restored: self.num_restored, saved: self.num_saves, evicted, bytes }
    }

    /// KV blocks in use and in all.
    pub fn kv_blocks(&self) -> (usize, usize) {
        let all = self.allocator.num_blocks();
        (all - self.allocator.num_free(), all)
    }
}
