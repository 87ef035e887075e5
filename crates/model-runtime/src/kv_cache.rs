//! What layers keep of sequences: keys and values in blocks of a fixed number of slots, and states of a fixed size.
//!
//! Slot `s` of the cache is offset `s % block_size` of block `s / block_size`. A sequence owns
//! the blocks of its block table; which ones never affects its results.
//!
//! A sequence also has a recurrent state, if some layers keep one. The step names the state. Nothing clears a freed
//! state: a sequence that begins does not read what is there. States can be saved and restored, so that a sequence may
//! continue from the end of a prefix that another one has computed.

mod layer;
mod layout;

use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::{Device, Result, bail};
use rayon::prelude::*;

use moe_kernels::{Exec, copy_states_into};

pub use self::layer::{KvLayer, LayerCache, RecurrentLayer};
pub use self::layout::{CacheSizes, KvLayout, LayerState, LayerStates, StateCopy, StateLayout};

/// The states of all layers.
#[derive(Debug)]
pub struct KvCache {
    id: u64,
    sizes: CacheSizes,
    layers: Vec<LayerCache>,
}

impl KvCache {
    /// A cache in host memory of `num_blocks` blocks of `block_size` slots. Memory is taken from the
    /// system only as blocks are first written, or by [`Self::commit`].
    pub fn new(states: &LayerStates, num_blocks: usize, block_size: usize) -> Result<Self> {
        Self::new_on(&Device::Cpu, states, num_blocks, block_size)
    }

    /// A cache on a device with as many states as blocks, so that each sequence may have the state with the number of
    /// its first block. No states can be saved.
    pub fn new_on(
        device: &Device,
        states: &LayerStates,
        num_blocks: usize,
        block_size: usize,
    ) -> Result<Self> {
        let sizes = CacheSizes { num_blocks, block_size, num_states: num_blocks, num_saved: 0 };
        Self::with_sizes(device, states, sizes)
    }

    /// A cache on a device.
    ///
    /// # Errors
    /// Blocks of no slots, or none; sizes beyond what numbers and memory hold.
    pub fn with_sizes(device: &Device, states: &LayerStates, sizes: CacheSizes) -> Result<Self> {
        let CacheSizes { num_blocks, block_size, .. } = sizes;
        if num_blocks == 0 || block_size == 0 {
            bail!("the KV cache needs at least one block of one slot, got {num_blocks} of {block_size}")
        }
        // Slot u32::MAX means "write nothing".
        if num_blocks.checked_mul(block_size).is_none_or(|slots| slots >= u32::MAX as usize) {
            bail!("{num_blocks} KV blocks of {block_size} slots do not fit 32-bit slot numbers; use fewer")
        }
        states.bytes(&sizes)?;
        let layers = states.as_slice().iter().map(|state| LayerCache::new_on(device, state, &sizes));
        let layers = layers.collect::<Result<_>>()?;
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Ok(Self { id, sizes, layers })
    }

    /// Takes the memory from the system now, for several layers at a time on the threads of `ex`, so that a long run
    /// cannot grow or fail for lack of memory later. On a device the memory was taken before.
    pub fn commit(&mut self, ex: &Exec) -> Result<()> {
        if ex.is_cuda() {
            return Ok(());
        }
        let layers = &mut self.layers;
        ex.install(|| layers.par_iter_mut().try_for_each(LayerCache::commit))
    }

    /// Tells the caches of this process apart, even a later cache of the same size.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The sizes for which the cache has room.
    pub fn sizes(&self) -> CacheSizes {
        self.sizes
    }

    /// Number of blocks.
    pub fn num_blocks(&self) -> usize {
        self.sizes.num_blocks
    }

    /// Slots per block.
    pub fn block_size(&self) -> usize {
        self.sizes.block_size
    }

    /// Saves recurrent states of all layers, after the step that has computed them; on a device in stream order.
    ///
    /// # Errors
    /// A state that the cache has no room for; a cache on another device than `ex`.
    pub fn save(&mut self, copies: &[StateCopy], ex: &Exec) -> Result<()> {
        let rows: Vec<[u32; 2]> = copies.iter().map(|copy| [copy.state, copy.saved]).collect();
        copy_states_into(self.recurrent().flat_map(RecurrentLayer::saves).collect(), &rows, ex)
    }

    /// Copies saved recurrent states to where the next step reads them.
    ///
    /// # Errors
    /// The errors of [`Self::save`].
    pub fn restore(&mut self, copies: &[StateCopy], ex: &Exec) -> Result<()> {
        let rows: Vec<[u32; 2]> = copies.iter().map(|copy| [copy.saved, copy.state]).collect();
        copy_states_into(self.recurrent().flat_map(RecurrentLayer::restores).collect(), &rows, ex)
    }

    fn recurrent(&mut self) -> impl Iterator<Item = &mut RecurrentLayer> {
        self.layers.iter_mut().filter_map(|layer| match layer {
            LayerCache::Recurrent(states) => Some(states),
            LayerCache::Paged(_) => None,
        })
    }

    /// What one layer keeps.
    pub fn layer_mut(&mut self, layer: usize) -> Result<&mut LayerCache> {
        let layers = self.layers.len();
        match self.layers.get_mut(layer) {
            Some(layer) => Ok(layer),
            None => bail!("layer {layer} is outside of a KV cache of {layers} layers"),
        }
    }
}
