//! Heat: the token counts of the experts, collected step by step.
//!
//! A ring keeps the last steps `[steps, layers, experts]`, and running sums give the window's
//! aggregate without a pass over it. Steps of the wrong stage neither record nor advance, so a
//! decode-only window holds that many decode steps however many prefills came between.

use crate::error::{Error, Result, entries, expect_below, expect_len, expect_some};
use crate::loads::Loads;

/// What a step was doing.
// This enum is exhaustive: a step has prompt tokens or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "lowercase"))]
pub enum Stage {
    /// Prompt tokens (alone or mixed with decoding).
    Prefill,
    /// One token per running sequence.
    Decode,
}

/// Which steps are collected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum StageFilter {
    /// Every step.
    #[default]
    All,
    /// Prefill steps only.
    Prefill,
    /// Decode steps only.
    Decode,
}

impl StageFilter {
    /// Whether a step of this stage is collected.
    pub fn admits(self, stage: Stage) -> bool {
        match self {
            Self::All => true,
            Self::Prefill => stage == Stage::Prefill,
            Self::Decode => stage == Stage::Decode,
        }
    }
}

/// How a kernel reports tokens per expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum CountKind {
    /// Tokens of each expert.
    #[default]
    Counts,
    /// Tokens of each expert and all before it (group offsets).
    Cumulative,
}

/// Collects token counts of one rank, or of all after merging.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Heat {
    layers: usize,
    experts: usize,
    capacity: usize,
    filter: StageFilter,
    /// Ring `[capacity, layers, experts]`.
    ring: Vec<u64>,
    /// Sums over the steps in the ring, `[layers, experts]`.
    window: Vec<u64>,
    /// Completed steps since the last clear.
    steps: u64,
    /// Whether a step is open and collects.
    open: bool,
}

/// Tokens of a window that a counter cannot hold.
const TOO_MANY: Error = Error::Setting { what: "the token counts of a window", must: "below 2^64 together" };

impl Heat {
    /// A collector that remembers `capacity` steps.
    ///
    /// # Errors
    /// If there is no layer, expert or step to collect, or they are more than memory can hold.
    pub fn new(layers: usize, experts: usize, capacity: usize, filter: StageFilter) -> Result<Self> {
        expect_some(&[("layers", layers), ("experts", experts), ("steps", capacity)])?;
        Ok(Self {
            layers,
            experts,
            capacity,
            filter,
            ring: vec![0; entries("counts of steps", &[capacity, layers, experts])?],
            window: vec![0; layers * experts],
            steps: 0,
            open: false,
        })
    }

    /// Opens a step. Returns whether it is collected; if not, recording into it does nothing.
    pub fn begin_step(&mut self, stage: Stage) -> bool {
        self.open = self.filter.admits(stage);
        if self.open {
            let size = self.layers * self.experts;
            let oldest = &mut self.ring[self.steps as usize % self.capacity * size..][..size];
            for (sum, old) in self.window.iter_mut().zip(oldest) {
                *sum -= *old;
                *old = 0;
            }
        }
        self.open
    }

    /// Adds one layer's tokens per logical expert.
    ///
    /// # Errors
    /// If the layer is out of range, the slice has the wrong length, cumulative counts fall, or the counts of a window
    /// are more than 64 bits hold. Nothing is recorded then.
    pub fn record(&mut self, layer: usize, counts: &[u64], kind: CountKind) -> Result<()> {
        self.check(layer, counts.len(), self.experts, "counts")?;
        self.add(layer, counts, kind, |expert| expert)
    }

    /// Adds one layer's tokens per physical slot, folded to logical experts by `phy2log`.
    ///
    /// # Errors
    /// The errors of [`Heat::record`], and if `phy2log` names an unknown expert.
    pub fn record_physical(
        &mut self,
        layer: usize,
        counts: &[u64],
        kind: CountKind,
        phy2log: &[u32],
    ) -> Result<()> {
        self.check(layer, counts.len(), phy2log.len(), "slot counts")?;
        phy2log.iter().try_for_each(|&e| expect_below("expert", e as usize, self.experts))?;
        self.add(layer, counts, kind, |slot| phy2log[slot] as usize)
    }

    fn check(&self, layer: usize, got: usize, expected: usize, what: &'static str) -> Result<()> {
        expect_below("layer", layer, self.layers)?;
        expect_len(what, expected, got)
    }

    fn add(
        &mut self,
        layer: usize,
        counts: &[u64],
        kind: CountKind,
        expert_of: impl Fn(usize) -> usize,
    ) -> Result<()> {
        if kind == CountKind::Cumulative && !counts.is_sorted() {
            return Err(Error::Setting { what: "cumulative counts", must: "non-decreasing" });
        }
        if !self.open {
            return Ok(());
        }
        let step = self.steps as usize % self.capacity;
        let ring = &mut self.ring[(step * self.layers + layer) * self.experts..][..self.experts];
        let window = &mut self.window[layer * self.experts..][..self.experts];
        let total = match kind {
            CountKind::Counts => counts.iter().try_fold(0u64, |sum, count| sum.checked_add(*count)),
            CountKind::Cumulative => Some(counts.last().copied().unwrap_or(0)),
        };
        let most = window.iter().copied().max().unwrap_or(0);
        if total.and_then(|total| total.checked_add(most)).is_none() {
            return Err(TOO_MANY);
        }
        let mut before = 0;
        for (i, &count) in counts.iter().enumerate() {
            let tokens = match kind {
                CountKind::Counts => count,
                CountKind::Cumulative => count - std::mem::replace(&mut before, count),
            };
            ring[expert_of(i)] += tokens;
            window[expert_of(i)] += tokens;
        }
        Ok(())
    }

    /// Completes the open step.
    pub fn end_step(&mut self) {
        self.steps += u64::from(std::mem::take(&mut self.open));
    }

    /// Steps completed since the last clear, including those that the ring has forgotten.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Steps that the ring holds.
    pub fn held(&self) -> usize {
        (self.steps as usize).min(self.capacity)
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.ring.fill(0);
        self.window.fill(0);
        self.steps = 0;
        self.open = false;
    }

    /// Adds what another rank collected over the same steps.
    ///
    /// # Errors
    /// If the two collectors differ in shape or in completed steps, or the counts are more than 64 bits hold. Nothing
    /// is added then.
    pub fn merge(&mut self, other: &Self) -> Result<()> {
        expect_len("layers of a rank", self.layers, other.layers)?;
        expect_len("experts of a rank", self.experts, other.experts)?;
        expect_len("window of a rank", self.capacity, other.capacity)?;
        expect_len("steps of a rank", self.steps as usize, other.steps as usize)?;
        // No count of a step is above the count of the window.
        if self.window.iter().zip(&other.window).any(|(a, b)| a.checked_add(*b).is_none()) {
            return Err(TOO_MANY);
        }
        self.ring.iter_mut().zip(&other.ring).for_each(|(a, b)| *a += b);
        self.window.iter_mut().zip(&other.window).for_each(|(a, b)| *a += b);
        Ok(())
    }

    /// The window summed.
    ///
    /// # Errors
    /// Never for a collector made by [`Heat::new`].
    pub fn aggregate(&self) -> Result<Loads> {
        let values: Vec<f64> = self.window.iter().map(|&v| v as f64).collect();
        Loads::aggregate(self.layers, self.experts, &values)
    }

    /// The window as at most `episodes` episodes of consecutive steps, oldest first.
    ///
    /// # Errors
    /// If no step was collected, or `episodes` is zero.
    pub fn episodes(&self, episodes: usize) -> Result<Loads> {
        expect_some(&[("episodes", episodes)])?;
        let held = self.held();
        let episodes = episodes.min(held);
        if episodes == 0 {
            return Err(Error::Empty("collected steps"));
        }
        let size = self.layers * self.experts;
        let mut values = vec![0.0; episodes * size];
        for age in 0..held {
            let step = (self.steps as usize - held + age) % self.capacity;
            let episode = age * episodes / held;
            let from = &self.ring[step * size..][..size];
            values[episode * size..][..size].iter_mut().zip(from).for_each(|(v, &c)| *v += c as f64);
        }
        Loads::episodes(episodes, self.layers, self.experts, &values)
    }
}
