//! A rank's view of a checkpoint: named parts of its tensors, read alone.
//!
//! A model crate says which part of which tensor a rank holds, as a list of [`TensorSlice`]s. Its
//! loaders then ask for the same names with smaller shapes, and only those bytes are read. Packed
//! experts can be shown under the names of single ones, so that one loader serves both layouts.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use candle_core::{DType, Device, Result, Shape, Tensor, bail};
use candle_nn::VarBuilder;
use candle_nn::var_builder::SimpleBackend;

use super::{DummyWeights, TensorFiles};

/// A box of a stored tensor under a name of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSlice {
    /// The name that loaders ask for.
    pub name: String,
    /// The tensor in the checkpoint.
    pub stored: String,
    /// One range for each of its dimensions.
    pub ranges: Vec<Range<usize>>,
}

impl TensorSlice {
    /// A part of a tensor under its own name.
    pub fn new(name: impl Into<String>, ranges: &[Range<usize>]) -> Self {
        let name = name.into();
        Self { stored: name.clone(), name, ranges: ranges.to_vec() }
    }

    /// A part of `stored` under another name.
    pub fn renamed(name: impl Into<String>, stored: impl Into<String>, ranges: &[Range<usize>]) -> Self {
        Self { name: name.into(), stored: stored.into(), ranges: ranges.to_vec() }
    }

    fn dims(&self) -> Vec<usize> {
        self.ranges.iter().map(|r| r.len()).collect()
    }
}

/// Tensors of which parts can be read alone.
pub trait SliceSource: SimpleBackend {
    /// The part `ranges`, one per dimension, of a tensor.
    ///
    /// # Errors
    /// A missing tensor; ranges outside of it; a dtype that does not convert.
    fn slice(&self, name: &str, ranges: &[Range<usize>], dtype: DType, device: &Device) -> Result<Tensor>;
}

impl SliceSource for TensorFiles {
    fn slice(&self, name: &str, ranges: &[Range<usize>], dtype: DType, device: &Device) -> Result<Tensor> {
        self.load_slice(name, ranges, dtype, device)
    }
}

impl SliceSource for DummyWeights {
    fn slice(&self, name: &str, ranges: &[Range<usize>], dtype: DType, device: &Device) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if let Some(part) = self.generate_part_on(device, name, ranges, dtype)? {
            return Ok(part);
        }
        let mut tensor = self.get_unchecked(name, dtype, &Device::Cpu)?;
        check_ranges(name, ranges, tensor.dims())?;
        for (dim, range) in ranges.iter().enumerate() {
            tensor = tensor.narrow(dim, range.start, range.len())?;
        }
        tensor.contiguous()?.to_device(device)
    }
}

/// Fails unless there is one range inside of each dimension.
pub(super) fn check_ranges(name: &str, ranges: &[Range<usize>], dims: &[usize]) -> Result<()> {
    let inside = |(range, &dim): (&Range<usize>, &usize)| range.start <= range.end && range.end <= dim;
    if ranges.len() != dims.len() || !ranges.iter().zip(dims).all(inside) {
        bail!("tensor `{name}` of shape {dims:?} has no part {ranges:?}")
    }
    Ok(())
}

/// The tensors of a source as one rank sees them: those of the list are slices, a tensor that is
/// only shown under other names is absent, and all others are whole.
pub struct RankView {
    source: Box<dyn SliceSource>,
    slices: HashMap<String, TensorSlice>,
    stored: HashSet<String>,
}

impl RankView {
    /// `slices` of `source`; a name may occur once.
    pub fn new(source: impl SliceSource + 'static, slices: impl IntoIterator<Item = TensorSlice>) -> Self {
        let slices: HashMap<_, _> = slices.into_iter().map(|slice| (slice.name.clone(), slice)).collect();
        let stored = slices.values().map(|slice| slice.stored.clone()).collect();
        Self { source: Box::new(source), slices, stored }
    }

    /// A [`VarBuilder`] at the root of the checkpoint, as [`TensorFiles::var_builder`] gives one.
    pub fn var_builder(self, dtype: DType, device: &Device) -> VarBuilder<'static> {
        VarBuilder::from_backend(Box::new(self), dtype, device.clone())
    }
}

impl SimpleBackend for RankView {
    fn get(&self, s: Shape, name: &str, h: candle_nn::Init, dtype: DType, dev: &Device) -> Result<Tensor> {
        let Some(slice) = self.slices.get(name) else { return self.source.get(s, name, h, dtype, dev) };
        // One expert of a pack is asked for without the dimension of experts.
        let significant = |dims: &[usize]| dims.iter().copied().skip_while(|&d| d == 1).collect::<Vec<_>>();
        if significant(s.dims()) != significant(&slice.dims()) {
            bail!(
                "tensor `{name}`: expected the shape {:?}, but this rank's part of `{}` is {:?}",
                s.dims(),
                slice.stored,
                slice.ranges
            )
        }
        self.source.slice(&slice.stored, &slice.ranges, dtype, dev)?.reshape(s)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, dev: &Device) -> Result<Tensor> {
        match self.slices.get(name) {
            Some(slice) => self.source.slice(&slice.stored, &slice.ranges, dtype, dev),
            None => self.source.get_unchecked(name, dtype, dev),
        }
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.slices.contains_key(name) || !self.stored.contains(name) && self.source.contains_tensor(name)
    }
}
