//! What the launches of a sub-layer compute of the residual stream around it.

/// What of a decoder layer is computed in the launches of attention, or of router and experts. [`SublayerIo`](crate::SublayerIo)
/// has the arrays of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fusion {
    /// The sub-layer alone: it reads normed rows and writes rows to be added.
    Nothing,
    /// Also the addition to the residual stream.
    Add,
    /// Also the norm before it and the addition to the residual stream.
    NormAdd,
    /// Also the addition to the residual stream and the norm of the next sub-layer.
    AddNorm,
}

impl Fusion {
    /// What a kernel's name is followed by in explanations.
    pub fn suffix(self) -> &'static str {
        match self {
            Self::Nothing => "",
            Self::Add => " with addition",
            Self::NormAdd => " with norm and addition",
            Self::AddNorm => " with addition and next norm",
        }
    }
}
