//! How much of the rounding error of a column goes to each later one, from the inputs that a layer saw.

use std::fmt;

use anyhow::{Result, bail};

use super::Hessian;
use super::cholesky::upper;

/// How often damping is raised tenfold where the Hessian has no factor.
const TRIES: usize = 4;

/// The order of columns and what each owes to the later ones: the same for all layers that read the same inputs.
pub struct Feedback {
    /// The columns in the order in which they are rounded.
    pub(super) order: Vec<usize>,
    /// R_ij / R_jj above the diagonal, 0 elsewhere, [k, k] in that order; H = R Rᵀ with R upper triangular.
    pub(super) shares: Vec<f32>,
    /// Whether columns with large inputs come first.
    pub(super) act_order: bool,
}

/// Inputs whose Hessian has no Cholesky factor, whatever the damping: columns cannot make up for each other's errors.
#[derive(Debug)]
pub struct NoFactor {
    /// Share of the mean of the diagonal that was added to it at last.
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
    /// For the inputs of `hessian`; with act-order columns with large inputs come first. `damping` times the mean of the
    /// diagonal is added to the diagonal (0.01 in the paper), and more if there is no factor.
    ///
    /// # Errors
    /// Damping that is negative or not finite; a Hessian without a factor, whatever the damping: a [`NoFactor`].
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
        // Where all inputs are zero, any diagonal is as good.
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
