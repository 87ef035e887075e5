//! GPTQ (Frantar et al. 2022, arXiv 2210.17323). It rounds the columns one after the other. Later columns compensate
//! for the errors of earlier ones as far as their inputs are correlated.
//!
//! The error to minimise is |(W - Ŵ) R|² with H = R Rᵀ, where R is upper triangular. Column j of (W - Ŵ) R is R_jj
//! times (w_j - ŵ_j) + Σ_{i<j} (w_i - ŵ_i) R_ij / R_jj, so ŵ_j is w_j plus that sum, rounded. This is GPTQ without the
//! inverse of H: the two give the same integers (Chee et al. 2023, arXiv 2307.13304, theorem 6).

mod cholesky;
mod feedback;
mod hessian;

use anyhow::{Result, bail};
use candle_core::{Device, Tensor};
use moe_quant::write::IntMatrix;
use rayon::prelude::*;

use crate::round::{Grid, GroupScale, round_to_nearest};

pub use feedback::{Feedback, NoFactor};
pub use hessian::Hessian;

/// The number of columns of a block. The effect of all earlier blocks on a block is computed as one matrix product.
const BLOCK: usize = 128;

/// Returns the integers of `weights` [n, k], chosen for the inputs from which `feedback` was computed.
///
/// A group consists of columns that are rounded one after the other, if these columns are adjacent or if the grid's
/// format has act-order. Otherwise a group consists of adjacent columns, and its scales are chosen before anything is
/// rounded.
///
/// # Errors
/// Sizes do not match, a group does not divide a size, the format has act-order but the columns keep their order, or
/// weights are not finite or too large for the scales' dtype. The last error names the row.
pub fn gptq(grid: &Grid, weights: &[f32], (n, k): (usize, usize), feedback: &Feedback) -> Result<IntMatrix> {
    let Feedback { order, shares, act_order } = feedback;
    let size = grid.check(weights, n, k)?;
    if order.len() != k {
        bail!("expected inputs of {k} columns for weights [{n}, {k}], got {}", order.len())
    }
    if grid.int.act_order && !act_order {
        bail!(
            "the format has act-order: expected columns in the order of falling inputs, got their own order"
        )
    }
    let is_fitted = *act_order && !grid.int.act_order;
    let rows = match is_fitted {
        true => {
            let fitted = round_to_nearest(grid, weights, n, k)?;
            let groups = fitted.scale.chunks(k / size).zip(fitted.zero.chunks(k / size));
            groups.map(|(scale, zero)| Row::new(k, scale.to_vec(), zero.to_vec())).collect()
        }
        false => (0..n).map(|_| Row::new(k, vec![0.0; k / size], vec![0; k / size])).collect(),
    };
    let group = |(place, column): (usize, &usize)| if is_fitted { column / size } else { place / size };
    let groups: Vec<usize> = order.iter().enumerate().map(group).collect();
    let weights: Vec<f32> =
        weights.par_chunks(k).flat_map_iter(|row| order.iter().map(|column| row[*column])).collect();
    let mut state = State { grid, k, size, is_fitted, groups: &groups, weights: &weights, rows, shares };
    // A group does not extend over the end of a block. So all of its columns have been corrected when its scale is
    // chosen.
    let block = if size <= BLOCK { BLOCK / size * size } else { BLOCK };
    for first in (0..k).step_by(block) {
        state.block(first, k.min(first + block))?;
    }
    Ok(collect(grid, &state.rows, order, &groups))
}

/// A row of the matrix that is being rounded.
struct Row {
    q: Vec<u8>,
    /// w - ŵ of the columns that are already rounded.
    error: Vec<f32>,
    scale: Vec<f32>,
    zero: Vec<u8>,
}

impl Row {
    fn new(k: usize, scale: Vec<f32>, zero: Vec<u8>) -> Self {
        Self { q: vec![0; k], error: vec![0.0; k], scale, zero }
    }
}

struct State<'a> {
    grid: &'a Grid,
    k: usize,
    size: usize,
    /// Whether the scales of the rows are already chosen.
    is_fitted: bool,
    /// The group of each column, in rounding order.
    groups: &'a [usize],
    /// [n, k], columns in order.
    weights: &'a [f32],
    rows: Vec<Row>,
    /// [k, k].
    shares: &'a [f32],
}

impl State<'_> {
    /// Rounds the columns from `first` to `last` of all rows.
    fn block(&mut self, first: usize, last: usize) -> Result<()> {
        let earlier = self.earlier(first, last)?;
        let Self { grid, k, size, is_fitted, groups, weights, shares, .. } = *self;
        let width = last - first;
        self.rows.par_iter_mut().enumerate().try_for_each(|(n, row)| {
            let weights = &weights[n * k..(n + 1) * k];
            let mut wanted = weights[first..last].to_vec();
            wanted.iter_mut().zip(&earlier[n * width..]).for_each(|(wanted, more)| *wanted += more);
            for column in first..last {
                let at = column - first;
                let group = groups[column];
                if !is_fitted && column.is_multiple_of(size) {
                    // A group that is longer than a block gets its scale from the uncorrected weights.
                    let inside = wanted.get(at..at + size).filter(|_| size <= BLOCK);
                    let values = inside.unwrap_or(&weights[column..column + size]);
                    let Some(fitted) = grid.fit(values.iter().copied()) else {
                        bail!(
                            "row {n} holds weights that are not finite, or too large for scales in {:?}",
                            grid.scales
                        )
                    };
                    (row.scale[group], row.zero[group]) = (fitted.scale, fitted.zero);
                }
                let group = GroupScale { scale: row.scale[group], zero: row.zero[group] };
                row.q[column] = grid.round(wanted[at], group);
                let error = weights[column] - group.weight(row.q[column]);
                row.error[column] = error;
                let to = &shares[column * k + column + 1..column * k + last];
                wanted[at + 1..].iter_mut().zip(to).for_each(|(wanted, share)| *wanted += error * share);
            }
            Ok(())
        })
    }

    /// Returns the correction of each column of the block by all columns before the block, [n, last - first].
    fn earlier(&self, first: usize, last: usize) -> Result<Vec<f32>> {
        let n = self.rows.len();
        let width = last - first;
        if first == 0 {
            return Ok(vec![0.0; n * width]);
        }
        let errors: Vec<f32> = self.rows.iter().flat_map(|row| row.error[..first].iter().copied()).collect();
        let shares: Vec<f32> = (0..first)
            .flat_map(|i| self.shares[i * self.k + first..i * self.k + last].iter().copied())
            .collect();
        let errors = Tensor::from_vec(errors, (n, first), &Device::Cpu)?;
        let shares = Tensor::from_vec(shares, (first, width), &Device::Cpu)?;
        Ok(errors.matmul(&shares)?.flatten_all()?.to_vec1()?)
    }
}

/// Returns the matrix with its columns in their original order.
fn collect(grid: &Grid, rows: &[Row], order: &[usize], groups: &[usize]) -> IntMatrix {
    let n = rows.len();
    let k = order.len();
    let mut matrix = IntMatrix { n, k, q: vec![0; n * k], ..Default::default() };
    let mut g_idx = vec![0; k];
    for (place, column) in order.iter().enumerate() {
        g_idx[*column] = groups[place] as u32;
        for (n, row) in rows.iter().enumerate() {
            matrix.q[n * k + column] = row.q[place];
        }
    }
    matrix.scale = rows.iter().flat_map(|row| row.scale.iter().copied()).collect();
    matrix.zero = rows.iter().flat_map(|row| row.zero.iter().copied()).collect();
    matrix.g_idx = grid.int.act_order.then_some(g_idx);
    matrix
}
