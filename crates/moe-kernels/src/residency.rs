//! Experts more than the device has slots for: which are in the slots, which at home in host memory, and who makes room.
//!
//! Every expert is in exactly one place. A step that needs experts which are at home exchanges them with experts that it does
//! not need; where it needs more experts than there are slots it runs in passes, each over as many as fit. This is the rule by
//! which the device decides for itself (`cuda/experts/residency.cu`, integer for integer), as pure functions.
//!
//! Who leaves is the coldest: an expert's heat is how many of the last steps needed it, older ones counting less. One step of
//! many needs one expert once, however many rows chose it, since that is what a fetch costs. So what a step needed once leaves
//! first, and a prompt, which needs everything once, does not drive out what decoding needs all the time.

use std::fmt;

use candle_core::{Result, bail};
use serde::Serialize;

/// What a step that needs an expert adds to its heat.
const USE: u32 = 1 << 16;
/// A step takes a 64th of an expert's heat.
const AGE_SHIFT: u32 = 6;

/// Where an expert's weights are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// A slot of the device.
    Slot(usize),
    /// A home in host memory.
    Home(usize),
}

/// An expert at home that changes places with one in a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exchange {
    /// The slot.
    pub slot: usize,
    /// The home.
    pub home: usize,
}

/// A part of a step's experts that are on the device at once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pass {
    /// The slot of each expert that the pass computes, \[E\].
    pub map: Vec<Option<usize>>,
    /// What changes places before it.
    pub exchanges: Vec<Exchange>,
}

/// Where the experts of a layer are, and what steps have needed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Residency {
    place: Vec<Place>,
    heat: Vec<u32>,
    /// The expert in each slot.
    held: Vec<usize>,
    /// What the step under way still needs.
    pending: Vec<bool>,
}

impl Residency {
    /// The first `num_slots` of `num_experts` experts in the slots, the others at home, all cold.
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

    /// A step begins whose rows chose these experts; ids of no expert are passed over. Returns how many it needs.
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

    /// The next pass of the step: the experts it still needs that are in slots, and the lowest of its missing ones as
    /// far as slots can be left. An empty one when nothing is pending.
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

/// Passes that steps of so many choices (rows times K) may need.
pub fn max_passes(num_experts: usize, num_slots: usize, choices: usize) -> usize {
    num_experts.min(choices).div_ceil(num_slots.max(1)).max(1)
}

/// What the experts of a layer have cost that live in host memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ExpertTraffic {
    /// Experts.
    pub num_experts: usize,
    /// Slots of the device.
    pub num_slots: usize,
    /// Bytes of an expert.
    pub expert_bytes: usize,
    /// Experts that steps needed, each once a step.
    pub needed: u64,
    /// Needed experts that were at home.
    pub fetched: u64,
}

impl ExpertTraffic {
    /// Adds what another layer has cost; sizes become those of `other`.
    pub fn add(&mut self, other: &Self) {
        *self = Self { needed: self.needed + other.needed, fetched: self.fetched + other.fetched, ..*other };
    }

    /// What has been added since an earlier reading.
    pub fn since(&self, earlier: &Self) -> Self {
        Self { needed: self.needed - earlier.needed, fetched: self.fetched - earlier.fetched, ..*self }
    }

    /// Bytes that came to the device; as many left it.
    pub fn bytes(&self) -> u64 {
        self.fetched * self.expert_bytes as u64
    }

    /// Share of the experts that steps needed which were in slots; 1 where none was needed.
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
        /// Each needed expert is computed in exactly one pass, from the slot that holds it, within `max_passes`; nobody leaves
        /// whom the pass computes; what moves is what the places say.
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

    /// Distinct experts of a row, drawn by Zipf's law.
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
            // Popular experts are not those that begin in the slots.
            let id = ((drawn.unwrap_or(0) * 37 + 90) % experts) as u32;
            if !row.contains(&id) {
                row.push(id);
            }
        }
        row
    }

    /// Half of Qwen3-30B-A3B's experts in slots: warm, far more than half of what a skewed step needs is there, and a prompt does
    /// not change that.
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
