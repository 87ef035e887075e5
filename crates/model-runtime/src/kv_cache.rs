//! The paged KV cache: per layer, keys and values in blocks of a fixed number of slots.
//!
//! Slot `s` of the cache is offset `s % block_size` of block `s / block_size`. A sequence owns
//! the blocks of its block table; which ones never affects its results.

use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::{DType, Device, Result, bail};
use rayon::prelude::*;

use moe_kernels::{Buffer, Exec, View, ViewMut, with_float};

/// What a layer caches of each token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayout {
    /// Key-value heads on this rank, Hkv.
    pub num_kv_heads: usize,
    /// Dimensions of a key, D.
    pub head_dim: usize,
    /// Dimensions of a value; `None` if a value is the start of its key and has no row of its own
    /// (the latent rows of MLA).
    pub value_dim: Option<usize>,
    /// Dtype of keys and values: the model's.
    pub dtype: DType,
}

impl KvLayout {
    /// Bytes that one token takes in a layer; an error on overflow.
    pub fn bytes_per_token(&self) -> Result<usize> {
        let row = self.head_dim.checked_add(self.value_dim.unwrap_or(0));
        let factors = [self.num_kv_heads, self.dtype.size_in_bytes()];
        match row.and_then(|row| factors.iter().try_fold(row, |n, &f| n.checked_mul(f))) {
            Some(bytes) => Ok(bytes),
            None => bail!("the KV cache of {self:?} overflows"),
        }
    }

    /// The states of `count` layers that all cache the same.
    pub fn layers(self, count: usize) -> LayerStates {
        LayerStates(vec![LayerState::Paged(self); count])
    }
}

/// What a layer keeps of a sequence between two steps. A state of another kind, such as one of a fixed size for each
/// sequence, is another variant: [`LayerStates`] and [`KvCache`] are the only code that looks at the kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerState {
    /// Keys and values of each token, in the blocks that the sequence owns.
    Paged(KvLayout),
}

/// What the layers of a model keep, first layer first. Scheduler, prefix cache and memory plans ask it what they may do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LayerStates(Vec<LayerState>);

impl FromIterator<LayerState> for LayerStates {
    fn from_iter<I: IntoIterator<Item = LayerState>>(layers: I) -> Self {
        Self(layers.into_iter().collect())
    }
}

impl LayerStates {
    /// The state of each layer.
    pub fn as_slice(&self) -> &[LayerState] {
        &self.0
    }

    /// Bytes that one token takes over all layers; an error on overflow.
    pub fn bytes_per_token(&self) -> Result<usize> {
        self.0.iter().try_fold(0usize, |sum, LayerState::Paged(kv)| {
            match sum.checked_add(kv.bytes_per_token()?) {
                Some(sum) => Ok(sum),
                None => bail!("the KV cache of {} layers like {kv:?} overflows", self.0.len()),
            }
        })
    }

    /// How many blocks of `block_size` slots fit into `bytes`.
    pub fn blocks_in(&self, bytes: usize, block_size: usize) -> Result<usize> {
        match self.bytes_per_token()?.checked_mul(block_size) {
            Some(0) | None => bail!("a KV block of {block_size} slots of {:?} has no valid size", self.0),
            Some(block) => Ok(bytes / block),
        }
    }

    /// Whether a sequence can start from the blocks of another one's prefix: they hold all that is kept of it.
    pub fn share_prefixes(&self) -> bool {
        self.0.iter().all(|LayerState::Paged(_)| true)
    }

    /// Whether a layer caches latent rows, of which steps make keys and values.
    pub fn have_latent_rows(&self) -> bool {
        self.0.iter().any(|LayerState::Paged(kv)| kv.value_dim.is_none())
    }
}

/// Keys and values of one layer, [num_blocks, Hkv, block_size, D] each (values with their own
/// number of dimensions), in the model dtype.
#[derive(Debug)]
pub struct KvLayer {
    k: Buffer,
    v: Option<Buffer>,
}

impl KvLayer {
    /// The keys.
    pub fn k(&self) -> View<'_> {
        self.k.view()
    }

    /// The rows that values are in: the keys, if values have none of their own.
    pub fn v(&self) -> View<'_> {
        self.v.as_ref().unwrap_or(&self.k).view()
    }

    /// Keys, and values if they have rows of their own, writable.
    pub fn kv_mut(&mut self) -> (ViewMut<'_>, Option<ViewMut<'_>>) {
        (self.k.view_mut(), self.v.as_mut().map(Buffer::view_mut))
    }
}

/// The states of all layers.
#[derive(Debug)]
pub struct KvCache {
    id: u64,
    num_blocks: usize,
    block_size: usize,
    layers: Vec<KvLayer>,
}

impl KvCache {
    /// A cache in host memory of `num_blocks` blocks of `block_size` slots. Memory is taken from the
    /// system only as blocks are first written, or by [`Self::commit`].
    pub fn new(states: &LayerStates, num_blocks: usize, block_size: usize) -> Result<Self> {
        Self::new_on(&Device::Cpu, states, num_blocks, block_size)
    }

    /// A cache on a device.
    pub fn new_on(
        device: &Device,
        states: &LayerStates,
        num_blocks: usize,
        block_size: usize,
    ) -> Result<Self> {
        if num_blocks == 0 || block_size == 0 {
            bail!("the KV cache needs at least one block of one slot, got {num_blocks} of {block_size}")
        }
        // Slot u32::MAX means "write nothing".
        if num_blocks.checked_mul(block_size).is_none_or(|slots| slots >= u32::MAX as usize) {
            bail!("{num_blocks} KV blocks of {block_size} slots do not fit 32-bit slot numbers; use fewer")
        }
        let bytes = states.bytes_per_token()?;
        if bytes.checked_mul(num_blocks * block_size).is_none_or(|bytes| bytes > isize::MAX as usize) {
            bail!("a KV cache of {num_blocks} blocks of {block_size} slots of {states:?} overflows")
        }
        let layer = |LayerState::Paged(kv): &LayerState| -> Result<KvLayer> {
            let rows =
                |dim| Buffer::zeros_on(device, kv.dtype, &[num_blocks, kv.num_kv_heads, block_size, dim]);
            Ok(KvLayer { k: rows(kv.head_dim)?, v: kv.value_dim.map(rows).transpose()? })
        };
        let layers = states.as_slice().iter().map(layer).collect::<Result<_>>()?;
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Ok(Self { id, num_blocks, block_size, layers })
    }

    /// Takes the memory from the system now, layers side by side on the threads of `ex`, so that a
    /// long run cannot grow or fail for lack of it later. On a device it is taken already.
    pub fn commit(&mut self, ex: &Exec) -> Result<()> {
        if ex.is_cuda() {
            return Ok(());
        }
        let layers = &mut self.layers;
        ex.install(|| {
            layers.par_iter_mut().try_for_each(|layer| {
                let (k, v) = layer.kv_mut();
                for mut rows in std::iter::once(k).chain(v) {
                    with_float!(rows.dtype(), "KV cache", T => { touch(rows.cpu_mut::<T>()?); Ok(()) })?;
                }
                Ok(())
            })
        })
    }

    /// Tells the caches of this process apart, even a later cache of the same size.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Number of blocks.
    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// Slots per block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Keys and values of one layer.
    pub fn layer_mut(&mut self, layer: usize) -> Result<&mut KvLayer> {
        let layers = self.layers.len();
        match self.layers.get_mut(layer) {
            Some(layer) => Ok(layer),
            None => bail!("layer {layer} is outside of a KV cache of {layers} layers"),
        }
    }
}

/// Writes to every page of fresh zeros. The compiler must not know that zeros are there already.
fn touch<T: Default>(zeros: &mut [T]) {
    const PAGE: usize = 4096;
    for page in std::hint::black_box(zeros).chunks_mut(PAGE / size_of::<T>()) {
        page[0] = T::default();
    }
}
