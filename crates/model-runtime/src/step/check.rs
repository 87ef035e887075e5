//! Checks that a step from another rank can be run.

use candle_core::{Result, bail};

use super::Step;

impl Step {
    /// Fails unless [`Step::new`] can have made this step for a model with this vocabulary and a KV cache of
    /// `num_blocks` blocks of `block_size` slots. Running it then reads and writes nothing outside of its arrays and of
    /// the cache.
    ///
    /// # Errors
    /// The first array that is wrong, with its place.
    pub fn check(&self, vocab_size: usize, num_blocks: usize, block_size: usize) -> Result<()> {
        let rows = self.num_tokens();
        let sequences = self.num_sequences();
        // Slots are numbers of 32 bits.
        let slots = num_blocks.checked_mul(block_size).filter(|&slots| u32::try_from(slots).is_ok());
        if block_size == 0 || slots.is_none() {
            bail!("step: a KV cache of {num_blocks} blocks of {block_size} slots")
        }
        for (name, len, expected) in [
            ("positions", self.positions.len(), Some(rows)),
            ("slot_mapping", self.slot_mapping.len(), Some(rows)),
            ("rope_len", self.rope_len.len(), Some(rows)),
            ("block_tables", self.block_tables.len(), sequences.checked_mul(self.max_blocks)),
            ("states", self.states.len(), Some(sequences)),
            ("scored_tokens", self.scored_tokens.len(), Some(self.scored_rows.len())),
        ] {
            if Some(len) != expected {
                bail!("step: {name} has {len} entries for {rows} rows of {sequences} sequences")
            }
        }
        for (name, starts, end) in [
            ("query_start_loc", &self.query_start_loc, rows),
            ("logits_start_loc", &self.logits_start_loc, self.logits_rows.len()),
            ("scored_start_loc", &self.scored_start_loc, self.scored_rows.len()),
        ] {
            if !are_starts(starts, sequences, end) {
                bail!("step: {name} does not cut {end} entries for {sequences} sequences")
            }
        }
        if let Some(block) = self.block_tables.iter().find(|&&block| block as usize >= num_blocks) {
            bail!("step: KV block {block} of a cache of {num_blocks}")
        }
        self.check_vocab(vocab_size)?;
        for s in 0..sequences {
            if let Err(e) = self.check_sequence(s, block_size) {
                bail!("step: sequence {s}: {e}")
            }
        }
        Ok(())
    }

    /// Whether each sequence begins with its first position, as in a KV cache that has no rows yet.
    pub fn begins_all(&self) -> bool {
        let first = |s: usize| self.positions.get(super::range(&self.query_start_loc, s).start);
        (0..self.num_sequences()).all(|s| first(s) == Some(&0))
    }

    /// Fails unless the entries of sequence `s` follow from its first position, its prompt's length and its blocks.
    fn check_sequence(&self, s: usize, block_size: usize) -> Result<()> {
        let rows = super::range(&self.query_start_loc, s);
        let table = &self.block_tables[s * self.max_blocks..][..self.max_blocks];
        if rows.is_empty() {
            bail!("it has no rows")
        }
        let start = self.positions[rows.start];
        let prompt = self.rope_len[rows.start];
        for (row, position) in rows.clone().zip(u64::from(start)..) {
            let got = self.positions[row];
            let slot = self.slot_mapping[row];
            let rope = self.rope_len[row];
            if u64::from(got) != position {
                bail!("row {row} is at position {got}, expected {position}")
            }
            let Some(&block) = table.get(position as usize / block_size) else {
                bail!("position {position} is beyond its {} KV blocks", table.len())
            };
            let expected = block as usize * block_size + position as usize % block_size;
            if slot as usize != expected || slot == u32::MAX {
                bail!("row {row} has KV slot {slot}, expected {expected}")
            }
            if u64::from(rope) != u64::from(prompt).max(position + 1) {
                bail!("row {row} has the rotary length {rope} at position {position} of a prompt of {prompt}")
            }
        }
        let logits = &self.logits_rows[super::range(&self.logits_start_loc, s)];
        let all_or_last = [0, 1, rows.len()].contains(&logits.len());
        if !all_or_last || !logits.iter().map(|&row| row as usize).eq(rows.end - logits.len()..rows.end) {
            bail!("logits of rows {logits:?}, expected all, the last or none of {rows:?}")
        }
        let scored = &self.scored_rows[super::range(&self.scored_start_loc, s)];
        if scored.len() > rows.len()
            || !scored.iter().map(|&row| row as usize).eq(rows.start..rows.start + scored.len())
        {
            bail!("scored rows {scored:?}, expected the first ones of {rows:?}")
        }
        Ok(())
    }
}

/// Whether these are the starts of `runs` runs of entries, and the end.
fn are_starts(starts: &[u32], runs: usize, end: usize) -> bool {
    match starts {
        [] => runs == 0 && end == 0,
        [first, .., last] => {
            starts.len() == runs + 1 && *first == 0 && *last as usize == end && starts.is_sorted()
        }
        [one] => runs == 0 && *one == 0 && end == 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::step::{LogitsRows, SequenceStep};

    fn step() -> Step {
        let sequence = |token_ids, start, prompt_len, blocks, logits, scored| SequenceStep {
            token_ids,
            start,
            prompt_len,
            blocks,
            logits,
            scored,
        };
        let sequences = [
            sequence(&[7], 5, 3, &[4, 1, 2], LogitsRows::Last, &[]),
            sequence(&[1, 2, 3], 0, 9, &[3, 0], LogitsRows::None, &[2, 3]),
            sequence(&[8, 9], 2, 4, &[5, 0], LogitsRows::All, &[]),
        ];
        Step::new(sequences, 2).unwrap()
    }

    #[test]
    fn what_is_assembled_is_right() {
        for step in [step(), Step::default(), Step::new([], 2).unwrap()] {
            step.check(10, 6, 2).unwrap();
        }
        assert!(step().check(9, 6, 2).is_err(), "a token outside of the vocabulary");
        assert!(step().check(10, 5, 2).is_err(), "a block outside of the cache");
        assert!(step().check(10, 6, 4).is_err() && step().check(10, 6, 0).is_err(), "slots of other blocks");
        for (num_blocks, block_size) in [(6, 0), (usize::MAX, 2), (1 << 31, 2)] {
            assert!(Step::default().check(10, num_blocks, block_size).is_err(), "no cache has these slots");
        }
        assert!(!step().begins_all() && Step::default().begins_all());
    }

    /// Every change of a word in any array, and every array with a word too many or too few, is found.
    #[test]
    fn every_altered_entry_is_found() {
        type Array = fn(&mut Step) -> &mut Vec<u32>;
        let arrays: [Array; 11] = [
            |s| &mut s.positions,
            |s| &mut s.slot_mapping,
            |s| &mut s.rope_len,
            |s| &mut s.query_start_loc,
            |s| &mut s.block_tables,
            |s| &mut s.logits_rows,
            |s| &mut s.logits_start_loc,
            |s| &mut s.scored_rows,
            |s| &mut s.scored_tokens,
            |s| &mut s.scored_start_loc,
            |s| &mut s.states,
        ];
        let fails = |altered: &dyn Fn(&mut Step)| {
            let mut step = step();
            altered(&mut step);
            step.check(10, 6, 2).is_err()
        };
        for (number, array) in arrays.into_iter().enumerate() {
            assert!(fails(&|s| array(s).truncate(1)) && fails(&|s| array(s).push(0)), "{number}");
            for at in 0..array(&mut step()).len() {
                for value in [0, 1, 2, 3, 99, u32::MAX - 1, u32::MAX] {
                    let before = array(&mut step())[at];
                    // These changes are valid: scored tokens may be any tokens that exist, and blocks to which no row
                    // writes may be any blocks. A prompt may be longer than its rows, or end at the first row.
                    // Step::check_states checks the states.
                    let free = number == 10
                        || number == 8 && value < 10
                        || number == 4 && [0, 1, 5, 6, 8].contains(&at) && value < 6
                        || number == 2 && (at == 0 && value >= 6 || at == 4 && value == 3);
                    if value != before && !free {
                        assert!(
                            fails(&|s| array(s)[at] = value),
                            "array {number}[{at}] = {value}, was {before}"
                        );
                    }
                }
            }
        }
        assert!(fails(&|s| s.max_blocks = 0) && fails(&|s| s.max_blocks = usize::MAX));
    }
}
