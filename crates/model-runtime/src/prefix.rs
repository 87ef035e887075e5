//! Prefix caching: which KV block holds which tokens after which prefix.
//!
//! A full block is known by its tokens and by the [`PrefixId`] of the tokens before it, so a chain of
//! ids stands for a whole prefix. Keys are compared, not hashed to a digest: two prefixes never
//! meet by accident. Blocks keep their contents after their last owner has gone, and are taken for
//! new contents in the order in which they were left (least recently used first).
//!
//! Everything is in arrays by block whose memory is written when they are made, so that a cache that fills needs no
//! more memory.

use std::hash::{BuildHasher, RandomState};

use crate::lru::Lru;
use crate::saved_states::SavedStates;

/// A prefix of tokens that ends with a full block, or the empty prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PrefixId(u64);

impl PrefixId {
    /// The empty prefix. Sequences of different `salt` share nothing: for models whose keys and
    /// values depend on more than the tokens.
    pub fn root(salt: u32) -> Self {
        Self(salt as u64)
    }
}

/// No block.
const NONE: u32 = u32::MAX;

/// What a block holds, in addition to its tokens.
#[derive(Clone, Copy, Debug)]
struct Content {
    /// The prefix that ends with the block, and the one before it.
    id: PrefixId,
    parent: PrefixId,
    /// The next block whose key has the same place in `heads`.
    next: u32,
}

/// The contents of blocks.
#[derive(Clone, Debug)]
pub(crate) struct PrefixTable {
    block_size: usize,
    /// [num_blocks, block_size].
    tokens: Vec<u32>,
    contents: Vec<Option<Content>>,
    /// First blocks by the hash of their keys.
    heads: Vec<u32>,
    hasher: RandomState,
    /// Blocks without an owner, the one that was left first at the front.
    idle: Lru,
    /// The recurrent states that are saved at the ends of blocks.
    saved: SavedStates,
    /// Above every root.
    last_id: u64,
}

impl PrefixTable {
    /// A table of `num_blocks` blocks of `block_size` tokens with room for `num_saved` recurrent states, empty.
    pub fn new(num_blocks: usize, block_size: usize, num_saved: usize) -> Self {
        Self {
            block_size,
            tokens: vec![NONE; num_blocks * block_size],
            contents: vec![None; num_blocks],
            heads: vec![NONE; num_blocks.next_power_of_two()],
            hasher: RandomState::new(),
            idle: Lru::new(num_blocks),
            saved: SavedStates::new(num_blocks, num_saved),
            last_id: u32::MAX as u64,
        }
    }

    /// Tokens of a block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Number of blocks that have contents and no owner.
    pub fn num_idle(&self) -> usize {
        self.idle.len()
    }

    /// The block that holds `tokens` after `parent`.
    pub fn find(&self, parent: PrefixId, tokens: &[u32]) -> Option<(u32, PrefixId)> {
        let mut block = self.heads[self.place(parent, tokens)];
        while let Some(content) = self.content(block) {
            if content.parent == parent && self.tokens(block) == tokens {
                return Some((block, content.id));
            }
            block = content.next;
        }
        None
    }

    /// Notes that an owned block holds `tokens`, as many as a block has, after `parent`. If another
    /// block holds them already, that one stays the known one.
    pub fn insert(&mut self, block: u32, parent: PrefixId, tokens: &[u32]) -> PrefixId {
        if let Some((_, id)) = self.find(parent, tokens) {
            return id;
        }
        self.forget(block);
        self.last_id += 1;
        let place = self.place(parent, tokens);
        let id = PrefixId(self.last_id);
        self.contents[block as usize] = Some(Content { id, parent, next: self.heads[place] });
        self.heads[place] = block;
        self.tokens[block as usize * self.block_size..][..self.block_size].copy_from_slice(tokens);
        id
    }

    /// The block's last owner leaves; `false` if it holds nothing worth keeping.
    pub fn leave(&mut self, block: u32) -> bool {
        let keeps = self.content(block).is_some();
        if keeps {
            self.idle.push(block);
        }
        keeps
    }

    /// A block without owners gets one again.
    pub fn take(&mut self, block: u32) {
        self.idle.remove(block);
    }

    /// Forgets the contents of the block that was left first and hands it out.
    pub fn evict(&mut self) -> Option<u32> {
        let block = self.idle.first()?;
        self.idle.remove(block);
        self.forget(block);
        Some(block)
    }

    /// The recurrent states that are saved at the ends of blocks.
    pub fn saved(&self) -> &SavedStates {
        &self.saved
    }

    /// The same, to change them.
    pub fn saved_mut(&mut self) -> &mut SavedStates {
        &mut self.saved
    }

    fn content(&self, block: u32) -> Option<Content> {
        *self.contents.get(block as usize)?
    }

    fn tokens(&self, block: u32) -> &[u32] {
        &self.tokens[block as usize * self.block_size..][..self.block_size]
    }

    fn place(&self, parent: PrefixId, tokens: &[u32]) -> usize {
        self.hasher.hash_one((parent, tokens)) as usize & (self.heads.len() - 1)
    }

    fn forget(&mut self, block: u32) {
        let Some(content) = self.content(block) else { return };
        self.saved.forget(block);
        let place = self.place(content.parent, self.tokens(block));
        let mut before = None;
        let mut at = self.heads[place];
        while at != block {
            let Some(other) = self.content(at) else { return };
            (before, at) = (Some(at), other.next);
        }
        match before.and_then(|before| self.contents[before as usize].as_mut()) {
            Some(before) => before.next = content.next,
            None => self.heads[place] = content.next,
        }
        self.contents[block as usize] = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    /// Against a table of whole keys and a list, over many random moves.
    #[test]
    fn it_does_what_a_map_and_a_list_do() {
        const BLOCKS: u32 = 13;
        let mut table = PrefixTable::new(BLOCKS as usize, 2, 0);
        // (parent, tokens, id) by block.
        let mut keys = HashMap::<u32, (PrefixId, [u32; 2], PrefixId)>::new();
        let mut idle = Vec::<u32>::new();
        let mut state = 7u64;
        let mut random = |bound: u64| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((state >> 33) % bound) as u32
        };
        for _ in 0..20_000 {
            let block = random(BLOCKS as u64);
            let tokens = [random(3), random(2)];
            let parents: Vec<PrefixId> = keys.values().map(|key| key.2).chain([PrefixId::root(0)]).collect();
            let parent = parents[random(parents.len() as u64) as usize];
            let known = keys.iter().find(|(_, key)| (key.0, key.1) == (parent, tokens));
            let known = known.map(|(block, key)| (*block, key.2));
            assert_eq!(table.find(parent, &tokens), known);
            match random(4) {
                0 if !idle.contains(&block) => {
                    let id = table.insert(block, parent, &tokens);
                    assert!(known.is_none_or(|known| known.1 == id));
                    if known.is_none() {
                        keys.insert(block, (parent, tokens, id));
                    }
                }
                1 if !idle.contains(&block) => {
                    assert_eq!(table.leave(block), keys.contains_key(&block));
                    idle.extend(keys.contains_key(&block).then_some(block));
                }
                2 => {
                    table.take(block);
                    idle.retain(|other| *other != block);
                }
                _ => {
                    let first = (!idle.is_empty()).then(|| idle.remove(0));
                    assert_eq!(table.evict(), first);
                    first.map(|block| keys.remove(&block));
                }
            }
            assert_eq!(table.num_idle(), idle.len());
        }
    }
}
