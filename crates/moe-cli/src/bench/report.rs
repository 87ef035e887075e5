//! The result of a workload: figures for JSON, and a row of text.

use std::time::Duration;

use moe_engine::engine::Stats;
use moe_layer::ExpertTraffic;
use serde::Serialize;

use super::arrivals::{Arrivals, Spread};
use super::requests::Workload;

/// The figures of one run.
#[derive(Debug, Serialize)]
pub struct Figures {
    /// From the first submit to the last answer.
    pub seconds: f64,
    /// Tokens of prompts and answers per second.
    pub total_tok_s: f64,
    /// Tokens of answers per second.
    pub output_tok_s: f64,
    /// Tokens of all prompts.
    pub input_tokens: usize,
    /// New tokens that came.
    pub output_tokens: usize,
    /// Number of forward passes; of data-parallel ranks, the largest number.
    pub steps: u64,
    /// How often a sequence gave its KV blocks back, to be computed again later.
    pub preemptions: u64,
    /// From the beginning of the run, when all requests are submitted, to the first token of each.
    pub time_to_first_token_ms: Option<Spread>,
    /// From token to token of a request that runs; `None` if every request has one token.
    pub inter_token_latency_ms: Option<Spread>,
    /// The cost of experts in host memory; `None` if all are on the device.
    pub expert_traffic: Option<ExpertTraffic>,
}

impl Figures {
    /// The figures of a run that took this long; `before` and `after` are the engine's counters.
    pub fn new(
        workload: &Workload,
        elapsed: Duration,
        arrivals: Arrivals,
        before: &Stats,
        after: &Stats,
    ) -> Self {
        let input = workload.input_tokens();
        let output = arrivals.tokens();
        let seconds = elapsed.as_secs_f64();
        let (time_to_first_token_ms, inter_token_latency_ms) = arrivals.spreads();
        Self {
            seconds,
            total_tok_s: (input + output) as f64 / seconds,
            output_tok_s: output as f64 / seconds,
            input_tokens: input,
            output_tokens: output,
            steps: after.steps.saturating_sub(before.steps),
            preemptions: after.preemptions.saturating_sub(before.preemptions),
            time_to_first_token_ms,
            inter_token_latency_ms,
            expert_traffic: None,
        }
    }

    /// A row of the table, below [`HEAD`].
    pub fn row(&self, run: usize) -> String {
        let [first, between] = [&self.time_to_first_token_ms, &self.inter_token_latency_ms].map(cells);
        let [_, first_p50, first_p99, _] = first;
        let [mean, p50, p99, max] = between;
        format!(
            "{run:>3} {:>9.3} {:>11.1} {:>12.1} {:>7} {:>9} {first_p50:>12} {first_p99:>9} {mean:>12} {p50:>8} {p99:>8} {max:>8}",
            self.seconds, self.total_tok_s, self.output_tok_s, self.steps, self.preemptions,
        )
    }
}

/// The line above the rows of a table.
pub const HEAD: &str = "                                                             to the first token, ms     between tokens of a request, ms
run   seconds total tok/s output tok/s   steps preempted          p50       p99         mean      p50      p99      max";

fn cells(spread: &Option<Spread>) -> [String; 4] {
    let none = || "-".to_string();
    match spread {
        Some(s) => [s.mean, s.p50, s.p99, s.max].map(|ms| format!("{ms:.2}")),
        None => [none(), none(), none(), none()],
    }
}

/// The index of the fastest of several runs.
pub fn best(runs: &[Figures]) -> usize {
    let by_seconds = |(_, a): &(usize, &Figures), (_, b): &(usize, &Figures)| a.seconds.total_cmp(&b.seconds);
    runs.iter().enumerate().min_by(by_seconds).map_or(0, |(i, _)| i)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(seconds: f64, between: Option<Spread>) -> Figures {
        Figures {
            seconds,
            total_tok_s: 1234.5,
            output_tok_s: 234.5,
            input_tokens: 1000,
            output_tokens: 234,
            steps: 90,
            preemptions: 2,
            time_to_first_token_ms: Some(Spread { mean: 1., p50: 1., p99: 2., max: 2. }),
            inter_token_latency_ms: between,
            expert_traffic: None,
        }
    }

    #[test]
    fn the_fastest_run_counts() {
        let runs = [3., 1., 2.].map(|seconds| figures(seconds, None));
        assert_eq!(best(&runs), 1);
    }

    #[test]
    fn columns_stand_below_their_names() {
        let head = HEAD.lines().last().unwrap();
        let ends = |line: &str| {
            let end = |i: usize| line.len() == i + 1 || line.as_bytes()[i + 1] == b' ';
            (0..line.len()).filter(|&i| line.as_bytes()[i] != b' ' && end(i)).collect::<Vec<_>>()
        };
        let row = figures(12.3, Some(Spread { mean: 20.25, p50: 19., p99: 100., max: 1000. })).row(1);
        let names = ends(head);
        assert_eq!(ends(&row).len(), 12, "{row}");
        assert!(ends(&row).iter().all(|end| names.contains(end)), "\n{head}\n{row}");
        assert!(figures(1., None).row(2).ends_with('-'));
    }
}
