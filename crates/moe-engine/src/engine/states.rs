//! Recurrent states of sequences: which are free, and where states are saved for the prefix cache.
//!
//! A saved state is worth something only together with the KV blocks of the same prefix, so states are saved at the
//! ends of full blocks. A step that is to save the state of a prompt ends that sequence's rows there. A sequence that
//! decodes comes to the end of every block by itself: its state moves on from one to the next in one place, so that
//! the next turn of a chat begins at the end of the answer.

use model_runtime::{BlockAllocator, StateCopy};

/// Tokens from one saved state of a prompt to the next, at least, if a step's limit of rows cuts the prompt there.
pub(super) const INTERVAL: usize = 512;
/// Tokens that a saved state must spare, at least, if the prompt is cut for it alone: the cut costs a step.
const WORTH: usize = 64;

/// The states that no sequence has.
pub(super) struct FreeStates(Vec<u32>);

impl FreeStates {
    pub fn new(num_states: usize) -> Self {
        Self((0..num_states as u32).rev().collect())
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// A state for a sequence that computes a prompt from `start` on; `None` if all are taken. Its last full block
    /// that is not its last token's ends at `last_edge`; `None` if no state is to be saved.
    pub fn take(&mut self, start: &PrefixStart, last_edge: Option<usize>) -> Option<SequenceState> {
        let number = self.0.pop()?;
        let worth = |edge: usize, from: usize| if edge >= from + WORTH { edge } else { 0 };
        let saves = last_edge.is_some();
        let last_edge = last_edge.unwrap_or(0);
        let branch = worth(start.known.min(last_edge), start.tokens);
        let last = worth(last_edge, start.tokens.max(branch));
        let edges = [branch, last];
        let restore = start.saved;
        let saved_at = start.tokens;
        Some(SequenceState { number, restore, edges, last_edge, saves, saved_at, place: None, kept: None })
    }

    pub fn put_back(&mut self, state: SequenceState) {
        self.0.push(state.number);
    }
}

/// The prefix from which a sequence goes on.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PrefixStart {
    /// Its tokens.
    pub tokens: usize,
    /// Tokens of the longest prefix that has known blocks: where it ends, other prompts went on in another way.
    pub known: usize,
    /// The place of the saved state after it.
    pub saved: Option<u32>,
}

/// The state of a sequence.
pub(super) struct SequenceState {
    pub number: u32,
    /// The saved state that it begins with, until a step has that copy.
    restore: Option<u32>,
    /// Positions at which its rows in a step end and its state is saved; 0 is none.
    edges: [usize; 2],
    last_edge: usize,
    /// Whether states are saved at all.
    saves: bool,
    /// Where its state was saved last, or where it began.
    saved_at: usize,
    /// Where a step saves its state, and at which position, until the block that ends there is announced.
    place: Option<(usize, u32)>,
    /// The place in which its state moves on while it decodes.
    kept: Option<u32>,
}

impl SequenceState {
    /// How many of `want` rows from position `computed` on are in the next step, so that it ends where the state is
    /// saved.
    pub fn rows(&self, computed: usize, want: usize, block_size: usize) -> usize {
        let end = computed + want;
        let inside = |edge: &usize| computed < *edge && *edge < end;
        let at_chunk = end / block_size * block_size;
        match self.edges.into_iter().find(inside) {
            Some(edge) => edge - computed,
            None if end <= self.last_edge && self.is_far(at_chunk) && at_chunk > computed => {
                at_chunk - computed
            }
            None => want,
        }
    }

    fn is_far(&self, position: usize) -> bool {
        position >= self.saved_at + INTERVAL
    }

    /// Whether the prompt's state is saved after this many tokens.
    pub fn is_saved_at(&self, computed: usize, block_size: usize) -> bool {
        let at_chunk = computed <= self.last_edge && computed.is_multiple_of(block_size);
        self.edges.contains(&computed) || at_chunk && self.is_far(computed)
    }

    /// The place for the state after this many tokens, if it is to be saved and there is one.
    fn place(&mut self, computed: usize, block_size: usize, allocator: &mut BlockAllocator) -> Option<u32> {
        if self.is_saved_at(computed, block_size) {
            return allocator.place_for_state();
        }
        let decodes = self.saves && computed > self.last_edge && computed.is_multiple_of(block_size);
        if !decodes {
            return None;
        }
        match self.kept {
            Some(place) => allocator.replace_state(place),
            None => self.kept = allocator.place_while_running(),
        }
        self.kept
    }

    /// The copy before its first step.
    pub fn restore(&mut self) -> Option<StateCopy> {
        self.restore.take().map(|saved| StateCopy { state: self.number, saved })
    }

    /// The copy after a step that ends at `computed`.
    pub fn save(&mut self, computed: usize, place: u32) -> StateCopy {
        self.saved_at = computed;
        self.place = Some((computed, place));
        StateCopy { state: self.number, saved: place }
    }

    /// The sequence does not run any more: its last state stays in its place.
    pub fn end(&mut self, allocator: &mut BlockAllocator) {
        if let Some(place) = self.kept.take() {
            allocator.end_place(place);
        }
    }

    /// The place of the state that was saved at a position.
    pub fn saved_place(&mut self, position: usize) -> Option<u32> {
        self.place.take_if(|(at, _)| *at == position).map(|(_, place)| place)
    }
}

/// The states of a step's sequences, in their order, and the copies before and after it.
#[derive(Default)]
pub(super) struct Copies {
    pub states: Vec<u32>,
    pub restores: Vec<StateCopy>,
    pub saves: Vec<StateCopy>,
}

impl Copies {
    /// Adds a sequence that has computed this many tokens after the step.
    pub fn add(
        &mut self,
        state: &mut SequenceState,
        computed: usize,
        block_size: usize,
        allocator: &mut BlockAllocator,
    ) {
        self.states.push(state.number);
        self.restores.extend(state.restore());
        if let Some(place) = state.place(computed, block_size, allocator) {
            self.saves.push(state.save(computed, place));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The ends of steps of at most `limit` rows for a prompt, and where its state is saved.
    fn steps(prompt: usize, start: PrefixStart, limit: usize) -> (Vec<usize>, Vec<usize>) {
        let last_edge = (prompt - 1) / 16 * 16;
        let Some(mut state) = FreeStates::new(1).take(&start, Some(last_edge)) else {
            return Default::default();
        };
        let mut computed = start.tokens;
        let mut ends = Vec::new();
        let mut saves = Vec::new();
        while computed < prompt {
            computed += state.rows(computed, limit.min(prompt - computed), 16);
            ends.push(computed);
            if state.is_saved_at(computed, 16) {
                state.save(computed, 0);
                saves.push(computed);
            }
        }
        (ends, saves)
    }

    #[test]
    fn states_are_saved_at_chunks_and_at_the_end_of_the_prompt() {
        let none = PrefixStart::default();
        // Short prompts are not cut.
        assert_eq!(steps(60, none, 512), (vec![60], vec![]));
        assert_eq!(steps(80, none, 512), (vec![64, 80], vec![64]));
        assert_eq!(steps(1100, none, 512), (vec![512, 1024, 1088, 1100], vec![512, 1024, 1088]));
        // Chunks that are no full blocks end earlier, where a state is due.
        assert_eq!(steps(900, none, 500), (vec![500, 896, 900], vec![896]));
        assert_eq!(steps(1200, none, 600), (vec![592, 1184, 1200], vec![592, 1184]));
    }

    #[test]
    fn a_state_is_saved_where_prompts_part() {
        let start = PrefixStart { tokens: 512, known: 800, saved: Some(3) };
        assert_eq!(steps(1000, start, 512), (vec![800, 992, 1000], vec![800, 992]));
        // Where little would be spared, the prompt is not cut.
        let start = PrefixStart { tokens: 512, known: 528, saved: Some(3) };
        assert_eq!(steps(560, start, 512), (vec![560], vec![]));
    }

    #[test]
    fn a_state_moves_on_from_block_to_block_as_a_sequence_decodes() -> candle_core::Result<()> {
        let mut allocator = BlockAllocator::with_prefix_cache(8, 16, 4)?;
        let mut free = FreeStates::new(2);
        let start = PrefixStart::default();
        let taken = (free.take(&start, Some(16)), free.take(&start, Some(0)));
        let (Some(mut state), Some(mut other)) = taken else { candle_core::bail!("no states") };
        let mut saves = Vec::new();
        for computed in 17..=70 {
            saves.extend(state.place(computed, 16, &mut allocator).map(|place| (computed, place)));
        }
        assert_eq!(saves, [(32, 0), (48, 0), (64, 0)]);
        // One of four places is for answers, until its sequence ends.
        assert_eq!(other.place(16, 16, &mut allocator), None);
        state.end(&mut allocator);
        assert_eq!(other.place(32, 16, &mut allocator), Some(0));
        Ok(())
    }

    #[test]
    fn nothing_is_saved_without_places_and_states_come_back() {
        let mut free = FreeStates::new(1);
        let start = PrefixStart { tokens: 16, known: 16, saved: Some(5) };
        let state = free.take(&start, None);
        assert!(free.take(&start, None).is_none(), "the only state is taken");
        let Some(mut state) = state else { panic!("no state") };
        assert_eq!((state.rows(16, 2000, 16), state.is_saved_at(1024, 16)), (2000, false));
        assert_eq!(state.restore(), Some(StateCopy { state: 0, saved: 5 }));
        assert_eq!(state.restore(), None);
        free.put_back(state);
        let Some(mut state) = free.take(&start, Some(96)) else { panic!("no state") };
        assert_eq!(state.save(96, 7), StateCopy { state: 0, saved: 7 });
        assert_eq!(
            (state.saved_place(80), state.saved_place(96), state.saved_place(96)),
            (None, Some(7), None)
        );
    }
}
