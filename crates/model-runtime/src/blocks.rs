//! Who owns which KV block: the allocator and the block table of a sequence.

use candle_core::{Result, bail};

use crate::prefix::{PrefixId, PrefixTable};

/// A block that holds certain tokens after a certain prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KnownBlock {
    /// The prefix that ends with the block.
    pub id: PrefixId,
    /// The place of the recurrent state after that prefix, if it is saved.
    pub saved: Option<u32>,
}

/// Hands out KV blocks. It counts the owners of each block, so that sequences can share the blocks of a common prefix.
/// A block whose contents were announced ([`BlockAllocator::announce`]) can be found by its contents. This is also true
/// after its last owner has released it, until the block is needed for something else.
///
/// The order is deterministic: ascending at first, then the block that was freed last, so that a light load touches few
/// blocks. If no block is empty, the announced block that was released first is taken.
#[derive(Clone, Debug)]
pub struct BlockAllocator {
    free: Vec<u32>,
    ref_counts: Vec<u32>,
    prefixes: Option<PrefixTable>,
}

impl BlockAllocator {
    /// An allocator of blocks `0..num_blocks` that are not shared.
    pub fn new(num_blocks: usize) -> Result<Self> {
        match u32::try_from(num_blocks) {
            Ok(n) if n < u32::MAX => {
                Ok(Self { free: (0..n).rev().collect(), ref_counts: vec![0; num_blocks], prefixes: None })
            }
            _ => bail!("{num_blocks} KV blocks do not fit 32-bit block numbers"),
        }
    }

    /// An allocator of blocks of `block_size` tokens that can be found by their contents, with places for `num_saved`
    /// recurrent states at the ends of blocks.
    pub fn with_prefix_cache(num_blocks: usize, block_size: usize, num_saved: usize) -> Result<Self> {
        if num_blocks.checked_mul(block_size).is_none_or(|slots| slots >= u32::MAX as usize) {
            bail!("{num_blocks} KV blocks of {block_size} slots do not fit 32-bit slot numbers; use fewer")
        }
        let prefixes = Some(PrefixTable::new(num_blocks, block_size, num_saved));
        Ok(Self { prefixes, ..Self::new(num_blocks)? })
    }

    /// Number of blocks, free or not.
    pub fn num_blocks(&self) -> usize {
        self.ref_counts.len()
    }

    /// Number of blocks without an owner.
    pub fn num_free(&self) -> usize {
        self.free.len() + self.prefixes.as_ref().map_or(0, PrefixTable::num_idle)
    }

    /// Takes a block with one owner; `None` if none is free.
    pub fn allocate(&mut self) -> Option<u32> {
        let block = self.free.pop().or_else(|| self.prefixes.as_mut()?.evict())?;
        if let Some(count) = self.ref_counts.get_mut(block as usize) {
            *count = 1;
        }
        Some(block)
    }

    /// Removes an owner; `true` if it was the last one and the block is free now.
    pub fn release(&mut self, block: u32) -> Result<bool> {
        let count = self.owned(block)?;
        *count -= 1;
        let freed = *count == 0;
        if freed && !self.prefixes.as_mut().is_some_and(|prefixes| prefixes.leave(block)) {
            self.free.push(block);
        }
        Ok(freed)
    }

    /// Notes that an owned, full block holds the keys and values of `tokens` after the prefix `parent`. Returns the id
    /// of the longer prefix. A block is announced once, and is not written after that.
    pub fn announce(&mut self, block: u32, parent: PrefixId, tokens: &[u32]) -> Result<PrefixId> {
        self.owned(block)?;
        match &mut self.prefixes {
            Some(prefixes) if prefixes.block_size() == tokens.len() => {
                Ok(prefixes.insert(block, parent, tokens))
            }
            Some(prefixes) => {
                bail!("a block of {} tokens cannot hold {}", prefixes.block_size(), tokens.len())
            }
            None => bail!("block {block} cannot be announced: the allocator has no prefix cache"),
        }
    }

    /// The block that holds `tokens` after the prefix `parent`, if there is one.
    pub fn known(&self, parent: PrefixId, tokens: &[u32]) -> Option<KnownBlock> {
        let prefixes = self.prefixes.as_ref()?;
        let (block, id) = prefixes.find(parent, tokens)?;
        Some(KnownBlock { id, saved: prefixes.saved().at(block) })
    }

    /// Takes a place in which a step saves a recurrent state, until [`Self::keep_state`]; `None` if there is none. The
    /// state that was saved there before can no longer be found.
    pub fn place_for_state(&mut self) -> Option<u32> {
        self.prefixes.as_mut()?.saved_mut().take()
    }

    /// Takes a place in which steps save the recurrent state of a sequence as it decodes, each time over the state
    /// before, until [`Self::end_place`]; `None` if other sequences have as many as there may be.
    pub fn place_while_running(&mut self) -> Option<u32> {
        self.prefixes.as_mut()?.saved_mut().keep()
    }

    /// A step saves a newer state in a place that a running sequence has: the one before is not found any more.
    pub fn replace_state(&mut self, place: u32) {
        if let Some(prefixes) = &mut self.prefixes {
            prefixes.saved_mut().detach(place);
        }
    }

    /// The sequence that has a place does not run any more. Its state stays there until another needs the place.
    pub fn end_place(&mut self, place: u32) {
        if let Some(prefixes) = &mut self.prefixes {
            prefixes.saved_mut().end(place);
        }
    }

    /// Notes that the state that was saved in a place belongs to the prefix that ends with `tokens` after `parent`.
    pub fn keep_state(&mut self, parent: PrefixId, tokens: &[u32], place: u32) {
        let Some(prefixes) = &mut self.prefixes else { return };
        match prefixes.find(parent, tokens) {
            Some((block, _)) => prefixes.saved_mut().attach(block, place),
            None => prefixes.saved_mut().put_back(place),
        }
    }

    /// Notes that a sequence begins with a saved state, which is then the state that was used last, unless a running
    /// sequence has it.
    pub fn use_state(&mut self, place: u32) {
        if let Some(prefixes) = &mut self.prefixes {
            prefixes.saved_mut().touch(place);
        }
    }

    /// The number of saved states that can be found, and the number of states that were replaced by others so far.
    pub fn saved_states(&self) -> (usize, u64) {
        self.prefixes.as_ref().map_or((0, 0), |prefixes| prefixes.saved().counts())
    }

    /// Adds an owner to the block that holds `tokens` after the prefix `parent`, if there is one.
    pub fn share(&mut self, parent: PrefixId, tokens: &[u32]) -> Option<(u32, PrefixId)> {
        let prefixes = self.prefixes.as_mut()?;
        let (block, id) = prefixes.find(parent, tokens)?;
        let count = self.ref_counts.get_mut(block as usize)?;
        if *count == 0 {
            prefixes.take(block);
        }
        *count += 1;
        Some((block, id))
    }

    fn owned(&mut self, block: u32) -> Result<&mut u32> {
        let blocks = self.ref_counts.len();
        match self.ref_counts.get_mut(block as usize) {
            Some(count) if *count > 0 => Ok(count),
            Some(_) => bail!("KV block {block} is free already"),
            None => bail!("KV block {block} is outside of the {blocks} blocks"),
        }
    }
}

/// The block table of one sequence. Blocks go back through [`SequenceBlocks::release`], not on
/// drop: the table does not hold the allocator.
#[derive(Debug, Default)]
pub struct SequenceBlocks {
    blocks: Vec<u32>,
}

impl SequenceBlocks {
    /// An empty table.
    pub fn new() -> Self {
        Self::default()
    }

    /// The blocks, in the order of positions.
    pub fn as_slice(&self) -> &[u32] {
        &self.blocks
    }

    /// Appends a block that the caller has allocated, or shared as part of a common prefix.
    pub fn push(&mut self, block: u32) {
        self.blocks.push(block);
    }

    /// Makes room for `tokens` tokens. `false` if too few blocks are free; then nothing changes.
    pub fn reserve(&mut self, tokens: usize, block_size: usize, allocator: &mut BlockAllocator) -> bool {
        let wanted = tokens.div_ceil(block_size.max(1));
        let missing = wanted.saturating_sub(self.blocks.len());
        if missing > allocator.num_free() {
            return false;
        }
        self.blocks.extend((0..missing).map_while(|_| allocator.allocate()));
        true
    }

    /// Gives every block back. The last block goes first, so that the next sequence gets them in
    /// the order of positions.
    pub fn release(&mut self, allocator: &mut BlockAllocator) -> Result<()> {
        while let Some(block) = self.blocks.pop() {
            allocator.release(block)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_come_in_a_fixed_order() -> Result<()> {
        let mut blocks = BlockAllocator::new(3)?;
        assert_eq!([blocks.allocate(), blocks.allocate()], [Some(0), Some(1)]);
        assert!(blocks.release(0)?);
        assert_eq!([blocks.allocate(), blocks.allocate(), blocks.allocate()], [Some(0), Some(2), None]);
        assert_eq!(blocks.num_free(), 0);
        Ok(())
    }

    #[test]
    fn contents_are_found_until_their_block_is_needed() -> Result<()> {
        let mut pool = BlockAllocator::with_prefix_cache(3, 2, 0)?;
        let root = PrefixId::root(0);
        let mut table = SequenceBlocks::new();
        assert!(table.reserve(6, 2, &mut pool));
        let first = pool.announce(0, root, &[1, 2])?;
        let second = pool.announce(1, first, &[3, 4])?;
        assert!(second != first && pool.share(second, &[5, 6]).is_none());
        table.release(&mut pool)?;
        assert_eq!(pool.num_free(), 3);

        assert_eq!(pool.share(root, &[1, 2]), Some((0, first)));
        assert_eq!(pool.share(first, &[3, 4]), Some((1, second)));
        assert_eq!(pool.share(PrefixId::root(1), &[1, 2]), None);
        assert_eq!(pool.num_free(), 1);
        // The same contents are announced in another block: the first block stays the known one.
        let other = pool.allocate();
        assert_eq!(other, Some(2));
        assert_eq!(pool.announce(2, root, &[1, 2])?, first);
        assert_eq!(pool.share(root, &[1, 2]), Some((0, first)));
        assert!(!pool.release(0)? && pool.release(1)? && pool.release(0)? && pool.release(2)?);

        // Block 2 has nothing to keep. The next block is the one that was released first, with its contents.
        assert_eq!([pool.allocate(), pool.allocate()], [Some(2), Some(1)]);
        assert!(pool.share(first, &[3, 4]).is_none() && pool.share(root, &[1, 2]).is_some());
        let error = pool.announce(7, root, &[0, 0]).unwrap_err().to_string();
        assert!(error.contains("outside of the 3 blocks"), "{error}");
        assert!(pool.announce(2, root, &[0]).unwrap_err().to_string().contains("cannot hold 1"));
        let mut plain = BlockAllocator::new(1)?;
        assert_eq!((plain.allocate(), plain.share(root, &[1, 2])), (Some(0), None));
        assert!(plain.announce(0, root, &[1, 2]).unwrap_err().to_string().contains("no prefix cache"));
        assert!(BlockAllocator::with_prefix_cache(1 << 20, 1 << 12, 0).is_err());
        Ok(())
    }

    #[test]
    fn saved_states_go_with_their_blocks_and_the_longest_unused_first() -> Result<()> {
        let mut pool = BlockAllocator::with_prefix_cache(4, 1, 2)?;
        let root = PrefixId::root(0);
        let mut tables = [SequenceBlocks::new(), SequenceBlocks::new()];
        assert!(tables[0].reserve(2, 1, &mut pool) && tables[1].reserve(2, 1, &mut pool));
        let first = pool.announce(0, root, &[7])?;
        pool.announce(1, first, &[8])?;
        let saved =
            |pool: &BlockAllocator, parent, token| pool.known(parent, &[token]).and_then(|known| known.saved);
        let places = [pool.place_for_state(), pool.place_for_state()];
        assert_eq!((places, pool.place_for_state()), ([Some(0), Some(1)], None));
        pool.keep_state(root, &[7], 0);
        pool.keep_state(first, &[8], 1);
        assert_eq!((saved(&pool, root, 7), saved(&pool, first, 8)), (Some(0), Some(1)));
        // The state after the first block was used last, so the other one gives way.
        pool.use_state(0);
        assert_eq!((pool.place_for_state(), saved(&pool, first, 8)), (Some(1), None));
        assert_eq!(pool.saved_states(), (1, 1));
        // A block that has a state keeps it. A prefix that is not known gets none.
        pool.keep_state(root, &[7], 1);
        assert_eq!((saved(&pool, root, 7), pool.place_for_state()), (Some(0), Some(1)));
        pool.keep_state(root, &[9], 1);
        assert_eq!(pool.place_for_state(), Some(1));
        // A block whose contents are forgotten loses its state.
        tables[0].release(&mut pool)?;
        assert!(tables[1].reserve(4, 1, &mut pool));
        assert_eq!((pool.known(root, &[7]), pool.saved_states()), (None, (0, 1)));
        assert_eq!(pool.place_for_state(), Some(0));
        Ok(())
    }

    #[test]
    fn a_sequence_that_decodes_moves_its_state_and_answers_give_way_first() -> Result<()> {
        let mut pool = BlockAllocator::with_prefix_cache(8, 1, 4)?;
        let mut table = SequenceBlocks::new();
        assert!(table.reserve(4, 1, &mut pool));
        let mut chain = vec![PrefixId::root(0)];
        for token in 0..4 {
            chain.push(pool.announce(token, chain[token as usize], &[token])?);
        }
        let saved = |pool: &BlockAllocator| -> Vec<Option<u32>> {
            (0..4).map(|i| pool.known(chain[i as usize], &[i]).and_then(|known| known.saved)).collect()
        };
        let keep = |pool: &mut BlockAllocator, token: u32, place| {
            pool.keep_state(chain[token as usize], &[token], place);
        };
        // One of four places is for answers, and its state moves on.
        assert_eq!((pool.place_while_running(), pool.place_while_running()), (Some(0), None));
        keep(&mut pool, 0, 0);
        assert_eq!(saved(&pool), [Some(0), None, None, None]);
        pool.replace_state(0);
        assert_eq!((saved(&pool), pool.saved_states()), (vec![None; 4], (0, 0)));
        keep(&mut pool, 1, 0);
        // Prompts have the other three, and no more while the sequence runs.
        let places: Vec<_> = (0..4).map(|_| pool.place_for_state()).collect();
        assert_eq!(places, [Some(1), Some(2), Some(3), None]);
        keep(&mut pool, 2, 1);
        keep(&mut pool, 3, 2);
        keep(&mut pool, 0, 3);
        assert_eq!(saved(&pool), [Some(3), Some(0), Some(1), Some(2)]);
        // Its state stays when it ends. The next answer displaces it, not what prompts left.
        pool.end_place(0);
        assert_eq!((saved(&pool)[1], pool.saved_states()), (Some(0), (4, 0)));
        assert_eq!(pool.place_while_running(), Some(0));
        assert_eq!((saved(&pool), pool.saved_states().1), (vec![Some(3), None, Some(1), Some(2)], 1));
        // A place without a state is free again. A state that was gone on from counts as a prompt's.
        pool.end_place(0);
        assert_eq!(pool.place_while_running(), Some(0));
        keep(&mut pool, 1, 0);
        pool.end_place(0);
        pool.use_state(0);
        assert_eq!(
            (pool.place_while_running(), saved(&pool)),
            (Some(1), vec![Some(3), Some(0), None, Some(2)])
        );
        // A block whose contents are forgotten loses its state, and the sequence keeps the place.
        keep(&mut pool, 2, 1);
        table.release(&mut pool)?;
        assert!(table.reserve(8, 1, &mut pool));
        assert_eq!((saved(&pool), pool.saved_states().0), (vec![None; 4], 0));
        let places: Vec<_> = (0..4).map(|_| pool.place_for_state()).collect();
        assert_eq!(places.iter().flatten().count(), 3, "{places:?}");
        pool.end_place(1);
        assert_eq!(pool.place_for_state(), Some(1));
        // The only place is never an answer's.
        let mut one = BlockAllocator::with_prefix_cache(4, 1, 1)?;
        assert_eq!((one.place_while_running(), one.place_for_state()), (None, Some(0)));
        Ok(())
    }

    #[test]
    fn misuse_is_an_error() -> Result<()> {
        let mut blocks = BlockAllocator::new(2)?;
        assert!(blocks.release(1).unwrap_err().to_string().contains("block 1 is free already"));
        assert!(blocks.release(2).unwrap_err().to_string().contains("outside of the 2 blocks"));
        assert_eq!(blocks.num_free(), 2);
        Ok(())
    }

    #[test]
    fn a_table_grows_by_need_and_all_or_nothing() -> Result<()> {
        let mut pool = BlockAllocator::new(4)?;
        let mut a = SequenceBlocks::new();
        let mut b = SequenceBlocks::new();
        assert!(a.reserve(5, 4, &mut pool));
        assert_eq!(a.as_slice(), [0, 1]);
        assert!(a.reserve(8, 4, &mut pool));
        assert_eq!(a.as_slice(), [0, 1]);
        assert!(!b.reserve(9, 4, &mut pool));
        assert!(b.as_slice().is_empty() && pool.num_free() == 2);
        a.release(&mut pool)?;
        assert!(b.reserve(16, 4, &mut pool));
        assert_eq!(b.as_slice(), [0, 1, 2, 3]);
        Ok(())
    }
}
