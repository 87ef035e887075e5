//! Counters and times of a run, in memory that does not grow with the number of requests.

use std::time::{Duration, Instant};

use moe_layer::ExpertHeat;
use serde::{Deserialize, Serialize};

/// Times in buckets that grow by a fifth: any percentile to within 10 %.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Histogram {
    counts: Vec<u64>,
    total: u64,
}

impl Histogram {
    /// The shortest time told apart, and the growth from bucket to bucket.
    const FIRST: f64 = 1e-6;
    const GROWTH: f64 = 1.2;
    const BUCKETS: usize = 128;

    fn new() -> Self {
        Self { counts: vec![0; Self::BUCKETS], total: 0 }
    }

    fn add(&mut self, time: Duration) {
        let bucket = (time.as_secs_f64() / Self::FIRST).max(1.0).ln() / Self::GROWTH.ln();
        self.counts[(bucket as usize).min(Self::BUCKETS - 1)] += 1;
        self.total += 1;
    }

    fn absorb(&mut self, other: &Self) {
        self.counts.iter_mut().zip(&other.counts).for_each(|(count, n)| *count += n);
        self.total += other.total;
    }

    /// Milliseconds below which `share` of the times lie; the middle of their bucket.
    fn percentile(&self, share: f64) -> Option<f64> {
        let wanted = ((self.total as f64 * share).ceil() as u64).max(1);
        let mut seen = 0;
        let bucket = self.counts.iter().position(|count| {
            seen += count;
            seen >= wanted
        })?;
        Some(1e3 * Self::FIRST * Self::GROWTH.powf(bucket as f64 + 0.5))
    }

    fn percentiles(&self) -> Option<Percentiles> {
        let of = |share| self.percentile(share);
        (self.total > 0).then_some(Percentiles { p50: of(0.5)?, p90: of(0.9)?, p99: of(0.99)? })
    }
}

/// Milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Percentiles {
    /// The median.
    pub p50: f64,
    /// Nine of ten are faster.
    pub p90: f64,
    /// 99 of 100 are faster.
    pub p99: f64,
}

/// What an engine counts while it runs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Stats {
    /// Of another process: when its counts arrived.
    #[serde(skip, default = "Instant::now")]
    start: Instant,
    requests: u64,
    finished: u64,
    prompt_tokens: u64,
    generated_tokens: u64,
    steps: u64,
    rows: u64,
    peak_kv_blocks: usize,
    time_to_first_token: Histogram,
    inter_token_latency: Histogram,
    /// Tokens by MoE layer and expert.
    heat: Vec<Vec<u64>>,
}

/// All that an engine counts.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Counters {
    pub stats: Stats,
    pub preemptions: u64,
    pub cached_tokens: u64,
    pub kv_blocks: usize,
    pub expert_counts_left_out: bool,
}

impl Counters {
    /// Adds those of another rank's engine.
    pub fn absorb(&mut self, other: &Self) {
        self.stats.absorb(&other.stats);
        self.preemptions += other.preemptions;
        self.cached_tokens += other.cached_tokens;
        self.kv_blocks += other.kv_blocks;
        self.expert_counts_left_out |= other.expert_counts_left_out;
    }

    pub fn summary(&self) -> Summary {
        let summary = self.stats.summary(self.preemptions, self.cached_tokens, self.kv_blocks);
        Summary { expert_counts_left_out: self.expert_counts_left_out, ..summary }
    }
}

/// A summary of [`Stats`].
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// Seconds since the engine was made.
    pub seconds: f64,
    /// Requests taken.
    pub requests: u64,
    /// Choices that have ended.
    pub finished: u64,
    /// Tokens of prompts.
    pub prompt_tokens: u64,
    /// Prompt tokens found in the prefix cache.
    pub cached_prompt_tokens: u64,
    /// New tokens.
    pub generated_tokens: u64,
    /// New tokens per second.
    pub generated_tok_s: f64,
    /// Forward passes.
    pub steps: u64,
    /// Mean rows of a forward pass.
    pub rows_per_step: f64,
    /// Times a sequence gave its KV blocks back.
    pub preemptions: u64,
    /// Most KV blocks in use, and how many there are.
    pub peak_kv_blocks: usize,
    /// KV blocks in all.
    pub kv_blocks: usize,
    /// From adding a request to its first token, ms.
    pub time_to_first_token_ms: Option<Percentiles>,
    /// From token to token of a choice, ms.
    pub inter_token_latency_ms: Option<Percentiles>,
    /// For each MoE layer the tokens of its hottest expert over the mean of all; empty unless experts are
    /// counted.
    pub hottest_expert_over_mean: Vec<f64>,
    /// Expert counts were asked for, but left out: a GPU makes them only at the price of its graphs.
    pub expert_counts_left_out: bool,
}

impl Default for Stats {
    fn default() -> Self {
        Self::new()
    }
}

impl Stats {
    pub(super) fn new() -> Self {
        Self {
            start: Instant::now(),
            requests: 0,
            finished: 0,
            prompt_tokens: 0,
            generated_tokens: 0,
            steps: 0,
            rows: 0,
            peak_kv_blocks: 0,
            time_to_first_token: Histogram::new(),
            inter_token_latency: Histogram::new(),
            heat: Vec::new(),
        }
    }

    pub(super) fn added(&mut self, prompt_tokens: usize) {
        self.requests += 1;
        self.prompt_tokens += prompt_tokens as u64;
    }

    pub(super) fn step(&mut self, rows: usize, (used, _): (usize, usize)) {
        self.steps += 1;
        self.rows += rows as u64;
        self.peak_kv_blocks = self.peak_kv_blocks.max(used);
    }

    pub(super) fn num_steps(&self) -> u64 {
        self.steps
    }

    /// A token of a sequence that was added then and had its previous token then.
    pub(super) fn token(&mut self, added: Instant, previous: Option<Instant>, now: Option<Instant>) {
        let Some(now) = now else { return };
        self.generated_tokens += 1;
        match previous {
            Some(previous) => self.inter_token_latency.add(now - previous),
            None => self.time_to_first_token.add(now - added),
        }
    }

    /// Adds the expert counts of a step.
    pub(super) fn heat(&mut self, step: &ExpertHeat) {
        self.heat.resize(step.layers(), Vec::new());
        for (layer, sums) in self.heat.iter_mut().enumerate() {
            let counts = step.layer(layer);
            sums.resize(counts.len(), 0);
            sums.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
        }
    }

    /// Adds what another rank's engine counted; steps that ran side by side count as one.
    pub(super) fn absorb(&mut self, other: &Stats) {
        self.start = self.start.min(other.start);
        self.requests += other.requests;
        self.finished += other.finished;
        self.prompt_tokens += other.prompt_tokens;
        self.generated_tokens += other.generated_tokens;
        self.steps = self.steps.max(other.steps);
        self.rows += other.rows;
        self.peak_kv_blocks += other.peak_kv_blocks;
        self.time_to_first_token.absorb(&other.time_to_first_token);
        self.inter_token_latency.absorb(&other.inter_token_latency);
        self.heat.resize(self.heat.len().max(other.heat.len()), Vec::new());
        for (sums, counts) in self.heat.iter_mut().zip(&other.heat) {
            sums.resize(counts.len(), 0);
            sums.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
        }
    }

    pub(super) fn finished(&mut self) {
        self.finished += 1;
    }

    pub(super) fn summary(&self, preemptions: u64, cached_prompt_tokens: u64, kv_blocks: usize) -> Summary {
        let seconds = self.start.elapsed().as_secs_f64();
        Summary {
            seconds,
            requests: self.requests,
            finished: self.finished,
            prompt_tokens: self.prompt_tokens,
            cached_prompt_tokens,
            generated_tokens: self.generated_tokens,
            generated_tok_s: self.generated_tokens as f64 / seconds,
            steps: self.steps,
            rows_per_step: self.rows as f64 / self.steps.max(1) as f64,
            preemptions,
            peak_kv_blocks: self.peak_kv_blocks,
            kv_blocks,
            time_to_first_token_ms: self.time_to_first_token.percentiles(),
            inter_token_latency_ms: self.inter_token_latency.percentiles(),
            hottest_expert_over_mean: self.heat.iter().map(|counts| hottest_over_mean(counts)).collect(),
            expert_counts_left_out: false,
        }
    }
}

fn hottest_over_mean(counts: &[u64]) -> f64 {
    let (sum, max) = (counts.iter().sum::<u64>(), counts.iter().max().copied().unwrap_or(0));
    (max * counts.len() as u64) as f64 / sum.max(1) as f64
}

impl std::fmt::Display for Summary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(
            f,
            "{} requests in {:.2} s: {} prompt tokens ({} cached), {} new tokens, {:.1} new tok/s",
            self.requests,
            self.seconds,
            self.prompt_tokens,
            self.cached_prompt_tokens,
            self.generated_tokens,
            self.generated_tok_s
        )?;
        writeln!(
            f,
            "{} steps of {:.1} rows, {} preemptions, KV cache at most {} of {} blocks",
            self.steps, self.rows_per_step, self.preemptions, self.peak_kv_blocks, self.kv_blocks
        )?;
        for (name, times) in
            [("first token", self.time_to_first_token_ms), ("token to token", self.inter_token_latency_ms)]
        {
            if let Some(Percentiles { p50, p90, p99 }) = times {
                writeln!(f, "{name}: {p50:.1} ms (median), {p90:.1} (90 %), {p99:.1} (99 %)")?;
            }
        }
        if !self.hottest_expert_over_mean.is_empty() {
            let layers: Vec<String> =
                self.hottest_expert_over_mean.iter().map(|ratio| format!("{ratio:.2}")).collect();
            writeln!(f, "hottest expert over the mean, by MoE layer: {}", layers.join(" "))?;
        }
        if self.expert_counts_left_out {
            writeln!(
                f,
                "expert counts: none on a GPU, where they would replace graphs and sampling; --expert-heat makes them"
            )?;
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
        let (mut stats, mut heat) = (Stats::new(), ExpertHeat::new(2, 4));
        heat.record(1, &[3, 3, 0, 1]);
        stats.heat(&heat);
        stats.heat(&heat);
        assert_eq!(stats.summary(0, 0, 1).hottest_expert_over_mean, [0.0, 2.0]);
    }

    #[test]
    fn counts_that_are_left_out_are_said() {
        use crate::engine::ExpertCounts::{Always, Off, WhereFree};
        let counts =
            [Off, WhereFree, Always].map(|c| [false, true].map(|gpu| (c.counts(gpu), c.left_out(gpu))));
        let (no, yes) = ((false, false), (true, false));
        assert_eq!(counts, [[no, no], [yes, (false, true)], [yes, yes]]);
        let said = |left_out| {
            let mut counters = Counters { expert_counts_left_out: left_out, ..Counters::default() };
            counters.absorb(&Counters::default());
            counters.summary().to_string().contains("expert counts: none on a GPU")
        };
        assert!(said(true) && !said(false));
    }

    #[test]
    fn percentiles_are_within_a_tenth() {
        let mut times = Histogram::new();
        assert!(times.percentiles().is_none());
        (1..=1000).for_each(|ms| times.add(Duration::from_millis(ms)));
        let got = times.percentiles().unwrap();
        for (got, want) in [(got.p50, 500.0), (got.p90, 900.0), (got.p99, 990.0)] {
            assert!((got / want - 1.0f64).abs() < 0.1, "{got} {want}");
        }
        times.add(Duration::MAX);
        times.add(Duration::ZERO);
        assert_eq!(times.total, 1002);
    }
}
