//! The recurrent states of a step's sequences.

use candle_core::{Result, bail};

use super::Step;
use crate::kv_cache::{CacheSizes, StateCopy};

impl Step {
    /// Sets the number of each sequence's state, and the copies before and after the layers run.
    ///
    /// # Errors
    /// Another number of states than of sequences.
    pub fn with_states(
        self,
        states: Vec<u32>,
        restores: Vec<StateCopy>,
        saves: Vec<StateCopy>,
    ) -> Result<Self> {
        if states.len() != self.num_sequences() {
            bail!("step: {} recurrent states for {} sequences", states.len(), self.num_sequences())
        }
        Ok(Self { states, restores, saves, ..self })
    }

    /// Saved states that are copied before the layers run.
    pub fn restores(&self) -> &[StateCopy] {
        &self.restores
    }

    /// States that are saved after the layers have run.
    pub fn saves(&self) -> &[StateCopy] {
        &self.saves
    }

    /// Fails unless each sequence has its own state in a cache of these sizes, and copies name these states. A sequence
    /// begins at position 0 or continues, so a copy to the state of a sequence that begins at 0 is refused, too.
    ///
    /// # Errors
    /// The first state or copy that is wrong.
    pub fn check_states(&self, sizes: &CacheSizes) -> Result<()> {
        let mut sorted = self.states.clone();
        sorted.sort_unstable();
        if let Some(twice) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            bail!("step: two sequences have the recurrent state {}", twice[0])
        }
        if let Some(&state) = sorted.last().filter(|&&state| state as usize >= sizes.num_states) {
            bail!("step: recurrent state {state} of {}", sizes.num_states)
        }
        for (name, copies) in [("restored", &self.restores), ("saved", &self.saves)] {
            check_copies(copies, &sorted, sizes.num_saved, name)?;
        }
        let begins = |state: u32| {
            let sequence = self.states.iter().position(|&other| other == state);
            let first = sequence.and_then(|s| self.query_start_loc.get(s));
            first.and_then(|&row| self.positions.get(row as usize)) == Some(&0)
        };
        match self.restores.iter().find(|copy| begins(copy.state)) {
            Some(copy) => bail!("step: state {} is restored for a sequence at position 0", copy.state),
            None => Ok(()),
        }
    }
}

/// Fails unless the copies name different states of the step. Two sequences may begin with one saved state, but a place
/// is written only once.
fn check_copies(copies: &[StateCopy], sorted_states: &[u32], num_saved: usize, name: &str) -> Result<()> {
    for (number, copy) in copies.iter().enumerate() {
        let StateCopy { state, saved } = *copy;
        if sorted_states.binary_search(&state).is_err() {
            bail!("step: state {state} is {name}, and no sequence has it")
        }
        if saved as usize >= num_saved {
            bail!("step: a state is {name} at place {saved} of {num_saved}")
        }
        let clashes = |other: &StateCopy| other.state == state || name == "saved" && other.saved == saved;
        if copies[..number].iter().any(clashes) {
            bail!("step: two states are {name} at once: {copy:?} and another one")
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::step::{LogitsRows, SequenceStep};

    const SIZES: CacheSizes = CacheSizes { num_blocks: 6, block_size: 2, num_states: 3, num_saved: 2 };

    fn step(states: &[u32], restores: &[StateCopy], saves: &[StateCopy]) -> Result<Step> {
        let sequence = |start, blocks| SequenceStep {
            token_ids: &[7, 8],
            start,
            prompt_len: 9,
            blocks,
            logits: LogitsRows::Last,
            scored: &[],
        };
        let step = Step::new([sequence(2, &[1, 4]), sequence(0, &[2])], 2)?;
        step.with_states(states.to_vec(), restores.to_vec(), saves.to_vec())
    }

    #[test]
    fn wrong_states_and_copies_are_found() -> Result<()> {
        let copy = |state, saved| StateCopy { state, saved };
        let check = |states: &[u32], restores: &[StateCopy], saves: &[StateCopy]| {
            step(states, restores, saves).and_then(|step| step.check_states(&SIZES))
        };
        check(&[2, 0], &[copy(2, 1)], &[copy(0, 1), copy(2, 0)])?;
        for (states, restores, saves, reason) in [
            (&[0][..], &[][..], &[][..], "1 recurrent states for 2 sequences"),
            (&[1, 1], &[], &[], "two sequences have the recurrent state 1"),
            (&[0, 3], &[], &[], "recurrent state 3 of 3"),
            (&[0, 1], &[copy(2, 0)], &[], "state 2 is restored, and no sequence has it"),
            (&[0, 1], &[], &[copy(2, 0)], "state 2 is saved, and no sequence has it"),
            (&[0, 1], &[copy(0, 2)], &[], "restored at place 2 of 2"),
            (&[0, 1], &[], &[copy(0, 2)], "saved at place 2 of 2"),
            (&[0, 1], &[copy(0, 0), copy(0, 1)], &[], "two states are restored at once"),
            (&[0, 1], &[], &[copy(0, 1), copy(1, 1)], "two states are saved at once"),
            (&[0, 1], &[copy(1, 0)], &[], "state 1 is restored for a sequence at position 0"),
        ] {
            let error = check(states, restores, saves).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
        Ok(())
    }
}
