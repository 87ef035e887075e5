//! A rank's view of a checkpoint: named parts of its tensors, each of which can be read alone.
//!
//! A family of models says which part of which tensor a rank holds, as a list of [`TensorSlice`]s. Its loaders then ask
//! for the same names with smaller shapes, and only those bytes are read. Packed experts can be shown under the names
//! of single ones, so that one loader serves both layouts. Single experts can be shown as a pack, which is then copied
//! to a device in one stream.

use std::collections::{HashMap, HashSet};
use std::fmt;
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
use rayon::prelude::*;

use super::reorder::ordered;
use super::slice::{SliceOrder, SliceSource, TensorSlice};
use super::spec::TensorSpec;

/// The tensors of a source as one rank sees them. A name in the list is a slice, or a pack of several slices. A tensor
/// that is only shown under other names is absent. All other tensors are whole. Cloning shares the source.
#[derive(Clone)]
pub struct RankView {
    source: Arc<dyn SliceSource>,
    slices: Arc<HashMap<String, Vec<TensorSlice>>>,
    stored: Arc<HashSet<String>>,
    /// The tensors that are there; `None`: all of the source.
    names: Option<Arc<HashSet<String>>>,
}

impl RankView {
    /// Makes the view of `slices` of `source`. Several slices of one name are a pack, in their order.
    pub fn new(source: impl SliceSource + 'static, slices: impl IntoIterator<Item = TensorSlice>) -> Self {
        let mut all = HashMap::<_, Vec<_>>::new();
        let mut stored = HashSet::new();
        for slice in slices {
            stored.insert(slice.stored.clone());
            all.entry(slice.name.clone()).or_default().push(slice);
        }
        Self { source: Arc::new(source), slices: Arc::new(all), stored: Arc::new(stored), names: None }
    }

    /// This view without tensors that the model has no place for, which loaders would refuse.
    #[must_use]
    pub fn only(self, expected: &[TensorSpec]) -> Self {
        let names = expected.iter().map(|spec| spec.name.clone()).collect();
        Self { names: Some(Arc::new(names)), ..self }
    }

    /// A [`VarBuilder`] at the root of the checkpoint, as [`TensorFiles::var_builder`](super::TensorFiles::var_builder)
    /// gives one.
    pub fn var_builder(self, dtype: DType, device: &Device) -> VarBuilder<'static> {
        VarBuilder::from_backend(Box::new(self), dtype, device.clone())
    }

    /// Reads the part of a name. Several parts become one vector.
    fn read(&self, parts: &[TensorSlice], dtype: DType, device: &Device) -> Result<Tensor> {
        let as_stored = |part: &TensorSlice| part.order == SliceOrder::STORED;
        match parts {
            [one] if as_stored(one) => self.source.slice(&one.stored, &one.ranges, dtype, device),
            parts if parts.iter().all(as_stored) => self.source.pack(parts, dtype, device),
            [one] => ordered(self.source.as_ref(), one, dtype)?.to_device(device),
            parts => {
                let part = |part: &TensorSlice| ordered(self.source.as_ref(), part, dtype)?.flatten_all();
                let parts = parts.par_iter().map(part).collect::<Result<Vec<_>>>()?;
                Tensor::cat(&parts, 0)?.to_device(device)
            }
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

/// Whether `parts` make up `shape`: one part of that shape, or several with as many elements in all, of whose rows the
/// shape's rows are made, or which are vectors as it is one.
fn has_shape(parts: &[TensorSlice], shape: &[usize]) -> bool {
    let row = |dims: &[usize]| dims.last().copied();
    match parts {
        [one] => significant(shape) == significant(&one.dims()),
        parts => {
            let elements: usize = parts.iter().map(|part| part.dims().iter().product::<usize>()).sum();
            elements == shape.iter().product::<usize>()
                && parts.iter().all(|part| match (row(&part.dims()), row(shape)) {
                    _ if [shape.len(), part.dims().len()] == [1, 1] => true,
                    (Some(part), Some(row)) => {
                        part == row || part > 0 && shape.len() == 2 && row.is_multiple_of(part)
                    }
                    (part, row) => part == row,
                })
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
