//! A result's statement about its own quality.

/// Why a placement cannot be improved, if that is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Proof {
    /// Nothing is known beyond the lower bound.
    None,
    /// The placement reaches the lower bound.
    Bound,
    /// A complete search has excluded every better placement.
    Exhaustive,
}

/// Quality of one layer's placement on the loads it was made for.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Certificate {
    /// Peak device load over mean device load, by the policy's objective.
    pub par: f64,
    /// No placement of these loads has a smaller `par`.
    pub lower_bound: f64,
    /// How optimality was proven, if it was.
    pub proof: Proof,
    /// Number of candidate moves and search nodes that were evaluated.
    pub steps: u64,
}

/// If `par` is this close to the bound, relative to the bound, they are equal up to rounding.
pub(crate) const BOUND_SLACK: f64 = 1e-9;

impl Certificate {
    /// How far the placement can be from the best, as a share of the bound.
    pub fn gap(&self) -> f64 {
        if self.is_optimal() { 0.0 } else { (self.par / self.lower_bound - 1.0).max(0.0) }
    }

    /// Whether the placement is proven optimal.
    pub fn is_optimal(&self) -> bool {
        self.proof != Proof::None
    }
}
