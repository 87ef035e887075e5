//! The counters of load balancing in a run.

use std::collections::VecDeque;
use std::time::Duration;

use serde::Serialize;

/// Counters of load balancing.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct EplbStats {
    /// Plans that were carried out, even if they moved nothing.
    pub plans: u64,
    /// Plans that were dropped: late, failed, or with a move that was rolled back.
    pub dropped: u64,
    /// Number of layers that got another placement.
    pub layers: u64,
    /// Sums over the layers that moved: peak over mean load before the move, and the value that the plan expected after
    /// it, both from the loads of the plan.
    pub planned_par_sums: [f64; 2],
    /// Number of experts that moved to another rank.
    pub experts: u64,
    /// Number of bytes that were sent.
    pub bytes: u64,
    /// Number of layers' moves that were rolled back.
    pub rolled_back: u64,
    /// Number of rounds of moves; a round is between two steps.
    pub rounds: u64,
    /// Seconds that the host waited for rounds. A GPU may compute in that time.
    pub stall: f64,
    /// The median wait for a round, in seconds, of the last 65,536 rounds.
    pub median_stall: f64,
    /// The 99th percentile of the waits, in seconds, of the last 65,536 rounds.
    pub p99_stall: f64,
    /// The longest wait of all rounds, in seconds.
    pub longest_stall: f64,
    /// Counted steps, and the sum over them of peak over mean load of ranks, each the mean of all layers.
    pub steps: u64,
    /// See [`mean_par`](Self::mean_par).
    pub par_sum: f64,
    /// `par_sum` with the first placement.
    pub static_par_sum: f64,
}

impl EplbStats {
    /// Peak over mean load of ranks, mean of all layers and steps; 1 is perfect.
    pub fn mean_par(&self) -> f64 {
        self.par_sum / self.steps.max(1) as f64
    }

    /// What [`mean_par`](Self::mean_par) would have been with the placement that the run began with.
    pub fn static_par(&self) -> f64 {
        self.static_par_sum / self.steps.max(1) as f64
    }

    pub(super) fn waited(&mut self, took: Duration) {
        self.rounds += 1;
        self.stall += took.as_secs_f64();
        self.longest_stall = self.longest_stall.max(took.as_secs_f64());
    }
}

/// How long steps waited, for the last rounds.
#[derive(Debug, Default)]
pub(super) struct Waits(VecDeque<f64>);

impl Waits {
    /// Number of rounds that are kept.
    const MOST: usize = 1 << 16;

    pub fn add(&mut self, took: Duration) {
        if self.0.len() == Self::MOST {
            self.0.pop_front();
        }
        self.0.push_back(took.as_secs_f64());
    }

    /// The seconds that the given shares of the rounds did not exceed; 0 before the first round.
    pub fn quantiles<const N: usize>(&self, shares: [f64; N]) -> [f64; N] {
        let mut sorted: Vec<f64> = self.0.iter().copied().collect();
        sorted.sort_by(f64::total_cmp);
        let at = |share: f64| ((share * sorted.len() as f64).ceil() as usize).saturating_sub(1);
        shares.map(|share| sorted.get(at(share)).copied().unwrap_or(0.0))
    }
}

impl std::fmt::Display for EplbStats {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(
            f,
            "expert balance: peak over mean load {:.3} ({:.3} without moves) over {} steps",
            self.mean_par(),
            self.static_par(),
            self.steps
        )?;
        writeln!(
            f,
            "expert moves: {} plans ({} dropped), {} layers, {} experts, {} bytes, {} rolled back",
            self.plans, self.dropped, self.layers, self.experts, self.bytes, self.rolled_back
        )?;
        if self.layers > 0 {
            let [from, to] = self.planned_par_sums.map(|sum| sum / self.layers as f64);
            writeln!(
                f,
                "expert plans: peak over mean load of the layers that moved {from:.3}, {to:.3} expected"
            )?;
        }
        writeln!(
            f,
            "waits for moves: {} rounds, {:.1} ms in all, median {:.3} ms, p99 {:.3} ms, at most {:.3} ms",
            self.rounds,
            1e3 * self.stall,
            1e3 * self.median_stall,
            1e3 * self.p99_stall,
            1e3 * self.longest_stall
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_the_last_rounds() {
        let mut waits = Waits::default();
        assert_eq!(waits.quantiles([0.5, 0.99]), [0.0, 0.0]);
        (1..=200).rev().for_each(|ms| waits.add(Duration::from_millis(ms)));
        assert_eq!(waits.quantiles([0.5, 0.99, 1.0]), [0.1, 0.198, 0.2]);
        (0..Waits::MOST).for_each(|_| waits.add(Duration::from_millis(7)));
        assert_eq!(waits.quantiles([0.0, 1.0]), [0.007, 0.007]);
    }
}
