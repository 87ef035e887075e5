//! The captured graphs of a runner: the steps that each is for, and the state of each.

use model_runtime::ForcedWeights;
use model_runtime::cuda::Graph;

use crate::engine::sampling::SamplingNeeds;

/// The state of a bucket's graph.
pub(super) enum Recording {
    /// The step ran once, so every buffer exists.
    Warm,
    Ready(Graph),
    /// Recording failed, so the step runs without a graph.
    Never,
}

/// The steps of one graph: rows, the sampling that they need, and which weights forced experts get.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Variant {
    pub rows: usize,
    pub asked: SamplingNeeds,
    pub forced: Option<ForcedWeights>,
}
