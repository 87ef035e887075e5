//! Which experts are in the slots of a device that has fewer slots than experts, which are in host memory, and which
//! experts make room.
//!
//! Every expert is in exactly one place: a slot of the device, or a home in host memory. A step exchanges experts that
//! it needs and that are at home with experts that it does not need. If it needs more experts than there are slots, it
//! runs in passes, each over as many experts as fit. The device itself decides by this rule
//! (`cuda/experts/residency.cu`, integer for integer); here it is written as pure functions.
//!
//! The expert with the lowest heat leaves. An expert's heat counts how many of the last steps needed it, where older
//! steps count less. A step needs an expert at most once, however many rows chose it, because one fetch serves all
//! rows. So experts that were needed only once leave first, and a prompt, which needs every expert once, does not
//! replace the experts that decoding needs all the time.

use std::fmt;

use candle_core::{Result, bail};
use serde::Serialize;

/// The heat that a step adds to an expert that it needs.
const USE: u32 = 1 << 16;
/// In each step an expert loses a 64th of its heat.
const AGE_SHIFT: u32 = 6;

/// Where an expert's weights are.
// This enum is exhaustive: an expert is on the device or in host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// A slot on the device.
    Slot(usize),
    /// A home in host memory.
    Home(usize),
}

/// An expert at home that is exchanged with the expert in a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exchange {
    /// The slot.
    pub slot: usize,
    /// The home.
    pub home: usize,
}

/// The experts of a step that are on the device at the same time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pass {
    /// The slot of each expert that the pass computes, \[E\].
    pub map: Vec<Option<usize>>,
    /// The exchanges before the pass.
    pub exchanges: Vec<Exchange>,
}

/// The places of a layer's experts, and the heat of each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Residency {
    place: Vec<Place>,
    heat: Vec<u32>,
    /// The expert in each slot.
    held: Vec<usize>,
    /// Experts that the current step still needs.
    pending: Vec<bool>,
}

impl Residency {
    /// The first `num_slots` of `num_experts` experts are in the slots, the others at home, all with heat 0.
    ///
    /// # Errors
    /// No slot; more slots than experts.
    pub fn new(num_experts: usize, num_slots: usize) -> Result<Self> {
        if num_slots == 0 || num_slots > num_experts {
            bail!("slots of experts: expected 1 to {num_experts}, got {num_slots}")
        }
        let place = |e: usize| e.checked_sub(num_slots).map_or(Place::Slot(e), Place::Home);
        Ok(Self {
            place: (0..num_experts).map(place).collect(),
            heat: vec![0; num_experts],
            held: (0..num_slots).collect(),
            pending: vec![false; num_experts],
        })
    }

    /// Where each expert is, \[E\].
    pub fn places(&self) -> &[Place] {
        &self.place
    }

    /// The expert in each slot.
    pub fn held(&self) -> &[usize] {
        &self.held
    }

    /// Begins a step whose rows chose these experts, and returns how many experts it needs. Ids that name no expert are
    /// skipped.
    pub fn begin(&mut self, topk_ids: &[u32]) -> usize {
        self.pending.fill(false);
        for &id in topk_ids {
            if let Some(pending) = self.pending.get_mut(id as usize) {
                *pending = true;
            }
        }
        for (heat, &needed) in self.heat.iter_mut().zip(&self.pending) {
            *heat = *heat - (*heat >> AGE_SHIFT) + if needed { USE } else { 0 };
        }
        self.pending.iter().filter(|needed| **needed).count()
    }

    /// The next pass of the step: the needed experts that are in slots, and the missing ones with the lowest ids, as
    /// many as slots can be freed. The pass is empty if no expert is pending.
    pub fn pass(&mut self) -> Pass {
        let at_home = |e: &usize| matches!(self.place[*e], Place::Home(_));
        let missing: Vec<usize> =
            (0..self.place.len()).filter(|&e| self.pending[e]).filter(at_home).collect();
        let mut leaving: Vec<usize> =
            (0..self.held.len()).filter(|&slot| !self.pending[self.held[slot]]).collect();
        leaving.sort_by_key(|&slot| (self.heat[self.held[slot]], slot));
        let mut exchanges = Vec::new();
        for (expert, slot) in missing.into_iter().zip(leaving) {
            let Place::Home(home) = self.place[expert] else { continue };
            self.place[self.held[slot]] = Place::Home(home);
            self.place[expert] = Place::Slot(slot);
            self.held[slot] = expert;
            exchanges.push(Exchange { slot, home });
        }
        let mut map = vec![None; self.place.len()];
        for (expert, slot) in map.iter_mut().enumerate() {
            if let (true, Place::Slot(at)) = (self.pending[expert], self.place[expert]) {
                *slot = Some(at);
                self.pending[expert] = false;
            }
        }
        Pass { map, exchanges }
    }
}

/// The largest number of passes of steps with `choices` choices (rows times K).
pub fn max_passes(num_experts: usize, num_slots: usize, choices: usize) -> usize {
    num_experts.min(choices).div_ceil(num_slots.max(1)).max(1)
}

/// The cost of a layer's experts in host memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ExpertTraffic {
    /// Experts.
    pub num_experts: usize,
    /// Slots of the device.
    pub num_slots: usize,
    /// Bytes of an expert.
    pub expert_bytes: usize,
    /// Number of experts that steps needed; each counts once per step.
    pub needed: u64,
    /// Number of needed experts that were at home.
    pub fetched: u64,
}

impl ExpertTraffic {
    /// Adds the cost of another layer. The sizes are then the sizes of `other`.
    pub fn add(&mut self, other: &Self) {
        *self = Self { needed: self.needed + other.needed, fetched: self.fetched + other.fetched, ..*other };
    }

    /// The cost since an earlier reading.
    pub fn since(&self, earlier: &Self) -> Self {
        Self { needed: self.needed - earlier.needed, fetched: self.fetched - earlier.fetched, ..*self }
    }

    /// Bytes that were copied to the device. The same number was copied back.
    pub fn bytes(&self) -> u64 {
        self.fetched * self.expert_bytes as u64
    }

    /// The share of the needed experts that were in slots; 1 if none was needed.
    pub fn hit_rate(&self) -> f64 {
        1.0 - self.fetched as f64 / self.needed.max(1) as f64
    }
}

impl fmt::Display for ExpertTraffic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "experts in host memory: {} of {} in slots of each layer; steps needed {} experts, {} of them were fetched (hit rate {:.3}), \
             {:.3} GB each way",
            self.num_slots,
            self.num_experts,
            self.needed,
            self.fetched,
            self.hit_rate(),
            self.bytes() as f64 / 1e9
        )
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::routed::NO_EXPERT;

    /// Whether every slot and every home has exactly one expert, and both tables agree.
    fn is_bijection(r: &Residency) -> bool {
        let experts = r.place.len();
        let slots = r.held.len();
        let mut homes = vec![false; experts - slots];
        let placed = r.place.iter().enumerate().all(|(e, place)| match *place {
            Place::Slot(slot) => r.held[slot] == e,
            Place::Home(home) => !std::mem::replace(&mut homes[home], true),
        });
        placed && homes.iter().all(|taken| *taken)
    }

    fn steps() -> impl Strategy<Value = (usize, usize, Vec<Vec<u32>>)> {
        (1usize..40, 1usize..40).prop_flat_map(|(a, b)| {
            let experts = a.max(b);
            let slots = a.min(b);
            let id = prop_oneof![9 => 0..experts as u32 + 2, 1 => Just(NO_EXPERT)];
            let step = prop::collection::vec(id, 0..60);
            (Just(experts), Just(slots), prop::collection::vec(step, 1..30))
        })
    }

    proptest! {
        /// Each needed expert is computed in exactly one pass, from the slot that holds it, within `max_passes` passes.
        /// No expert leaves that the pass computes, and the exchanges agree with the places.
        #[test]
        fn every_step_is_computed_once((experts, slots, steps) in steps()) {
            let mut r = Residency::new(experts, slots).unwrap();
            for ids in steps {
                let mut needed: Vec<usize> =
                    ids.iter().map(|&id| id as usize).filter(|&id| id < experts).collect();
                needed.sort_unstable();
                needed.dedup();
                prop_assert_eq!(r.begin(&ids), needed.len());
                let mut computed = Vec::new();
                for _ in 0..max_passes(experts, slots, ids.len()) {
                    let before = r.clone();
                    let pass = r.pass();
                    prop_assert!(is_bijection(&r));
                    for (expert, slot) in pass.map.iter().enumerate() {
                        let Some(slot) = slot else { continue };
                        prop_assert_eq!(r.held[*slot], expert);
                        computed.push(expert);
                    }
                    for Exchange { slot, home } in &pass.exchanges {
                        let came = r.held[*slot];
                        let left = before.held[*slot];
                        prop_assert_eq!(before.place[came], Place::Home(*home));
                        prop_assert_eq!(r.place[left], Place::Home(*home));
                        prop_assert!(pass.map[came].is_some() && pass.map[left].is_none());
                    }
                }
                computed.sort_unstable();
                prop_assert_eq!(computed, needed);
                prop_assert_eq!(r.pass(), Pass { map: vec![None; experts], exchanges: vec![] });
            }
        }

        /// A step whose experts are all in slots moves nothing.
        #[test]
        fn what_is_there_is_not_fetched((experts, slots, steps) in steps()) {
            let mut r = Residency::new(experts, slots).unwrap();
            for ids in steps {
                r.begin(&ids);
                while !r.pass().exchanges.is_empty() {}
                let held: Vec<u32> = r.held.iter().map(|&e| e as u32).collect();
                r.begin(&held);
                let pass = r.pass();
                prop_assert!(pass.exchanges.is_empty());
                prop_assert_eq!(pass.map.iter().flatten().count(), slots);
            }
        }
    }

    /// Distinct experts of a row, sampled by Zipf's law.
    fn zipf(experts: usize, top_k: usize, seed: &mut u64) -> Vec<u32> {
        let weight = |e: usize| 1.0 / (e as f64 + 1.0);
        let total: f64 = (0..experts).map(weight).sum();
        let mut row = Vec::new();
        while row.len() < top_k {
            *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let mut at = (*seed >> 11) as f64 / (1u64 << 53) as f64 * total;
            let drawn = (0..experts).find(|&e| {
                at -= weight(e);
                at < 0.0
            });
            // The popular experts are not the ones that are in slots at the start.
            let id = ((drawn.unwrap_or(0) * 37 + 90) % experts) as u32;
            if !row.contains(&id) {
                row.push(id);
            }
        }
        row
    }

    /// Half of Qwen3-30B-A3B's experts are in slots. Once warm, far more than half of the experts that a skewed step
    /// needs are in slots, and a prompt does not change that.
    #[test]
    fn popular_experts_stay_on_the_device() {
        let experts = 128;
        let slots = 64;
        let top_k = 8;
        let mut r = Residency::new(experts, slots).unwrap();
        let mut seed = 7;
        let mut hits = |r: &mut Residency, steps: usize| {
            let mut fetched = 0;
            for _ in 0..steps {
                r.begin(&zipf(experts, top_k, &mut seed));
                fetched += r.pass().exchanges.len();
            }
            1.0 - fetched as f64 / (steps * top_k) as f64
        };
        hits(&mut r, 500);
        let warm = hits(&mut r, 1000);
        assert!(warm > 0.8, "{warm}");
        let all: Vec<u32> = (0..experts as u32).collect();
        r.begin(&all);
        while !r.pass().exchanges.is_empty() {}
        let after = hits(&mut r, 200);
        assert!(after > warm - 0.1, "{after} after a prompt, {warm} before");
    }

    #[test]
    fn slots_that_cannot_be_are_refused() {
        for (experts, slots) in [(4, 0), (4, 5), (0, 0)] {
            let error = Residency::new(experts, slots).unwrap_err().to_string();
            assert!(error.contains(&format!("expected 1 to {experts}, got {slots}")), "{error}");
        }
        assert_eq!([0, 1, 8, 64, 65, 1000].map(|choices| max_passes(128, 64, choices)), [1, 1, 1, 1, 2, 2]);
    }

    #[test]
    fn traffic_adds_up() {
        let layer = ExpertTraffic { num_experts: 8, num_slots: 4, expert_bytes: 10, needed: 5, fetched: 2 };
        let mut all = ExpertTraffic::default();
        all.add(&layer);
        all.add(&layer);
        assert_eq!(all, ExpertTraffic { needed: 10, fetched: 4, ..layer });
        assert_eq!(all.since(&layer), layer);
        assert_eq!((all.bytes(), all.hit_rate()), (40, 0.6));
        assert!(all.to_string().contains("needed 10 experts, 4 of them were fetched (hit rate 0.600)"));
    }
}
