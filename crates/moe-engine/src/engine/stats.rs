//! Counters and times of a run, in memory that does not grow with the number of requests.

use std::time::{Duration, Instant};

use moe_layer::ExpertHeat;
use serde::{Deserialize, Serialize};

/// Times in buckets that grow by a fifth, so any percentile is accurate to 10 %. The values are the numbers of times in
/// each bucket.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Histogram(Vec<u64>);

impl Histogram {
    /// The shortest time (in seconds) that is distinguished, and the growth from bucket to bucket.
    const FIRST: f64 = 1e-6;
    const GROWTH: f64 = 1.2;
    const BUCKETS: usize = 128;

    /// Whether these can be buckets of times.
    pub(super) fn is_valid(&self) -> bool {
        [0, Self::BUCKETS].contains(&self.0.len())
    }

    fn add(&mut self, time: Duration) {
        let bucket = (time.as_secs_f64() / Self::FIRST).max(1.0).ln() / Self::GROWTH.ln();
        self.0.resize(Self::BUCKETS, 0);
        self.0[(bucket as usize).min(Self::BUCKETS - 1)] += 1;
    }

    /// The time in milliseconds below which `share` of the times are (the middle of its bucket). `None` without any
    /// time.
    pub fn percentile(&self, share: f64) -> Option<f64> {
        let wanted = ((self.0.iter().sum::<u64>() as f64 * share).ceil() as u64).max(1);
        let mut seen = 0;
        let bucket = self.0.iter().position(|count| {
            seen += count;
            seen >= wanted
        })?;
        Some(1e3 * Self::FIRST * Self::GROWTH.powf(bucket as f64 + 0.5))
    }
}

/// The recurrent states that are saved for the prefix cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedStates {
    /// Times a sequence began with a saved state, also one that had to be computed again.
    pub restored: u64,
    /// States that were saved.
    pub saved: u64,
    /// States that were given up for others.
    pub evicted: u64,
    /// Bytes of the states that can be restored now, on one rank of each group.
    pub bytes: u64,
}

impl SavedStates {
    fn absorb(&mut self, other: &Self) {
        self.restored = self.restored.saturating_add(other.restored);
        self.saved = self.saved.saturating_add(other.saved);
        self.evicted = self.evicted.saturating_add(other.evicted);
        self.bytes = self.bytes.saturating_add(other.bytes);
    }
}

/// The counters of a running engine.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Stats {
    /// Seconds since the engine was made.
    pub seconds: f64,
    /// Number of requests added.
    pub requests: u64,
    /// Choices that have ended.
    pub finished: u64,
    /// Tokens of prompts.
    pub prompt_tokens: u64,
    /// Prompt tokens found in the prefix cache.
    pub cached_prompt_tokens: u64,
    /// Saved recurrent states, where layers keep any.
    pub saved_states: SavedStates,
    /// New tokens.
    pub generated_tokens: u64,
    /// Number of forward passes; of several ranks, the largest number.
    pub steps: u64,
    /// Rows of all forward passes.
    pub rows: u64,
    /// Number of CUDA graphs that were recorded; of several ranks, the largest number.
    pub graphs: u64,
    /// Number of steps that replayed one.
    pub graph_steps: u64,
    /// Times a sequence gave its KV blocks back.
    pub preemptions: u64,
    /// The largest number of KV blocks in use.
    pub peak_kv_blocks: usize,
    /// Number of KV blocks.
    pub kv_blocks: usize,
    /// From adding a request to its first token.
    pub time_to_first_token: Histogram,
    /// From token to token of a choice.
    pub inter_token_latency: Histogram,
    /// Tokens by MoE layer and expert; empty unless experts are counted.
    pub expert_load: Vec<Vec<u64>>,
}

impl Stats {
    /// Adds a step with this number of rows and of KV blocks in use.
    pub(super) fn add_step(&mut self, rows: usize, used_blocks: usize) {
        self.steps += 1;
        self.rows += rows as u64;
        self.peak_kv_blocks = self.peak_kv_blocks.max(used_blocks);
    }

    /// Adds a token at the time `now`, of a sequence that was added at `added` and got its last token at `previous`.
    pub(super) fn add_token(&mut self, added: Instant, previous: Option<Instant>, now: Instant) {
        self.generated_tokens += 1;
        match previous {
            Some(previous) => self.inter_token_latency.add(now - previous),
            None => self.time_to_first_token.add(now - added),
        }
    }

    /// Adds the expert counts of a step.
    pub(super) fn add_expert_load(&mut self, step: &ExpertHeat) {
        self.expert_load.resize(step.layers(), Vec::new());
        for (layer, sums) in self.expert_load.iter_mut().enumerate() {
            add_counts(sums, step.layer(layer));
        }
    }

    /// Adds the counters of another rank's engine. Ranks run steps in parallel, so the rank with the most steps counts.
    pub(super) fn absorb(&mut self, other: &Stats) {
        self.seconds = self.seconds.max(other.seconds);
        self.requests = self.requests.saturating_add(other.requests);
        self.finished = self.finished.saturating_add(other.finished);
        self.prompt_tokens = self.prompt_tokens.saturating_add(other.prompt_tokens);
        self.cached_prompt_tokens = self.cached_prompt_tokens.saturating_add(other.cached_prompt_tokens);
        self.saved_states.absorb(&other.saved_states);
        self.generated_tokens = self.generated_tokens.saturating_add(other.generated_tokens);
        self.steps = self.steps.max(other.steps);
        self.rows = self.rows.saturating_add(other.rows);
        self.graphs = self.graphs.max(other.graphs);
        self.graph_steps = self.graph_steps.max(other.graph_steps);
        self.preemptions = self.preemptions.saturating_add(other.preemptions);
        self.peak_kv_blocks = self.peak_kv_blocks.saturating_add(other.peak_kv_blocks);
        self.kv_blocks = self.kv_blocks.saturating_add(other.kv_blocks);
        add_counts(&mut self.time_to_first_token.0, &other.time_to_first_token.0);
        add_counts(&mut self.inter_token_latency.0, &other.inter_token_latency.0);
        self.expert_load.resize(self.expert_load.len().max(other.expert_load.len()), Vec::new());
        for (sums, counts) in self.expert_load.iter_mut().zip(&other.expert_load) {
            add_counts(sums, counts);
        }
    }

    /// For each MoE layer: the tokens of the expert with the most tokens over the mean of all experts; empty unless
    /// experts are counted.
    pub fn hottest_expert_over_mean(&self) -> Vec<f64> {
        self.expert_load.iter().map(|counts| hottest_over_mean(counts)).collect()
    }
}

fn add_counts(sums: &mut Vec<u64>, counts: &[u64]) {
    sums.resize(sums.len().max(counts.len()), 0);
    sums.iter_mut().zip(counts).for_each(|(sum, count)| *sum = sum.saturating_add(*count));
}

fn hottest_over_mean(counts: &[u64]) -> f64 {
    let sum = counts.iter().sum::<u64>();
    let max = counts.iter().max().copied().unwrap_or(0);
    (max * counts.len() as u64) as f64 / sum.max(1) as f64
}

impl std::fmt::Display for Stats {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(
            f,
            "{} requests in {:.2} s: {} prompt tokens ({} cached), {} new tokens, {:.1} new tok/s",
            self.requests,
            self.seconds,
            self.prompt_tokens,
            self.cached_prompt_tokens,
            self.generated_tokens,
            self.generated_tokens as f64 / self.seconds
        )?;
        let rows_per_step = self.rows as f64 / self.steps.max(1) as f64;
        writeln!(
            f,
            "{} steps of {rows_per_step:.1} rows, {} preemptions, KV cache at most {} of {} blocks",
            self.steps, self.preemptions, self.peak_kv_blocks, self.kv_blocks
        )?;
        let SavedStates { restored, saved, evicted, bytes } = self.saved_states;
        if saved > 0 {
            let mib = bytes as f64 / (1 << 20) as f64;
            writeln!(
                f,
                "{saved} states of prefixes saved, {restored} restored, {evicted} given up for others, {mib:.1} MiB kept"
            )?;
        }
        if self.graphs > 0 {
            writeln!(f, "{} CUDA graphs recorded, {} steps replayed one", self.graphs, self.graph_steps)?;
        }
        for (name, times) in
            [("first token", &self.time_to_first_token), ("token to token", &self.inter_token_latency)]
        {
            if let [Some(p50), Some(p90), Some(p99)] = [0.5, 0.9, 0.99].map(|share| times.percentile(share)) {
                writeln!(f, "{name}: {p50:.1} ms (median), {p90:.1} (90 %), {p99:.1} (99 %)")?;
            }
        }
        if !self.expert_load.is_empty() {
            let layers: Vec<String> =
                self.hottest_expert_over_mean().iter().map(|ratio| format!("{ratio:.2}")).collect();
            writeln!(f, "hottest expert over the mean, by MoE layer: {}", layers.join(" "))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hottest_expert_is_seen() {
        assert_eq!(hottest_over_mean(&[1, 5, 2, 0]), 2.5);
        assert_eq!(hottest_over_mean(&[0, 0]), 0.0);
        let mut stats = Stats::default();
        let mut counts = ExpertHeat::new(2, 4);
        counts.record(1, &[3, 3, 0, 1]);
        stats.add_expert_load(&counts);
        stats.add_expert_load(&counts);
        assert_eq!(stats.hottest_expert_over_mean(), [0.0, 2.0]);
    }

    #[test]
    fn percentiles_are_within_a_tenth() {
        let mut times = Histogram::default();
        assert!(times.percentile(0.5).is_none());
        (1..=1000).for_each(|ms| times.add(Duration::from_millis(ms)));
        for (share, want) in [(0.5, 500.0), (0.9, 900.0), (0.99, 990.0)] {
            let got = times.percentile(share).unwrap();
            assert!((got / want - 1.0f64).abs() < 0.1, "{got} {want}");
        }
        times.add(Duration::MAX);
        times.add(Duration::ZERO);
        assert_eq!(times.0.iter().sum::<u64>(), 1002);
    }
}
