//! A rank's view of a checkpoint: named parts of its tensors, read alone.
//!
//! A family of models says which part of which tensor a rank holds, as a list of [`TensorSlice`]s. Its
//! loaders then ask for the same names with smaller shapes, and only those bytes are read. Packed
//! experts can be shown under the names of single ones, so that one loader serves both layouts; and
//! single ones as a pack, which a device then gets without a stop.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Device, Result, Shape, Tensor, bail};
use candle_nn::VarBuilder;
use candle_nn::var_builder::SimpleBackend;
#[cfg(feature = "cuda")]
use moe_kernels::Exec;
use moe_kernels::QuantScheme;
#[cfg(feature = "cuda")]
use moe_kernels::cuda::Staging;
use moe_kernels::quant::{QuantPart, QuantSource};

use super::{DummyWeights, TensorFiles, TensorSpec};

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

    /// How many elements it has.
    pub fn elements(&self) -> usize {
        self.ranges.iter().map(|range| range.len()).product()
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

    /// The parts of a pack, one behind the other, as a vector.
    fn pack(&self, parts: &[TensorSlice], dtype: DType, device: &Device) -> Result<Tensor> {
        cat(self, parts, dtype, device)
    }
}

/// A pack out of tensors of its parts.
fn cat<S: SliceSource + ?Sized>(
    source: &S,
    parts: &[TensorSlice],
    dtype: DType,
    device: &Device,
) -> Result<Tensor> {
    let part = |p: &TensorSlice| source.slice(&p.stored, &p.ranges, dtype, device)?.flatten_all();
    Tensor::cat(&parts.iter().map(part).collect::<Result<Vec<_>>>()?, 0)
}

impl SliceSource for TensorFiles {
    fn slice(&self, name: &str, ranges: &[Range<usize>], dtype: DType, device: &Device) -> Result<Tensor> {
        self.load_slice(name, ranges, dtype, device)
    }

    #[cfg(feature = "cuda")]
    fn pack(&self, parts: &[TensorSlice], dtype: DType, device: &Device) -> Result<Tensor> {
        if device.is_cuda() {
            return self.stream(parts, dtype, device);
        }
        cat(self, parts, dtype, device)
    }
}

impl SliceSource for DummyWeights {
    fn slice(&self, name: &str, ranges: &[Range<usize>], dtype: DType, device: &Device) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if let Some(part) = self.generate_part_on(device, name, ranges, dtype)? {
            return Ok(part);
        }
        part_of(&self.get_unchecked(name, dtype, &Device::Cpu)?, name, ranges)?.to_device(device)
    }

    #[cfg(feature = "cuda")]
    fn staging(&self, device: &Device) -> Result<Option<Arc<Staging>>> {
        DummyWeights::staging(self, device).map(Some)
    }

    fn scheme(&self, module: &str) -> Result<QuantScheme> {
        self.scheme_of(module)
    }

    fn quantised(&self, module: &str, ranges: Option<&[Range<usize>]>) -> Result<Option<QuantPart<'_>>> {
        self.part_of(module, ranges)
    }

    /// On CUDA each part is made where it is wanted; elsewhere parts of one tensor in a row share its generation.
    fn pack(&self, parts: &[TensorSlice], dtype: DType, device: &Device) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if let Some(made) = self.generate_parts_on(device, parts, dtype)? {
            return Ok(made);
        }
        let of_one = |of_one: &[TensorSlice]| {
            let name = &of_one[0].stored;
            let whole = self.get_unchecked(name, dtype, device)?;
            let part = |p: &TensorSlice| part_of(&whole, name, &p.ranges)?.flatten_all();
            Tensor::cat(&of_one.iter().map(part).collect::<Result<Vec<_>>>()?, 0)
        };
        let tensors = parts.chunk_by(|a, b| a.stored == b.stored).map(of_one);
        Tensor::cat(&tensors.collect::<Result<Vec<_>>>()?, 0)
    }
}

/// A copy of a part of a tensor.
fn part_of(tensor: &Tensor, name: &str, ranges: &[Range<usize>]) -> Result<Tensor> {
    check_ranges(name, ranges, tensor.dims())?;
    let narrow =
        |tensor: Tensor, (dim, range): (usize, &Range<usize>)| tensor.narrow(dim, range.start, range.len());
    ranges.iter().enumerate().try_fold(tensor.clone(), narrow)?.contiguous()
}

/// Fails unless there is one range inside of each dimension.
pub(super) fn check_ranges(name: &str, ranges: &[Range<usize>], dims: &[usize]) -> Result<()> {
    let inside = |(range, &dim): (&Range<usize>, &usize)| range.start <= range.end && range.end <= dim;
    if ranges.len() != dims.len() || !ranges.iter().zip(dims).all(inside) {
        bail!("tensor `{name}` of shape {dims:?} has no part {ranges:?}")
    }
    Ok(())
}

/// The tensors of a source as one rank sees them: a listed name is a slice, or a pack of several; a
/// tensor that is only shown under other names is absent; all others are whole. Cloning shares the source.
#[derive(Clone)]
pub struct RankView {
    source: Arc<dyn SliceSource>,
    slices: Arc<HashMap<String, Vec<TensorSlice>>>,
    stored: Arc<HashSet<String>>,
    /// The tensors that are there; `None`: all of the source.
    names: Option<Arc<HashSet<String>>>,
}

impl RankView {
    /// `slices` of `source`. Several of one name are a pack: one behind the other, in their order.
    pub fn new(source: impl SliceSource + 'static, slices: impl IntoIterator<Item = TensorSlice>) -> Self {
        let (mut all, mut stored) = (HashMap::<_, Vec<_>>::new(), HashSet::new());
        for slice in slices {
            stored.insert(slice.stored.clone());
            all.entry(slice.name.clone()).or_default().push(slice);
        }
        Self { source: Arc::new(source), slices: Arc::new(all), stored: Arc::new(stored), names: None }
    }

    /// This view without tensors that the model has no place for, which loaders would refuse.
    pub fn only(self, expected: &[TensorSpec]) -> Self {
        let names = expected.iter().map(|spec| spec.name.clone()).collect();
        Self { names: Some(Arc::new(names)), ..self }
    }

    /// A [`VarBuilder`] at the root of the checkpoint, as [`TensorFiles::var_builder`] gives one.
    pub fn var_builder(self, dtype: DType, device: &Device) -> VarBuilder<'static> {
        VarBuilder::from_backend(Box::new(self), dtype, device.clone())
    }

    /// The part of a name, or the vector of several.
    fn read(&self, parts: &[TensorSlice], dtype: DType, device: &Device) -> Result<Tensor> {
        match parts {
            [one] => self.source.slice(&one.stored, &one.ranges, dtype, device),
            parts => self.source.pack(parts, dtype, device),
        }
    }
}

impl fmt::Debug for RankView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RankView({} slices)", self.slices.len())
    }
}

impl QuantSource for RankView {
    fn scheme(&self, module: &str) -> Result<QuantScheme> {
        match self.slices.get(&format!("{module}.weight")).map(Vec::as_slice) {
            None => self.source.scheme(module),
            Some([one]) if one.stored == one.name => self.source.scheme(module),
            Some(_) => Ok(QuantScheme::NONE),
        }
    }

    fn open(&self, module: &str) -> Result<Option<QuantPart<'_>>> {
        match self.slices.get(&format!("{module}.weight")).map(Vec::as_slice) {
            None => self.source.quantised(module, None),
            Some([one]) if one.stored == one.name => self.source.quantised(module, Some(&one.ranges)),
            Some(_) => Ok(None),
        }
    }

    #[cfg(feature = "cuda")]
    fn staging(&self, ex: &Exec) -> Result<Option<Arc<Staging>>> {
        self.source.staging(ex.device())
    }
}

/// Dims without leading ones: one expert of a pack is asked for without the dimension of experts.
fn significant(dims: &[usize]) -> Vec<usize> {
    dims.iter().copied().skip_while(|&dim| dim == 1).collect()
}

/// Whether `parts` make up `shape`: one part of that shape, or several with as many rows in all.
fn has_shape(parts: &[TensorSlice], shape: &[usize]) -> bool {
    let row = |dims: &[usize]| dims.last().copied();
    match parts {
        [one] => significant(shape) == significant(&one.dims()),
        parts => {
            let elements: usize = parts.iter().map(|part| part.dims().iter().product::<usize>()).sum();
            elements == shape.iter().product::<usize>()
                && parts.iter().all(|part| row(&part.dims()) == row(shape))
        }
    }
}

impl SimpleBackend for RankView {
    fn get(&self, s: Shape, name: &str, h: candle_nn::Init, dtype: DType, dev: &Device) -> Result<Tensor> {
        let Some(parts) = self.slices.get(name) else { return self.source.get(s, name, h, dtype, dev) };
        if !has_shape(parts, s.dims()) {
            match parts.as_slice() {
                [one] => bail!(
                    "tensor `{name}`: expected the shape {:?}, but this rank's part of `{}` is {:?}",
                    s.dims(),
                    one.stored,
                    one.ranges
                ),
                parts => bail!(
                    "tensor `{name}`: expected the shape {:?}, but it is a pack of {} parts like {:?}",
                    s.dims(),
                    parts.len(),
                    parts[0].dims()
                ),
            }
        }
        self.read(parts, dtype, dev)?.reshape(s)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, dev: &Device) -> Result<Tensor> {
        match self.slices.get(name) {
            Some(parts) => self.read(parts, dtype, dev),
            None => self.source.get_unchecked(name, dtype, dev),
        }
    }

    fn contains_tensor(&self, name: &str) -> bool {
        let is_there = || self.names.as_ref().is_none_or(|names| names.contains(name));
        self.slices.contains_key(name)
            || !self.stored.contains(name) && is_there() && self.source.contains_tensor(name)
    }
}
