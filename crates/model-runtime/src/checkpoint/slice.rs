//! Parts of stored tensors, and sources of which parts can be read alone.

use std::ops::Range;
#[cfg(feature = "cuda")]
use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor, bail};
use candle_nn::var_builder::SimpleBackend;
use moe_kernels::QuantScheme;
#[cfg(feature = "cuda")]
use moe_kernels::cuda::Staging;
use moe_kernels::quant::QuantPart;

/// A box of a stored tensor, with its own name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSlice {
    /// The name that loaders ask for.
    pub name: String,
    /// The tensor in the checkpoint.
    pub stored: String,
    /// One range for each dimension of the stored tensor.
    pub ranges: Vec<Range<usize>>,
    /// Which elements of that box it has, in which order.
    pub order: SliceOrder,
}

/// Which elements of a box a slice has, and in which order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SliceOrder {
    /// Of the last dimension it has the first element and every `step`-th one after it.
    pub step: usize,
    /// Whether the last two dimensions change places.
    pub transposed: bool,
}

impl SliceOrder {
    /// All elements, as they are stored.
    pub const STORED: Self = Self { step: 1, transposed: false };
}

impl TensorSlice {
    /// A part of a tensor under its own name.
    pub fn new(name: impl Into<String>, ranges: &[Range<usize>]) -> Self {
        let name = name.into();
        Self { stored: name.clone(), name, ranges: ranges.to_vec(), order: SliceOrder::STORED }
    }

    /// A part of `stored` under another name.
    pub fn renamed(name: impl Into<String>, stored: impl Into<String>, ranges: &[Range<usize>]) -> Self {
        Self { name: name.into(), stored: stored.into(), ranges: ranges.to_vec(), order: SliceOrder::STORED }
    }

    /// The same box in this order.
    #[must_use]
    pub fn in_order(self, order: SliceOrder) -> Self {
        Self { order, ..self }
    }

    /// How many elements it has.
    pub fn elements(&self) -> usize {
        self.dims().iter().product()
    }

    pub(super) fn dims(&self) -> Vec<usize> {
        let mut dims: Vec<usize> = self.ranges.iter().map(|r| r.len()).collect();
        if let Some(last) = dims.last_mut() {
            *last = last.div_ceil(self.order.step);
        }
        let rank = dims.len();
        if self.order.transposed && rank > 1 {
            dims.swap(rank - 2, rank - 1);
        }
        dims
    }
}

/// Tensors of which parts can be read alone.
pub trait SliceSource: SimpleBackend {
    /// The part `ranges`, one per dimension, of a tensor.
    ///
    /// # Errors
    /// A missing tensor; ranges outside of it; a dtype that does not convert.
    fn slice(&self, name: &str, ranges: &[Range<usize>], dtype: DType, device: &Device) -> Result<Tensor>;

    /// How the matrix of a module is quantised, whose floats have the name `{module}.weight`.
    ///
    /// # Errors
    /// A header that contradicts the file.
    fn scheme(&self, module: &str) -> Result<QuantScheme> {
        let _ = module;
        Ok(QuantScheme::NONE)
    }

    /// The part of a module's quantised matrix, or the whole; `None` if it is stored in floats.
    ///
    /// # Errors
    /// Tensors that are not what the header says; ranges outside of the matrix; a cut through a group.
    fn quantised(&self, module: &str, ranges: Option<&[Range<usize>]>) -> Result<Option<QuantPart<'_>>> {
        let _ = (module, ranges);
        Ok(None)
    }

    /// Buffers through which quantised matrices reach a device; `None`: each pack makes its own.
    ///
    /// # Errors
    /// Memory that the system or the driver refuses.
    #[cfg(feature = "cuda")]
    fn staging(&self, device: &Device) -> Result<Option<Arc<Staging>>> {
        let _ = device;
        Ok(None)
    }

    /// The parts of a pack, one after the other, as a vector.
    fn pack(&self, parts: &[TensorSlice], dtype: DType, device: &Device) -> Result<Tensor> {
        cat(self, parts, dtype, device)
    }
}

/// Makes a pack from the tensors of its parts.
pub(super) fn cat<S: SliceSource + ?Sized>(
    source: &S,
    parts: &[TensorSlice],
    dtype: DType,
    device: &Device,
) -> Result<Tensor> {
    let part = |p: &TensorSlice| source.slice(&p.stored, &p.ranges, dtype, device)?.flatten_all();
    Tensor::cat(&parts.iter().map(part).collect::<Result<Vec<_>>>()?, 0)
}

/// Fails unless there is one range inside of each dimension.
pub(super) fn check_ranges(name: &str, ranges: &[Range<usize>], dims: &[usize]) -> Result<()> {
    let inside = |(range, &dim): (&Range<usize>, &usize)| range.start <= range.end && range.end <= dim;
    if ranges.len() != dims.len() || !ranges.iter().zip(dims).all(inside) {
        bail!("tensor `{name}` of shape {dims:?} has no part {ranges:?}")
    }
    Ok(())
}
