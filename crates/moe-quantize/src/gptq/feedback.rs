//! Computes, from the inputs of a layer, how much of the rounding error of a column is added to each later column.

use std::fmt;

use anyhow::{Result, bail};

use super::Hessian;
use super::cholesky::upper;

/// The number of times that the damping is raised tenfold if the Hessian has no factor.
const TRIES: usize = 4;

/// The order of the columns, and the share of each column's error that later columns get. It is the same for all layers
/// that read the same inputs.
pub struct Feedback {
    /// The columns in the order in which they are rounded.
    pub(super) order: Vec<usize>,
    /// The matrix [k, k] in that order. It has R_ij / R_jj above the diagonal and 0 elsewhere, where H = R Rᵀ and R is
    /// upper triangular.
    pub(super) shares: Vec<f32>,
    /// Whether columns with large inputs come first.
    pub(super) act_order: bool,
}

/// The error for inputs whose Hessian has no Cholesky factor with any damping that was tried. Then columns cannot
/// compensate for each other's errors.
#[derive(Debug)]
pub struct NoFactor {
    /// The last damping that was tried, as a share of the mean of the diagonal.
    damping: f64,
}

impl fmt::Display for NoFactor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let damping = self.damping;
        write!(f, "the inputs that calibration saw have no Cholesky factor, even with {damping} of damping")
    }
}

impl std::error::Error for NoFactor {}

impl Feedback {
    /// Computes the feedback for the inputs of `hessian`. With act-order the columns with large inputs come first.
    /// `damping` times the mean of the diagonal is added to the diagonal (0.01 in the paper). If there is no factor,
    /// more is added.
    ///
    /// # Errors
    /// The damping is negative or not finite, or the Hessian has no factor with any damping that was tried, which is a
    /// [`NoFactor`].
    pub fn new(hessian: &Hessian, act_order: bool, damping: f64) -> Result<Self> {
        if !(damping.is_finite() && damping >= 0.0) {
            bail!("damping: expected a finite number of at least 0, got {damping}")
        }
        let k = hessian.k();
        let diagonal = hessian.diagonal()?;
        let mut order: Vec<usize> = (0..k).collect();
        if act_order {
            order.sort_by(|a, b| diagonal[*b].total_cmp(&diagonal[*a]));
        }
        let mut h = hessian.in_order(&order)?;
        let mean = diagonal.iter().sum::<f64>() / k as f64;
        // If all inputs are zero, any positive diagonal works.
        let unit = if mean > 0.0 { mean } else { 1.0 };
        let mut added = 0.0;
        for attempt in 0..TRIES {
            let wanted = damping * 10f64.powi(attempt as i32) * unit;
            (0..k).for_each(|i| h[i * k + i] += wanted - added);
            added = wanted;
            if let Some(r) = upper(&h, k)? {
                return Ok(Self { order, shares: shares(&r, k), act_order });
            }
        }
        Err(NoFactor { damping: added / unit }.into())
    }
}

fn shares(r: &[f64], k: usize) -> Vec<f32> {
    let diagonal: Vec<f64> = (0..k).map(|i| r[i * k + i]).collect();
    let mut shares = Vec::with_capacity(k * k);
    for (i, row) in r.chunks(k).enumerate() {
        shares.resize(shares.len() + i + 1, 0.0);
        shares.extend(row[i + 1..].iter().zip(&diagonal[i + 1..]).map(|(r, jj)| (r / jj) as f32));
    }
    shares
}
