//! What load balancing has done in a run.

use std::time::Duration;

use serde::Serialize;

/// Counters of load balancing.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct EplbStats {
    /// Plans that were carried out, also those that moved nothing.
    pub plans: u64,
    /// Plans that were given up: late, failed, or with a move that was rolled back.
    pub dropped: u64,
    /// Layers that have another placement.
    pub layers: u64,
    /// Experts that came to another rank.
    pub experts: u64,
    /// Bytes that travelled.
    pub bytes: u64,
    /// Layers' moves that were rolled back.
    pub rolled_back: u64,
    /// Seconds that steps waited for moves.
    pub stall: f64,
    /// The longest of these waits, in seconds.
    pub longest_stall: f64,
    /// Counted steps, and the sum over them of peak over mean load of ranks, each the mean of all layers.
    pub steps: u64,
    /// See [`mean_par`](Self::mean_par).
    pub par_sum: f64,
    /// The same with the first placement.
    pub static_par_sum: f64,
}

impl EplbStats {
    /// Peak over mean load of ranks, mean of all layers and steps; 1 is perfect.
    pub fn mean_par(&self) -> f64 {
        self.par_sum / self.steps.max(1) as f64
    }

    /// What it would have been with the placement that the run began with.
    pub fn static_par(&self) -> f64 {
        self.static_par_sum / self.steps.max(1) as f64
    }

    pub(super) fn waited(&mut self, took: Duration) {
        self.stall += took.as_secs_f64();
        self.longest_stall = self.longest_stall.max(took.as_secs_f64());
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
            "expert moves: {} plans ({} dropped), {} layers, {} experts, {} bytes, {} rolled back; steps waited {:.1} ms, at most {:.2} ms",
            self.plans,
            self.dropped,
            self.layers,
            self.experts,
            self.bytes,
            self.rolled_back,
            1e3 * self.stall,
            1e3 * self.longest_stall
        )
    }
}
