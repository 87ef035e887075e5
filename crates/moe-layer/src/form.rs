//! The experts that compute a step of a sparse layer.

use moe_kernels::plan::Fusion;

/// Which experts compute a layer's step, and which ops before and after them are computed with them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MoeForm {
    /// The index of the chosen monolithic experts in the layer's list; `None`: router, dispatch, experts and combine
    /// run one after the other.
    pub monolithic: Option<usize>,
    /// The ops before and after the experts that are computed with them.
    pub fusion: Fusion,
}

impl MoeForm {
    /// Router, dispatch, experts and combine, one after the other.
    pub fn modular(fusion: Fusion) -> Self {
        Self { monolithic: None, fusion }
    }
}
