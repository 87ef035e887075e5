//! Which recurrent states are saved, and at the end of which KV block.
//!
//! A saved state belongs to a block with known contents: it is the state of a sequence after the prefix that ends
//! with the block. It is forgotten with the contents, or when another state needs its place (least recently used
//! first).
//!
//! A prompt leaves each of its states in a place of its own. A sequence that decodes keeps one place while it runs, and
//! its state moves on in it from block to block, so that the end of an answer costs one place, however long the answer
//! is. States of answers have a quarter of the places: beyond that they give way first, and they displace no more
//! states of prompts.

use crate::lru::Lru;

/// No block, or no place.
const NONE: u32 = u32::MAX;

/// The places of saved states.
#[derive(Clone, Debug)]
pub(crate) struct SavedStates {
    /// The place of the state at the end of each block.
    of_block: Vec<u32>,
    /// The block of each place.
    block_of: Vec<u32>,
    /// Whether a running sequence keeps the place.
    kept: Vec<bool>,
    free: Vec<u32>,
    /// Places of prompts that belong to a block, and of answers that others went on from; the one that was used first
    /// is at the front.
    prompts: Lru,
    /// Places that ended answers left.
    answers: Lru,
    evicted: u64,
}

impl SavedStates {
    /// `num_saved` empty places for the states at the ends of `num_blocks` blocks.
    pub fn new(num_blocks: usize, num_saved: usize) -> Self {
        Self {
            of_block: vec![NONE; num_blocks],
            block_of: vec![NONE; num_saved],
            kept: vec![false; num_saved],
            free: (0..num_saved as u32).rev().collect(),
            prompts: Lru::new(num_saved),
            answers: Lru::new(num_saved),
            evicted: 0,
        }
    }

    /// How many states belong to a block, and how many were given up for others so far.
    pub fn counts(&self) -> (usize, u64) {
        (self.block_of.iter().filter(|&&block| block != NONE).count(), self.evicted)
    }

    /// The place of the state at the end of a block.
    pub fn at(&self, block: u32) -> Option<u32> {
        self.of_block.get(block as usize).copied().filter(|&place| place != NONE)
    }

    /// A sequence begins with this saved state.
    pub fn touch(&mut self, place: u32) {
        if !self.kept[place as usize] {
            self.answers.remove(place);
            self.prompts.push(place);
        }
    }

    /// A place for a state that a prompt leaves; `None` if all places wait for theirs.
    pub fn take(&mut self) -> Option<u32> {
        let answers_first = self.num_answers() > self.most_answers();
        self.free_place(answers_first)
    }

    /// A place that a running sequence keeps until [`Self::end`]; `None` if others keep as many as answers may have.
    pub fn keep(&mut self) -> Option<u32> {
        let most = self.most_answers();
        if self.num_kept() >= most {
            return None;
        }
        let place = self.free_place(self.num_answers() >= most)?;
        self.kept[place as usize] = true;
        Some(place)
    }

    /// The sequence that keeps a place writes a new state there: the one before is not found any more.
    pub fn detach(&mut self, place: u32) {
        let block = std::mem::replace(&mut self.block_of[place as usize], NONE);
        if let Some(of_block) = self.of_block.get_mut(block as usize) {
            *of_block = NONE;
        }
    }

    /// The sequence that has kept a place ends. Its last state stays there, if it belongs to a block.
    pub fn end(&mut self, place: u32) {
        self.kept[place as usize] = false;
        match self.block_of[place as usize] {
            NONE => self.free.push(place),
            _ => self.answers.push(place),
        }
    }

    /// The state in a place that was taken is the one at the end of a block; of two states of a block the first stays.
    pub fn attach(&mut self, block: u32, place: u32) {
        if self.at(block).is_some() {
            return self.put_back(place);
        }
        self.of_block[block as usize] = place;
        self.block_of[place as usize] = block;
        if !self.kept[place as usize] {
            self.prompts.push(place);
        }
    }

    /// A place that was taken is not needed, unless a running sequence keeps it.
    pub fn put_back(&mut self, place: u32) {
        if !self.kept[place as usize] {
            self.free.push(place);
        }
    }

    /// Forgets the state at the end of a block.
    pub fn forget(&mut self, block: u32) {
        let Some(place) = self.at(block) else { return };
        self.detach(place);
        self.prompts.remove(place);
        self.answers.remove(place);
        self.put_back(place);
    }

    /// A place without a state, or one whose state gives way.
    fn free_place(&mut self, answers_first: bool) -> Option<u32> {
        if let Some(place) = self.free.pop() {
            return Some(place);
        }
        let [answer, prompt] = [self.answers.first(), self.prompts.first()];
        let place = if answers_first { answer.or(prompt) } else { prompt.or(answer) }?;
        self.forget(self.block_of[place as usize]);
        self.evicted += 1;
        self.free.pop()
    }

    fn num_kept(&self) -> usize {
        self.kept.iter().filter(|&&kept| kept).count()
    }

    fn num_answers(&self) -> usize {
        self.num_kept() + self.answers.len()
    }

    /// Places that answers may have when states are many: a quarter, and never the only one.
    fn most_answers(&self) -> usize {
        let places = self.block_of.len();
        places.div_ceil(4).min(places.saturating_sub(1))
    }
}
