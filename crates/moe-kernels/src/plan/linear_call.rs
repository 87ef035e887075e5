//! The properties on which the choice of a dense product's kernel depends.

use candle_core::DType;

use super::quant::QuantWeights;

/// A product out [rows, n] = x [rows, k] · wᵀ.
#[derive(Clone, Copy, Debug)]
pub struct LinearCall {
    /// Rows of x.
    pub rows: usize,
    /// Rows of w.
    pub n: usize,
    /// Columns of both.
    pub k: usize,
    /// Dtype of x and, if it is in floats, of w.
    pub dtype: DType,
    /// How w is quantised; `None`: it has the dtype `dtype`.
    pub quant: Option<QuantWeights>,
    /// Whether a bias is added.
    pub bias: bool,
    /// Whether x, w and out begin at multiples of 16 bytes.
    pub aligned: bool,
}
