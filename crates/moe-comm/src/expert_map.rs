//! Which expert each physical slot of a layer holds.
//!
//! A rank has slots for experts. A layer numbers the slots of all ranks in one sequence, beginning with rank 0. Routers
//! choose *logical* experts, the ones that the model defines. Ranks compute *physical* experts, which are slots.
//! Without a map the two numberings are equal. With a map an expert may have copies on several ranks, and ranks may
//! have different numbers of slots. The expert in a slot may change, but a slot never moves to another rank. The names
//! `phy2log` and `log2phy` come from the load balancers of DeepSeek and vLLM.

use std::collections::HashMap;
use std::ops::Range;

use crate::error::{GeometryError, refuse};
use crate::placement::{ExpertLayout, partition};

/// The expert of every slot of a layer. Every expert has at least one slot, and no rank holds an expert twice.
///
/// ```
/// use moe_comm::ExpertMap;
/// let map = ExpertMap::new(3, &[vec![0, 2], vec![1, 0]])?;
/// assert_eq!((map.num_slots(), map.rank_of(2)), (4, Some(1)));
/// assert_eq!(map.log2phy(None), [0, 3, 2, -1, 1, -1]);
/// # Ok::<(), moe_comm::GeometryError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertMap {
    num_experts: usize,
    /// Logical expert of each slot, `[P]`.
    phy2log: Vec<u32>,
    /// The first slot of each rank, then P: `[ranks + 1]`.
    first: Vec<usize>,
}

/// A copy of an expert's weights from one slot into another slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotTransfer {
    /// The logical expert.
    pub expert: u32,
    /// The slot from which it is copied.
    pub from: usize,
    /// The slot into which it is copied.
    pub to: usize,
}

impl ExpertMap {
    /// The map of `num_experts` logical experts; `ranks` lists the experts in the slots of each rank.
    ///
    /// # Errors
    /// No rank or no expert; too many slots; an expert that does not exist, that a rank holds twice, or that no rank
    /// holds.
    pub fn new(num_experts: usize, ranks: &[Vec<u32>]) -> Result<Self, GeometryError> {
        let ends = ranks.iter().scan(0, |end, slots| {
            *end += slots.len();
            Some(*end)
        });
        let first = std::iter::once(0).chain(ends).collect();
        Self { num_experts, phy2log: Vec::new(), first }.with_phy2log(ranks.concat())
    }

    /// The usual initial map: all experts in order, then copies of experts 0, 1, .., divided evenly into contiguous
    /// parts, one for each rank.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new); more copies than `ranks` ranks can hold if no rank holds an expert twice.
    pub fn initial(num_experts: usize, redundant: usize, ranks: usize) -> Result<Self, GeometryError> {
        let Some(slots) = num_experts.checked_add(redundant).filter(|&slots| slots <= i32::MAX as usize)
        else {
            refuse!(
                GeometryError::ExpertMap,
                "{num_experts} experts and {redundant} redundant ones are too many slots"
            )
        };
        if num_experts > 0 && slots.div_ceil(ranks.max(1)) > num_experts {
            refuse!(
                GeometryError::ExpertMap,
                "{redundant} redundant experts: {ranks} ranks hold {num_experts} experts at most once each, so at most {} \
                 are redundant",
                num_experts * ranks.saturating_sub(1)
            )
        }
        let rank =
            |rank| partition(slots, ranks, rank).map(|slot| (slot % num_experts.max(1)) as u32).collect();
        Self::new(num_experts, &(0..ranks).map(rank).collect::<Vec<_>>())
    }

    /// The same slots with other experts; `phy2log` is `[P]`.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new); a different number of slots.
    pub fn with_phy2log(&self, phy2log: Vec<u32>) -> Result<Self, GeometryError> {
        let experts = self.num_experts;
        let ranks = self.num_ranks();
        let max = i32::MAX as usize;
        if experts == 0 || ranks == 0 || phy2log.len() > max {
            refuse!(
                GeometryError::ExpertMap,
                "expected at least one expert, one rank and at most {max} slots, got {experts} experts on {ranks} ranks \
                 with {} slots",
                phy2log.len()
            )
        }
        let map = Self { phy2log, ..self.clone() };
        if map.phy2log.len() != map.slots(ranks - 1).end {
            let expected = map.slots(ranks - 1).end;
            let got = map.phy2log.len();
            refuse!(GeometryError::ExpertMap, "expected the experts of {expected} slots, got {got}")
        }
        // The last rank on which an expert was seen. No table has as many rows as there are experts, since that number
        // may be anything.
        let mut seen = HashMap::new();
        for rank in 0..ranks {
            for slot in map.slots(rank) {
                let expert = map.phy2log[slot];
                if expert as usize >= experts {
                    refuse!(
                        GeometryError::ExpertMap,
                        "slot {slot} of rank {rank} holds expert {expert}; expected 0..{experts}"
                    )
                }
                if seen.insert(expert as usize, rank) == Some(rank) {
                    refuse!(
                        GeometryError::ExpertMap,
                        "slot {slot}: rank {rank} holds expert {expert} twice; copies belong on different ranks"
                    )
                }
            }
        }
        if let Some(expert) = (0..experts).find(|expert| !seen.contains_key(expert)) {
            let slots = map.num_slots();
            refuse!(
                GeometryError::ExpertMap,
                "none of the {slots} slots holds expert {expert}; every expert needs one"
            )
        }
        Ok(map)
    }

    /// Logical experts E.
    pub fn num_experts(&self) -> usize {
        self.num_experts
    }

    /// Physical experts P: the slots of all ranks.
    pub fn num_slots(&self) -> usize {
        self.phy2log.len()
    }

    /// Ranks that share the slots.
    pub fn num_ranks(&self) -> usize {
        self.first.len() - 1
    }

    /// The logical expert of each slot, `[P]`.
    pub fn phy2log(&self) -> &[u32] {
        &self.phy2log
    }

    /// The slots of a rank; an empty range if the rank does not exist.
    pub fn slots(&self, rank: usize) -> Range<usize> {
        let end = self.first[self.first.len() - 1];
        let of = |rank: usize| self.first.get(rank).copied().unwrap_or(end);
        of(rank)..of(rank.saturating_add(1))
    }

    /// The logical experts of a rank, in the order of its slots.
    pub fn experts(&self, rank: usize) -> &[u32] {
        &self.phy2log[self.slots(rank)]
    }

    /// The rank of a slot.
    pub fn rank_of(&self, slot: usize) -> Option<usize> {
        // The last rank whose first slot is this one or an earlier one. A rank without slots has the same first slot as
        // the next rank.
        (slot < self.num_slots()).then(|| self.first.partition_point(|&first| first <= slot) - 1)
    }

    /// The largest number of copies that one expert can have in these slots: P - E + 1.
    pub fn max_copies(&self) -> usize {
        self.num_slots() + 1 - self.num_experts
    }

    /// The slots of every expert, `[E, max_copies]`, ascending and padded with -1. With `near`, an expert that rank
    /// `near` holds has only that rank's slot.
    pub fn log2phy(&self, near: Option<usize>) -> Vec<i32> {
        let width = self.max_copies();
        let mut map = vec![-1; self.num_experts * width];
        let mut copies = vec![0; self.num_experts];
        for (slot, &expert) in self.phy2log.iter().enumerate() {
            let expert = expert as usize;
            map[expert * width + copies[expert]] = slot as i32;
            copies[expert] += 1;
        }
        for slot in near.map_or(0..0, |rank| self.slots(rank)) {
            let row = self.phy2log[slot] as usize * width;
            map[row..row + width].fill(-1);
            map[row] = slot as i32;
        }
        map
    }

    /// Chooses one copy of each expert, `[E]` slots, which computes all of the expert's rows. This is faster where
    /// reading weights takes more time than the products. The choice balances the number of experts that each rank
    /// reads and the number of rows that it gets. `loads` are the experts' rows, in any unit; an empty list means equal
    /// loads.
    ///
    /// # Errors
    /// A number of loads other than E; loads that are negative or not finite.
    pub fn sole_copies(&self, loads: &[f64]) -> Result<Vec<u32>, GeometryError> {
        /// Time of the products of an expert of mean load, relative to reading its weights, at 16 rows per expert: 0.25
        /// of 2.1 us on an H200.
        const MEAN_LOAD: f64 = 0.125;
        let experts = self.num_experts;
        if !loads.is_empty() && loads.len() != experts {
            refuse!(GeometryError::ExpertMap, "expected the loads of {experts} experts, got {}", loads.len())
        }
        if let Some((expert, load)) =
            loads.iter().enumerate().find(|(_, load)| !(load.is_finite() && **load >= 0.0))
        {
            refuse!(
                GeometryError::ExpertMap,
                "the load of expert {expert} is {load}; expected a number of 0 or more"
            )
        }
        let mean = loads.iter().sum::<f64>() / experts as f64;
        let cost = |expert: usize| match loads.get(expert) {
            Some(load) if mean > 0.0 => 1.0 + MEAN_LOAD * load / mean,
            _ => 1.0,
        };
        let copies = self.log2phy(None);
        let width = self.max_copies();
        let slots = |expert: usize| {
            copies[expert * width..][..width].iter().filter_map(|&slot| usize::try_from(slot).ok())
        };
        let mut rank_costs = vec![0.0; self.num_ranks()];
        let mut sole = vec![0; experts];
        // Experts with several copies come last, the most expensive first.
        let mut order: Vec<usize> = (0..experts).collect();
        let choices = |expert: usize| slots(expert).count() > 1;
        order.sort_by(|&a, &b| choices(a).cmp(&choices(b)).then(cost(b).total_cmp(&cost(a))).then(a.cmp(&b)));
        for expert in order {
            let of_rank = |&slot: &usize| self.rank_of(slot).map_or(f64::INFINITY, |rank| rank_costs[rank]);
            let Some(slot) = slots(expert).min_by(|a, b| of_rank(a).total_cmp(&of_rank(b))) else { continue };
            sole[expert] = slot as u32;
            if let Some(rank) = self.rank_of(slot) {
                rank_costs[rank] += cost(expert);
            }
        }
        Ok(sole)
    }

    /// The layout of the physical experts as `rank` sees it. It does not change when slots get other experts.
    ///
    /// # Errors
    /// A rank that does not exist.
    pub fn layout(&self, rank: usize) -> Result<ExpertLayout, GeometryError> {
        let ranks = self.num_ranks();
        if rank >= ranks {
            refuse!(GeometryError::ExpertMap, "rank {rank} is outside of a map of {ranks} ranks")
        }
        let own = self.slots(rank);
        let local = |slot: usize| if own.contains(&slot) { (slot - own.start) as i32 } else { -1 };
        let owners = (0..ranks).flat_map(|rank| self.slots(rank).map(move |_| rank as u32));
        Ok(ExpertLayout {
            local_experts: own.clone().map(|slot| slot as u32).collect(),
            expert_map: (ranks > 1).then(|| (0..self.num_slots()).map(local).collect()),
            owners: owners.collect(),
        })
    }

    /// The transfers that turn this map into `target`, by ascending slot. Each slot that gets another expert reads it
    /// from a slot of this map: on its own rank if that rank holds the expert, otherwise on the rank that has sent the
    /// least. All slots must be read before any slot is written.
    ///
    /// # Errors
    /// A `target` with other slots or another number of experts.
    pub fn transfers(&self, target: &Self) -> Result<Vec<SlotTransfer>, GeometryError> {
        if (self.num_experts, &self.first) != (target.num_experts, &target.first) {
            refuse!(
                GeometryError::ExpertMap,
                "a map of {} experts in {} slots cannot become one of {} in {}, or with other slots per rank",
                self.num_experts,
                self.num_slots(),
                target.num_experts,
                target.num_slots()
            )
        }
        let copies = self.log2phy(None);
        let width = self.max_copies();
        let mut sent = vec![0usize; self.num_ranks()];
        let mut transfers = Vec::new();
        for (to, (&before, &expert)) in self.phy2log.iter().zip(&target.phy2log).enumerate() {
            if before == expert {
                continue;
            }
            let here = self.rank_of(to);
            let holders = copies[expert as usize * width..][..width]
                .iter()
                .filter_map(|&slot| usize::try_from(slot).ok());
            let cost = |&slot: &usize| {
                let rank = self.rank_of(slot);
                (rank != here, rank.map_or(0, |rank| sent[rank]), slot)
            };
            // Every expert has a slot, so there is always one to read.
            let Some(from) = holders.min_by_key(cost) else { continue };
            if let Some(rank) = self.rank_of(from).filter(|&rank| Some(rank) != here) {
                sent[rank] += 1;
            }
            transfers.push(SlotTransfer { expert, from, to });
        }
        Ok(transfers)
    }
}
