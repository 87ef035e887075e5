//! Which layers to move in this cycle.
//!
//! Moving a layer costs transfers. So a layer is only considered once its balance is worse than a threshold, and is
//! only moved if its new placement is better by a margin. Among these layers the best gain per byte goes first.
//! Balancedness is mean device load over peak device load; 1 is perfect.

use crate::error::{Error, Result, expect_below, expect_len};

/// When a layer is worth moving.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Thresholds {
    /// A layer becomes a candidate below this balancedness.
    pub enter: f64,
    /// A candidate stays one until it is at least this balanced (hysteresis; at least `enter`).
    pub leave: f64,
    /// Or below this share of the balancedness it had right after its last move.
    pub decay: f64,
    /// Least gain in PAR for a move.
    pub min_gain: f64,
    /// Most layers per cycle.
    pub max_layers: usize,
}

impl Default for Thresholds {
    fn default() -> Self {
        Self { enter: 0.85, leave: 0.95, decay: 0.9, min_gain: 0.02, max_layers: usize::MAX }
    }
}

/// A proposal for one layer, as the planner sees it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Proposal {
    /// PAR if the layer stays as it is.
    pub current_par: f64,
    /// PAR of the new placement on the same loads.
    pub new_par: f64,
    /// Bytes that the change transfers.
    pub bytes: u64,
}

/// Remembers, per layer, what the last move achieved and whether the layer is a candidate.
#[derive(Clone, Debug, PartialEq)]
pub struct Selector {
    thresholds: Thresholds,
    /// Balancedness right after the last move; `None` before the first.
    achieved: Vec<Option<f64>>,
    candidate: Vec<bool>,
}

impl Selector {
    /// A selector for `layers` layers that have never been moved; all start as candidates.
    ///
    /// # Errors
    /// If a threshold is not a number in its range.
    pub fn new(layers: usize, thresholds: Thresholds) -> Result<Self> {
        let share = |v: f64| (0.0..=1.0).contains(&v);
        let checks = [
            (share(thresholds.enter), "enter", "between 0 and 1"),
            (share(thresholds.leave) && thresholds.leave >= thresholds.enter, "leave", "between enter and 1"),
            (share(thresholds.decay), "decay", "between 0 and 1"),
            (thresholds.min_gain >= 0.0, "min_gain", "at least 0"),
        ];
        if let Some((_, what, must)) = checks.into_iter().find(|(ok, ..)| !ok) {
            return Err(Error::Setting { what, must });
        }
        Ok(Self { thresholds, achieved: vec![None; layers], candidate: vec![true; layers] })
    }

    /// Layers to move now, best gain per byte first. A free change (no bytes) beats any other.
    /// The caller reports each layer that was really moved with [`Selector::moved`].
    ///
    /// # Errors
    /// If there is not one proposal per layer, or a PAR is not a finite number above 0.
    pub fn select(&mut self, proposals: &[Proposal]) -> Result<Vec<usize>> {
        expect_len("proposals", self.candidate.len(), proposals.len())?;
        proposals.iter().try_for_each(|p| expect_par(p.current_par).and(expect_par(p.new_par)))?;
        let limits = self.thresholds;
        let mut chosen = Vec::new();
        for (layer, proposal) in proposals.iter().enumerate() {
            let balancedness = 1.0 / proposal.current_par;
            let decayed = self.achieved[layer].is_some_and(|best| balancedness < limits.decay * best);
            let was = self.candidate[layer];
            let bad = balancedness < if was { limits.leave } else { limits.enter };
            self.candidate[layer] = bad || decayed;
            let gain = proposal.current_par - proposal.new_par;
            let worth = gain > 0.0 && gain >= limits.min_gain;
            if worth && self.candidate[layer] {
                chosen.push((layer, gain, proposal.bytes));
            }
        }
        // gain_a / bytes_a > gain_b / bytes_b without the division, so that zero bytes is fine.
        chosen.sort_by(|a, b| (b.1 * a.2 as f64).total_cmp(&(a.1 * b.2 as f64)).then(a.0.cmp(&b.0)));
        chosen.truncate(limits.max_layers);
        Ok(chosen.into_iter().map(|(layer, ..)| layer).collect())
    }

    /// Reports that `layer` now has the placement with PAR `par`.
    ///
    /// # Errors
    /// If there is no such layer, or `par` is not a finite number above 0.
    pub fn moved(&mut self, layer: usize, par: f64) -> Result<()> {
        expect_below("layer", layer, self.candidate.len())?;
        expect_par(par)?;
        self.achieved[layer] = Some(1.0 / par);
        self.candidate[layer] = false;
        Ok(())
    }
}

/// Fails unless this is the PAR of some placement.
fn expect_par(par: f64) -> Result<()> {
    if par.is_finite() && par > 0.0 {
        return Ok(());
    }
    Err(Error::Setting { what: "a PAR", must: "a finite number above 0" })
}
