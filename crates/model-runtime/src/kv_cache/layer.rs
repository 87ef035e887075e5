//! The memory in which one layer keeps its states of all sequences.

use candle_core::{DType, Device, Result, bail};
use moe_kernels::{Buffer, StateArrays, View, ViewMut, with_float};

use super::layout::{CacheSizes, LayerState, StateLayout};

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

/// The recurrent states of one layer of linear attention, in f32, and the saved ones.
#[derive(Debug)]
pub struct RecurrentLayer {
    states: States,
    saved: States,
}

/// Some recurrent states of one layer.
#[derive(Debug)]
struct States {
    conv: Buffer,
    delta: Buffer,
}

impl States {
    fn new_on(device: &Device, layout: &StateLayout, count: usize) -> Result<Self> {
        Ok(Self {
            conv: Buffer::zeros_on(device, DType::F32, &layout.conv_dims(count))?,
            delta: Buffer::zeros_on(device, DType::F32, &layout.delta_dims(count))?,
        })
    }

    /// The arrays of `other`, each with the one here that gets some of its states.
    fn copies_of<'a>(&'a mut self, other: &'a Self) -> [StateArrays<'a>; 2] {
        [
            StateArrays { from: other.conv.view(), to: self.conv.view_mut() },
            StateArrays { from: other.delta.view(), to: self.delta.view_mut() },
        ]
    }
}

impl RecurrentLayer {
    /// The last rows before the convolution, [num_states, W - 1, C], writable.
    pub fn conv_mut(&mut self) -> ViewMut<'_> {
        self.states.conv.view_mut()
    }

    /// The states of the value heads, [num_states, Hv, Dk, Dv], writable.
    pub fn delta_mut(&mut self) -> ViewMut<'_> {
        self.states.delta.view_mut()
    }

    /// The saved rows before the convolution, [num_saved, W - 1, C], writable.
    pub fn saved_conv_mut(&mut self) -> ViewMut<'_> {
        self.saved.conv.view_mut()
    }

    /// The saved states of the value heads, [num_saved, Hv, Dk, Dv], writable.
    pub fn saved_delta_mut(&mut self) -> ViewMut<'_> {
        self.saved.delta.view_mut()
    }

    /// The arrays from which states are saved, each with the one where they are saved.
    pub(super) fn saves(&mut self) -> [StateArrays<'_>; 2] {
        let Self { states, saved } = self;
        saved.copies_of(states)
    }

    /// The same the other way round.
    pub(super) fn restores(&mut self) -> [StateArrays<'_>; 2] {
        let Self { states, saved } = self;
        states.copies_of(saved)
    }
}

/// The memory in which one layer keeps its states of all sequences.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "there is one value for each layer of a model")]
#[non_exhaustive]
pub enum LayerCache {
    /// Keys and values in blocks.
    Paged(KvLayer),
    /// States of a fixed size.
    Recurrent(RecurrentLayer),
}

impl LayerCache {
    /// Keys and values in blocks.
    ///
    /// # Errors
    /// A layer that keeps something else.
    pub fn paged(&mut self) -> Result<&mut KvLayer> {
        match self {
            Self::Paged(layer) => Ok(layer),
            Self::Recurrent(_) => {
                bail!("attention: expected a layer with a KV cache, got one with recurrent states")
            }
        }
    }

    /// States of a fixed size.
    ///
    /// # Errors
    /// A layer that keeps something else.
    pub fn recurrent(&mut self) -> Result<&mut RecurrentLayer> {
        match self {
            Self::Recurrent(layer) => Ok(layer),
            Self::Paged(_) => {
                bail!("linear attention: expected a layer with recurrent states, got one with a KV cache")
            }
        }
    }

    pub(super) fn new_on(device: &Device, state: &LayerState, sizes: &CacheSizes) -> Result<Self> {
        match *state {
            LayerState::Paged(kv) => {
                let dims = |dim| [sizes.num_blocks, kv.num_kv_heads, sizes.block_size, dim];
                let rows = |dim| Buffer::zeros_on(device, kv.dtype, &dims(dim));
                let v = kv.value_dim.map(rows).transpose()?;
                Ok(Self::Paged(KvLayer { k: rows(kv.head_dim)?, v }))
            }
            LayerState::Recurrent(state) => {
                let states = States::new_on(device, &state, sizes.num_states)?;
                let saved = States::new_on(device, &state, sizes.num_saved)?;
                Ok(Self::Recurrent(RecurrentLayer { states, saved }))
            }
        }
    }

    pub(super) fn commit(&mut self) -> Result<()> {
        let buffers = match self {
            Self::Paged(KvLayer { k, v }) => std::iter::once(k).chain(v.as_mut()).collect(),
            Self::Recurrent(RecurrentLayer { states, saved }) => {
                vec![&mut states.conv, &mut states.delta, &mut saved.conv, &mut saved.delta]
            }
        };
        for buffer in buffers {
            let mut rows = buffer.view_mut();
            with_float!(rows.dtype(), "KV cache", T => { touch(rows.cpu_mut::<T>()?); Ok(()) })?;
        }
        Ok(())
    }
}

/// Writes to every page of new zeros. The compiler must not find out that the memory already holds zeros.
fn touch<T: Default>(zeros: &mut [T]) {
    const PAGE: usize = 4096;
    for page in std::hint::black_box(zeros).chunks_mut(PAGE / size_of::<T>()) {
        page[0] = T::default();
    }
}
