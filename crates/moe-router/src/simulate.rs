//! Routing simulation: strategies that ignore the logits, for performance tests of everything after the router.
//!
//! The two built-in strategies are vLLM's. Two things differ: no token gets one expert twice (the stages after the
//! router may rely on it), and samples are a function of seed, step, layer and row, so that a run can be repeated.

use std::sync::Arc;

use crate::error::RouterError;
use crate::math;
use crate::philox::RowRng;

/// A strategy of routing simulation. Both methods depend only on the random stream.
pub trait RoutingStrategy: Send + Sync {
    /// Fills one token's `topk_ids` with distinct ids of 0..num_experts. Anything else is an
    /// error of the step.
    fn select(&self, rng: &mut RowRng, num_experts: u32, topk_ids: &mut [u32]);

    /// Fills one token's `topk_weights`. They are final: neither renormalised nor scaled.
    fn weigh(&self, rng: &mut RowRng, topk_weights: &mut [f32]);
}

/// `uniform_random`: every set of experts is equally likely; all weights are 1.
#[derive(Clone, Copy, Debug, Default)]
pub struct UniformRandom;

impl RoutingStrategy for UniformRandom {
    fn select(&self, rng: &mut RowRng, num_experts: u32, topk_ids: &mut [u32]) {
        rng.distinct(num_experts, topk_ids);
    }

    fn weigh(&self, _: &mut RowRng, topk_weights: &mut [f32]) {
        topk_weights.fill(1.0);
    }
}

/// `normal_routing`: the id is floor(sigmoid(normal sample) * E), so the middle experts get more tokens. If the id is
/// already taken, the next free one is used. Weights are absolute values of normal samples divided by their sum.
#[derive(Clone, Copy, Debug)]
pub struct NormalRouting {
    /// Mean of the samples.
    pub mean: f32,
    /// Their standard deviation.
    pub std: f32,
}

impl Default for NormalRouting {
    fn default() -> Self {
        Self { mean: 0.0, std: 1.0 }
    }
}

impl RoutingStrategy for NormalRouting {
    fn select(&self, rng: &mut RowRng, num_experts: u32, topk_ids: &mut [u32]) {
        let last = num_experts.saturating_sub(1);
        for k in 0..topk_ids.len() {
            let (taken, rest) = topk_ids.split_at_mut(k);
            let sample = self.mean + self.std * rng.normal();
            let mut id = ((math::sigmoid(sample) * num_experts as f32) as u32).min(last);
            // At most k ids are taken, so a free one is found in at most k steps, if there is any.
            for _ in 0..k {
                if !taken.contains(&id) {
                    break;
                }
                id = if id == last { 0 } else { id + 1 };
            }
            rest[0] = id;
        }
    }

    fn weigh(&self, rng: &mut RowRng, topk_weights: &mut [f32]) {
        for w in topk_weights.iter_mut() {
            *w = (self.mean + self.std * rng.normal()).abs();
        }
        let sum = topk_weights.iter().sum::<f32>();
        let n = topk_weights.len() as f32;
        for w in topk_weights.iter_mut() {
            *w = if sum > 0.0 { *w / sum } else { 1.0 / n };
        }
    }
}

/// Simulation strategies by name. This is a plain value that the router gets, and not a global registry.
#[derive(Clone)]
pub struct Strategies(Vec<(String, Arc<dyn RoutingStrategy>)>);

impl Default for Strategies {
    /// `uniform_random` and `normal_routing`.
    fn default() -> Self {
        let mut strategies = Self(Vec::new());
        strategies.register("uniform_random", Arc::new(UniformRandom));
        strategies.register("normal_routing", Arc::new(NormalRouting::default()));
        strategies
    }
}

impl Strategies {
    /// Adds a strategy, or replaces the one with this name.
    pub fn register(&mut self, name: &str, strategy: Arc<dyn RoutingStrategy>) {
        match self.0.iter_mut().find(|(n, _)| n == name) {
            Some(entry) => entry.1 = strategy,
            None => self.0.push((name.to_owned(), strategy)),
        }
    }

    /// The registered names, in order of registration.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(name, _)| name.as_str())
    }

    /// Returns the strategy with this name.
    ///
    /// # Errors
    ///
    /// A [`RouterError`] that lists the registered names.
    pub fn get(&self, name: &str) -> Result<Arc<dyn RoutingStrategy>, RouterError> {
        match self.0.iter().find(|(n, _)| n == name) {
            Some((_, strategy)) => Ok(strategy.clone()),
            None => {
                let names = self.names().collect::<Vec<_>>().join(", ");
                Err(RouterError::unknown("routing simulation strategy", name, &names))
            }
        }
    }
}

impl std::fmt::Debug for Strategies {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.names()).finish()
    }
}
