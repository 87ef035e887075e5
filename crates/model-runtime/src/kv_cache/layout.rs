//! The kind and size of a layer's state, and the sizes of a cache: plain data.

use candle_core::{DType, Result, bail};
use moe_kernels::DeltaHeads;
use serde::{Deserialize, Serialize};

/// The sizes for which a cache has room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheSizes {
    /// Blocks of keys and values.
    pub num_blocks: usize,
    /// Slots per block.
    pub block_size: usize,
    /// Sequences for which there are recurrent states, if some layers keep them.
    pub num_states: usize,
    /// Recurrent states that can be saved, if some layers keep them.
    pub num_saved: usize,
}

/// A recurrent state of all layers, and the place where it is saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StateCopy {
    /// The number of the state.
    pub state: u32,
    /// The place where it is saved.
    pub saved: u32,
}

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

/// What a layer of linear attention keeps of each sequence, in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateLayout {
    /// Heads on this rank.
    pub heads: DeltaHeads,
    /// Rows that the convolution sees, W: it keeps W - 1 of them.
    pub conv_width: usize,
}

impl StateLayout {
    /// Dims of the kept rows of the convolution of `states` sequences, [N, W - 1, C].
    pub fn conv_dims(&self, states: usize) -> [usize; 3] {
        [states, self.conv_width.saturating_sub(1), self.heads.channels()]
    }

    /// Dims of the recurrent states of `states` sequences, [N, Hv, Dk, Dv].
    pub fn delta_dims(&self, states: usize) -> [usize; 4] {
        [states, self.heads.value_heads, self.heads.key_dim, self.heads.value_dim]
    }

    /// Bytes that one sequence takes in a layer; an error on overflow.
    pub fn bytes(&self) -> Result<usize> {
        let product = |dims: &[usize]| dims.iter().try_fold(size_of::<f32>(), |n, &dim| n.checked_mul(dim));
        let conv = product(&self.conv_dims(1));
        match conv.zip(product(&self.delta_dims(1))).and_then(|(conv, delta)| conv.checked_add(delta)) {
            Some(bytes) => Ok(bytes),
            None => bail!("the state of {self:?} overflows"),
        }
    }
}

/// What a layer keeps of a sequence between two steps. [`LayerStates`] and [`KvCache`](crate::KvCache) are the only
/// code that looks at the kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LayerState {
    /// Keys and values of each token, in the blocks that the sequence owns.
    Paged(KvLayout),
    /// A state whose size does not depend on the number of tokens.
    Recurrent(StateLayout),
}

/// The states of a model's layers, first layer first. Scheduler, prefix cache and memory plans ask it what is possible.
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

    fn paged(&self) -> impl Iterator<Item = &KvLayout> {
        self.0.iter().filter_map(|state| match state {
            LayerState::Paged(kv) => Some(kv),
            LayerState::Recurrent(_) => None,
        })
    }

    fn recurrent(&self) -> impl Iterator<Item = &StateLayout> {
        self.0.iter().filter_map(|state| match state {
            LayerState::Paged(_) => None,
            LayerState::Recurrent(state) => Some(state),
        })
    }

    fn sum(&self, bytes: impl Iterator<Item = Result<usize>>) -> Result<usize> {
        bytes.into_iter().try_fold(0usize, |sum, bytes| match sum.checked_add(bytes?) {
            Some(sum) => Ok(sum),
            None => bail!("the KV cache of {} layers like {:?} overflows", self.0.len(), self.0.first()),
        })
    }

    /// Bytes that one token takes over all layers; an error on overflow.
    pub fn bytes_per_token(&self) -> Result<usize> {
        self.sum(self.paged().map(KvLayout::bytes_per_token))
    }

    /// Bytes that one sequence takes over all layers however long it is: its recurrent states; an error on overflow.
    pub fn bytes_per_sequence(&self) -> Result<usize> {
        self.sum(self.recurrent().map(StateLayout::bytes))
    }

    /// Whether a layer keeps a state of a fixed size for each sequence.
    pub fn are_recurrent(&self) -> bool {
        self.recurrent().next().is_some()
    }

    /// How many blocks of `block_size` slots fit into `bytes`.
    pub fn blocks_in(&self, bytes: usize, block_size: usize) -> Result<usize> {
        match self.bytes_per_token()?.checked_mul(block_size) {
            Some(0) | None => bail!("a KV block of {block_size} slots of {:?} has no valid size", self.0),
            Some(block) => Ok(bytes / block),
        }
    }

    /// Bytes of a cache of these sizes; an error on overflow.
    pub fn bytes(&self, sizes: &CacheSizes) -> Result<usize> {
        let slots = sizes.num_blocks.checked_mul(sizes.block_size);
        let states = sizes.num_states.checked_add(sizes.num_saved);
        let tokens = slots.zip(self.bytes_per_token().ok()).and_then(|(n, bytes)| n.checked_mul(bytes));
        let kept = states.zip(self.bytes_per_sequence().ok()).and_then(|(n, bytes)| n.checked_mul(bytes));
        let bytes = tokens.zip(kept).and_then(|(tokens, kept)| tokens.checked_add(kept));
        match bytes.filter(|&bytes| bytes <= isize::MAX as usize) {
            Some(bytes) => Ok(bytes),
            None => bail!("a KV cache of {sizes:?} of {:?} overflows", self.0),
        }
    }

    /// Whether a layer caches latent rows, from which steps make keys and values.
    pub fn have_latent_rows(&self) -> bool {
        self.paged().any(|kv| kv.value_dim.is_none())
    }
}
