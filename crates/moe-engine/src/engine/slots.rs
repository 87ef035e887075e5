//! Which slot of a device stores the data that a sequence's next token depends on, and whether the slot is up to date.
//!
//! A slot is up to date if it has counted as many tokens as its sequence has; the device counts the tokens that it
//! samples. A slot is stale if the sequence is new, if it lost its slot while it was preempted, or if the host sampled
//! its tokens. Then it is rebuilt from the sequence's tokens. Slots are not given back: a new sequence takes the slot
//! whose sequence has not run for longest. There are as many slots as sequences can run at the same time, so a sequence
//! that runs in every step keeps its slot.

use super::plan::Key;

#[derive(Clone, Default)]
struct Slot {
    owner: Option<Key>,
    /// Number of output tokens that it will have counted after the steps launched so far.
    counted: usize,
    /// The last step that used it.
    step: u64,
}

/// A sequence's slot in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Assigned {
    pub slot: usize,
    /// Whether the slot does not hold the sequence's tokens.
    pub stale: bool,
}

pub(super) struct Slots {
    slots: Vec<Slot>,
    step: u64,
}

impl Slots {
    pub fn new(count: usize) -> Self {
        Self { slots: vec![Slot::default(); count], step: 0 }
    }

    /// The slots of a step's sequences that sample the tokens of these output positions; `None` if there are more
    /// sequences than slots.
    pub fn assign(&mut self, wanted: &[(Key, usize)]) -> Option<Vec<Assigned>> {
        self.step += 1;
        // Sequences that have a slot come first, so that no other takes it.
        let kept: Vec<Option<usize>> = wanted.iter().map(|(key, _)| self.touch(*key)).collect();
        wanted.iter().zip(kept).map(|(&(key, position), kept)| self.use_slot(key, position, kept)).collect()
    }

    fn touch(&mut self, key: Key) -> Option<usize> {
        let at = self.slots.iter().position(|slot| slot.owner == Some(key))?;
        self.slots[at].step = self.step;
        Some(at)
    }

    fn use_slot(&mut self, key: Key, position: usize, kept: Option<usize>) -> Option<Assigned> {
        let idle = || {
            let idle = self.slots.iter().enumerate().filter(|(_, slot)| slot.step < self.step);
            idle.min_by_key(|(_, slot)| slot.step).map(|(at, _)| at)
        };
        let at = kept.or_else(idle)?;
        let slot = &mut self.slots[at];
        let stale = kept.is_none() || slot.counted != position;
        *slot = Slot { owner: Some(key), counted: position + 1, step: self.step };
        Some(Assigned { slot: at, stale })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assign(slots: &mut Slots, wanted: &[(u64, usize)]) -> Vec<(usize, bool)> {
        let wanted: Vec<(Key, usize)> = wanted.iter().map(|&(id, position)| ((id, 0), position)).collect();
        slots.assign(&wanted).unwrap().into_iter().map(|a| (a.slot, a.stale)).collect()
    }

    #[test]
    fn a_running_sequence_keeps_its_slot_and_counts() {
        let mut slots = Slots::new(3);
        assert_eq!(assign(&mut slots, &[(7, 0), (8, 0)]), [(0, true), (1, true)]);
        assert_eq!(assign(&mut slots, &[(8, 1), (7, 1)]), [(1, false), (0, false)]);
        // The host sampled position 2 of sequence 7.
        assert_eq!(assign(&mut slots, &[(7, 3), (8, 2)]), [(0, true), (1, false)]);
    }

    #[test]
    fn the_slot_that_rested_longest_is_taken() {
        let mut slots = Slots::new(2);
        assert_eq!(assign(&mut slots, &[(1, 0), (2, 0)]), [(0, true), (1, true)]);
        assert_eq!(assign(&mut slots, &[(2, 1)]), [(1, false)]);
        // A new sequence comes first in the step and must not take the slot of a later one.
        assert_eq!(assign(&mut slots, &[(3, 0), (2, 2)]), [(0, true), (1, false)]);
        // Sequence 1 was preempted and resumes: its counts are gone.
        assert_eq!(assign(&mut slots, &[(1, 1), (3, 1)]), [(1, true), (0, false)]);
        assert!(slots.assign(&[((4, 0), 0), ((5, 0), 0), ((6, 0), 0)]).is_none());
    }

    #[test]
    fn a_preempted_sequence_whose_slot_nobody_took_goes_on() {
        let mut slots = Slots::new(2);
        assert_eq!(assign(&mut slots, &[(1, 0), (2, 0)]), [(0, true), (1, true)]);
        assert_eq!(assign(&mut slots, &[(2, 1)]), [(1, false)]);
        assert_eq!(assign(&mut slots, &[(2, 2), (1, 1)]), [(1, false), (0, false)]);
        // Choices of one request are different sequences.
        assert_eq!(slots.assign(&[((1, 1), 1)]), Some(vec![Assigned { slot: 0, stale: true }]));
    }
}
