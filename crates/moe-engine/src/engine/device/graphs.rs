//! The captured graphs of a runner: what each is for, and how far it is.

use model_runtime::ForcedWeights;
use model_runtime::cuda::Graph;

use crate::engine::sampling::Asked;

/// How far a bucket's graph is.
pub(super) enum Recording {
    /// It ran once, so that every buffer exists.
    Warm,
    Ready(Graph),
    /// Recording failed: it runs without.
    Never,
}

/// Steps of one graph: rows, what they ask of sampling, and which weights forced experts get.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Variant {
    pub rows: usize,
    pub asked: Asked,
    pub forced: Option<ForcedWeights>,
}
