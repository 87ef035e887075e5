//! What calibration knows of a layer's inputs: the sum of x xᵀ over all of them.

use anyhow::{Result, bail};
use candle_core::{DType, Device, Tensor};

/// Rows that are added at once.
const ROWS: usize = 4096;

/// The Hessian of a linear layer's squared output error, up to a factor: the sum over its inputs x of x xᵀ.
pub struct Hessian {
    /// [k, k] f32.
    sum: Tensor,
    /// Inputs that were added.
    rows: usize,
}

impl Hessian {
    /// Of `inputs` [T, k] f32.
    ///
    /// # Errors
    /// Another dtype or rank; inputs that are not finite.
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

    /// Inputs that were seen.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Size of an input.
    pub fn k(&self) -> usize {
        self.sum.dims()[0]
    }

    /// The sums on the diagonal: how large each input is.
    pub(super) fn diagonal(&self) -> Result<Vec<f64>> {
        let rows = self.sum.to_vec2::<f32>()?;
        Ok(rows.iter().enumerate().map(|(at, row)| f64::from(row[at])).collect())
    }

    /// The matrix with rows and columns in an order.
    pub(super) fn in_order(&self, order: &[usize]) -> Result<Vec<f64>> {
        let rows = self.sum.to_vec2::<f32>()?;
        Ok(order.iter().flat_map(|i| order.iter().map(|j| f64::from(rows[*i][*j]))).collect())
    }

    /// The squared error of the outputs on the inputs seen, as a share of the squared outputs, if `rounded` [n, k] takes the
    /// place of `weights` [n, k].
    ///
    /// # Errors
    /// Other sizes.
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
