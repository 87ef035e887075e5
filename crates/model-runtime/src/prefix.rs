//! Prefix caching: which KV block holds which tokens after which prefix.
//!
//! A full block is known by its tokens and by the [`PrefixId`] of the tokens before it, so a chain of
//! ids stands for a whole prefix. Keys are compared, not hashed to a digest: two prefixes never
//! meet by accident. Blocks keep their contents after their last owner has gone, and are taken for
//! new contents in the order in which they were left (least recently used first).

use std::collections::{BTreeMap, HashMap};

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

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    parent: PrefixId,
    tokens: Box<[u32]>,
}

#[derive(Clone, Debug)]
struct Content {
    id: PrefixId,
    key: Key,
    /// When its last owner left; `None` while it has one.
    left: Option<u64>,
}

/// The contents of blocks.
#[derive(Clone, Debug)]
pub(crate) struct PrefixTable {
    blocks: HashMap<Key, u32>,
    contents: HashMap<u32, Content>,
    /// Blocks without an owner, the one left first at the front.
    idle: BTreeMap<u64, u32>,
    /// Of ids and of times; above every root.
    next: u64,
}

impl PrefixTable {
    pub fn new() -> Self {
        Self {
            blocks: HashMap::new(),
            contents: HashMap::new(),
            idle: BTreeMap::new(),
            next: u32::MAX as u64 + 1,
        }
    }

    /// Number of blocks that have contents and no owner.
    pub fn num_idle(&self) -> usize {
        self.idle.len()
    }

    /// The block that holds `tokens` after `parent`.
    pub fn find(&self, parent: PrefixId, tokens: &[u32]) -> Option<(u32, PrefixId)> {
        let block = *self.blocks.get(&Key { parent, tokens: tokens.into() })?;
        Some((block, self.contents.get(&block)?.id))
    }

    /// Notes that an owned block holds `tokens` after `parent`. If another block holds them
    /// already, that one stays the known one.
    pub fn insert(&mut self, block: u32, parent: PrefixId, tokens: &[u32]) -> PrefixId {
        if let Some((_, id)) = self.find(parent, tokens) {
            return id;
        }
        let id = PrefixId(self.tick());
        let key = Key { parent, tokens: tokens.into() };
        self.blocks.insert(key.clone(), block);
        self.contents.insert(block, Content { id, key, left: None });
        id
    }

    /// The block's last owner leaves; `false` if it holds nothing worth keeping.
    pub fn leave(&mut self, block: u32) -> bool {
        let now = self.tick();
        let Some(content) = self.contents.get_mut(&block) else { return false };
        content.left = Some(now);
        self.idle.insert(now, block);
        true
    }

    /// A block without owners gets one again.
    pub fn take(&mut self, block: u32) {
        if let Some(left) = self.contents.get_mut(&block).and_then(|c| c.left.take()) {
            self.idle.remove(&left);
        }
    }

    /// Forgets the contents of the block that was left first and hands it out.
    pub fn evict(&mut self) -> Option<u32> {
        let (_, block) = self.idle.pop_first()?;
        if let Some(content) = self.contents.remove(&block) {
            self.blocks.remove(&content.key);
        }
        Some(block)
    }

    fn tick(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
}
