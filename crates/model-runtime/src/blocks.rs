//! Who owns which KV block: the allocator and the block table of a sequence.

use candle_core::{Result, bail};

use crate::prefix::{PrefixId, PrefixTable};

/// Hands out KV blocks. Owners are counted, so that sequences can share the blocks of a common prefix;
/// a block whose contents were announced ([`BlockAllocator::announce`]) can be found by them, also
/// after its last owner has released it, until it is needed for something else.
///
/// The order is deterministic: ascending at first, then the block that was freed last, so that a
/// light load touches few blocks; then, if none is empty, the announced one that was released first.
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

    /// An allocator of blocks of `block_size` tokens that can be found by their contents.
    pub fn with_prefix_cache(num_blocks: usize, block_size: usize) -> Result<Self> {
        if num_blocks.checked_mul(block_size).is_none_or(|slots| slots >= u32::MAX as usize) {
            bail!("{num_blocks} KV blocks of {block_size} slots do not fit 32-bit slot numbers; use fewer")
        }
        let prefixes = Some(PrefixTable::new(num_blocks, block_size));
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

    /// Notes that an owned, full block holds the keys and values of `tokens` after the prefix
    /// `parent`; the id of the longer prefix. A block is announced once, and not written after.
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
        let missing = tokens.div_ceil(block_size.max(1)).saturating_sub(self.blocks.len());
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
        let mut pool = BlockAllocator::with_prefix_cache(3, 2)?;
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
        // The same contents in another block: the first stays known.
        let other = pool.allocate();
        assert_eq!(other, Some(2));
        assert_eq!(pool.announce(2, root, &[1, 2])?, first);
        assert_eq!(pool.share(root, &[1, 2]), Some((0, first)));
        assert!(!pool.release(0)? && pool.release(1)? && pool.release(0)? && pool.release(2)?);

        // Block 2 has nothing to keep; then the one released first goes, with its contents.
        assert_eq!([pool.allocate(), pool.allocate()], [Some(2), Some(1)]);
        assert!(pool.share(first, &[3, 4]).is_none() && pool.share(root, &[1, 2]).is_some());
        let error = pool.announce(7, root, &[0, 0]).unwrap_err().to_string();
        assert!(error.contains("outside of the 3 blocks"), "{error}");
        assert!(pool.announce(2, root, &[0]).unwrap_err().to_string().contains("cannot hold 1"));
        let mut plain = BlockAllocator::new(1)?;
        assert_eq!((plain.allocate(), plain.share(root, &[1, 2])), (Some(0), None));
        assert!(plain.announce(0, root, &[1, 2]).unwrap_err().to_string().contains("no prefix cache"));
        assert!(BlockAllocator::with_prefix_cache(1 << 20, 1 << 12).is_err());
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
