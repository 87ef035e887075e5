//! Which rank owns which expert.
//!
//! This module speaks of *physical* experts, P of them (P = E without redundant experts). Uneven counts are allowed,
//! and so are ranks without any expert.

use std::ops::Range;

use crate::error::{GeometryError, refuse};
use crate::geometry::Geometry;
use crate::names::ExpertPlacement;

/// Part `index` of `len` items that are cut into `parts` contiguous ranges. Their lengths differ by at most one, and
/// longer ranges come first. For an index that is not below `parts` the range is empty, at the end.
///
/// ```
/// let runs: Vec<_> = (0..3).map(|i| moe_comm::partition(8, 3, i)).collect();
/// assert_eq!(runs, [0..3, 3..6, 6..8]);
/// ```
pub fn partition(len: usize, parts: usize, index: usize) -> Range<usize> {
    if index >= parts {
        return len..len;
    }
    // index < parts, so index * base <= len: nothing overflows.
    let base = len / parts;
    let extra = len % parts;
    let start = index * base + index.min(extra);
    start..start + base + usize::from(index < extra)
}

/// The experts of one rank, and the owner of every expert.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExpertLayout {
    /// Global ids of this rank's experts in the order of their local slots (ascending), `[E_local]`.
    pub local_experts: Vec<u32>,
    /// Local slot of each physical expert, -1 if another rank holds it, `[P]`. `None` for one rank means the identity.
    pub expert_map: Option<Vec<i32>>,
    /// Physical expert to the expert-parallel rank that owns it, `[P]`.
    pub owners: Vec<u32>,
}

impl ExpertLayout {
    /// The layout of `num_experts` physical experts as `ep_rank` of `ep_size` sees it.
    pub fn new(
        num_experts: usize,
        ep_size: usize,
        ep_rank: usize,
        placement: ExpertPlacement,
    ) -> Result<Self, GeometryError> {
        // Local slots and -1 share an i32, and the id u32::MAX means no expert.
        let max = i32::MAX as usize;
        if num_experts == 0 || num_experts > max {
            refuse!(
                GeometryError::Range,
                "the number of experts must be between 1 and {max}, got {num_experts}"
            )
        }
        if ep_size == 0 {
            refuse!(GeometryError::Range, "ep must be at least 1, got 0")
        }
        if ep_rank >= ep_size {
            refuse!(GeometryError::Range, "rank {ep_rank} is outside of a world of {ep_size} (dp x tp) ranks")
        }
        let owners = owners(num_experts, ep_size, placement);
        let mut local_experts = Vec::new();
        let mut map = vec![-1i32; num_experts];
        for (expert, slot) in map.iter_mut().enumerate() {
            if owners.get(expert).is_some_and(|&owner| owner as usize == ep_rank) {
                *slot = local_experts.len() as i32;
                local_experts.push(expert as u32);
            }
        }
        Ok(Self { local_experts, expert_map: (ep_size > 1).then_some(map), owners })
    }

    /// Number of physical experts P.
    pub fn num_experts(&self) -> usize {
        self.owners.len()
    }

    /// Number of experts on this rank, possibly 0.
    pub fn num_local_experts(&self) -> usize {
        self.local_experts.len()
    }
}

fn owners(num_experts: usize, ep_size: usize, placement: ExpertPlacement) -> Vec<u32> {
    match placement {
        ExpertPlacement::RoundRobin => (0..num_experts).map(|e| (e % ep_size) as u32).collect(),
        // Ranks beyond the number of experts own nothing, so the loop skips them.
        ExpertPlacement::Linear => (0..ep_size.min(num_experts))
            .flat_map(|rank| partition(num_experts, ep_size, rank).map(move |_| rank as u32))
            .collect(),
    }
}

impl Geometry {
    /// The layout of `num_experts` physical experts as this rank sees it.
    pub fn expert_layout(&self, num_experts: usize) -> Result<ExpertLayout, GeometryError> {
        ExpertLayout::new(num_experts, self.ep_size, self.ep_rank, self.placement)
    }
}
