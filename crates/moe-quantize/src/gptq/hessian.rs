//! The sum of x xᵀ over all inputs x of a layer, which is all that calibration keeps of the inputs.

use anyhow::{Result, bail};
use candle_core::{DType, Device, Tensor};

/// The number of rows that are added at once.
const ROWS: usize = 4096;

/// The Hessian of the squared output error of a linear layer, up to a factor. It is the sum of x xᵀ over the layer's
/// inputs x.
pub struct Hessian {
    /// [k, k] f32.
    sum: Tensor,
    /// The number of inputs that were added.
    rows: usize,
}

impl Hessian {
    /// Returns the Hessian of `inputs` [T, k] f32.
    ///
    /// # Errors
    /// The dtype or rank is wrong, or inputs are not finite.
    pub fn of(inputs: &Tensor) -> Result<Self> {
        let (rows, k) = inputs.dims2()?;
        let mut sum = Tensor::zeros((k, k), DType::F32, &Device::Cpu)?;
        for first in (0..rows).step_by(ROWS) {
            let part = inputs.narrow(0, first, ROWS.min(rows - first))?.contiguous()?;
            sum = (sum + part.t()?.matmul(&part)?)?;
        }
        if !sum.sum_all()?.to_scalar::<f32>()?.is_finite() {
            bail!("the inputs that calibration saw are not finite")
        }
        Ok(Self { sum, rows })
    }

    /// Returns the number of inputs.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the size of an input.
    pub fn k(&self) -> usize {
        self.sum.dims()[0]
    }

    /// Returns the diagonal. Each value is the sum of the squares of one input column.
    pub(super) fn diagonal(&self) -> Result<Vec<f64>> {
        let rows = self.sum.to_vec2::<f32>()?;
        Ok(rows.iter().enumerate().map(|(at, row)| f64::from(row[at])).collect())
    }

    /// Returns the matrix with its rows and columns in this order.
    pub(super) fn in_order(&self, order: &[usize]) -> Result<Vec<f64>> {
        let rows = self.sum.to_vec2::<f32>()?;
        Ok(order.iter().flat_map(|i| order.iter().map(|j| f64::from(rows[*i][*j]))).collect())
    }

    /// Returns the squared error of the outputs if `rounded` [n, k] replaces `weights` [n, k]. It is computed for the
    /// inputs of this Hessian, as a share of the squared outputs.
    ///
    /// # Errors
    /// The sizes differ.
    pub fn output_error(&self, weights: &[f32], rounded: &[f32]) -> Result<f64> {
        let k = self.k();
        if k == 0 || weights.len() != rounded.len() || !weights.len().is_multiple_of(k) {
            let first = weights.len();
            let second = rounded.len();
            bail!(
                "expected two matrices of rows of {k} columns, at least 1, got {first} and {second} weights"
            )
        }
        let energy = |values: Vec<f32>| -> Result<f64> {
            let rows = values.len() / k;
            let values = Tensor::from_vec(values, (rows, k), &Device::Cpu)?;
            Ok(f64::from((values.matmul(&self.sum)? * values)?.sum_all()?.to_scalar::<f32>()?))
        };
        let difference = weights.iter().zip(rounded).map(|(w, r)| w - r).collect();
        Ok(energy(difference)? / energy(weights.to_vec())?.max(f64::MIN_POSITIVE))
    }
}
