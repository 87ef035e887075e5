//! Which ops before and after a sub-layer are computed in its launches.

/// Which ops of a decoder layer are computed in the launches of attention, or of router and experts.
/// [`SublayerIo`](crate::SublayerIo) has the arrays of each.
// This enum is exhaustive: a layer must say of each fusion whether it has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fusion {
    /// Only the sub-layer: it reads normed rows and writes rows to be added.
    Nothing,
    /// Also the addition to the residual stream.
    Add,
    /// Also the norm before it and the addition to the residual stream.
    NormAdd,
    /// Also the addition to the residual stream and the norm of the next sub-layer.
    AddNorm,
}

impl Fusion {
    /// The suffix of a kernel's name in explanations.
    pub fn suffix(self) -> &'static str {
        match self {
            Self::Nothing => "",
            Self::Add => " with addition",
            Self::NormAdd => " with norm and addition",
            Self::AddNorm => " with addition and next norm",
        }
    }
}
