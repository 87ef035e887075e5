//! What a model expects of a tensor.

/// Name and shape of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Full name in the checkpoint.
    pub name: String,
    /// Dimensions.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// A tensor of this name and shape.
    pub fn new(name: impl Into<String>, shape: &[usize]) -> Self {
        Self { name: name.into(), shape: shape.to_vec() }
    }
}
