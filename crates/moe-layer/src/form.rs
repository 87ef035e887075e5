//! What computes a step of a sparse layer.

use moe_kernels::plan::Fusion;

/// Which experts compute a layer's step, with what of the layer around them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MoeForm {
    /// The place of monolithic experts among those of the layer; `None`: router, dispatch, experts and combine, one after the other.
    pub monolithic: Option<usize>,
    /// What of the layer around the experts is computed with them.
    pub fusion: Fusion,
}

impl MoeForm {
    /// Router, dispatch, experts and combine, one after the other.
    pub fn modular(fusion: Fusion) -> Self {
        Self { monolithic: None, fusion }
    }
}
