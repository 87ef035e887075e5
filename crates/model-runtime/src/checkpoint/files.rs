//! A set of safetensors files seen as one map from tensor name to data.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::{DType, Device, Shape, Tensor};
use candle_nn::VarBuilder;
use candle_nn::var_builder::SimpleBackend;
use rayon::prelude::*;
use safetensors::tensor::Dtype;

use super::change::Change;
use super::decode;
use super::error::{CheckpointError, abbreviate};
use super::file::{Entry, TensorFile};
use super::shards::{self, ShardIndex};
use super::slice::{SliceSource, check_ranges};
#[cfg(feature = "cuda")]
use super::slice::{TensorSlice, cat};
#[cfg(feature = "cuda")]
use super::stages::Stages;

/// Safetensors files, memory-mapped or embedded in the program, seen as one map from name to
/// tensor. Cloning shares the files.
///
/// Nothing but headers is read until a tensor is asked for; then its data is copied once, into
/// the tensor, converting the dtype on the way, and the mapped pages are given back. On a CUDA device
/// it comes through a few page-locked buffers, so that the host never holds a tensor. The files
/// must not be changed or truncated while they are open.
///
/// It is a [`SimpleBackend`], so [`TensorFiles::var_builder`] feeds any candle module.
#[derive(Clone)]
pub struct TensorFiles {
    inner: Arc<Inner>,
    #[cfg(feature = "cuda")]
    pub(super) stages: Stages,
}

struct Inner {
    origin: String,
    files: Vec<TensorFile>,
    entries: BTreeMap<String, Entry>,
    bytes_read: AtomicU64,
}

/// What a header says of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorInfo<'a> {
    /// Full name.
    pub name: &'a str,
    /// Dimensions.
    pub shape: &'a [usize],
    /// Dtype in the file; `None` for one that cannot be loaded (such as FP8).
    pub dtype: Option<DType>,
}

impl TensorFiles {
    /// Opens the weights of a checkpoint directory: `model.safetensors`, else the shards that
    /// `model.safetensors.index.json` names, else every `*.safetensors` file in the order of names.
    pub fn open_dir(dir: impl AsRef<Path>) -> Result<Self, CheckpointError> {
        let dir = dir.as_ref();
        let found = shards::find(dir)?;
        // Headers of large checkpoints are megabytes of JSON.
        let open = |(i, path): (usize, &PathBuf)| TensorFile::open(path, i);
        let files: Vec<_> = found.paths.par_iter().enumerate().map(open).collect();
        let inner = Inner::new(dir.display().to_string(), files.into_iter())?;
        if let Some(index) = found.index {
            inner.check_index(&index)?;
        }
        Ok(Self::of(inner))
    }

    /// Opens one safetensors file.
    pub fn open_file(path: impl AsRef<Path>) -> Result<Self, CheckpointError> {
        let path = path.as_ref();
        let file = std::iter::once(TensorFile::open(path, 0));
        Ok(Self::of(Inner::new(path.display().to_string(), file)?))
    }

    /// Reads a safetensors file that is embedded in the program (`include_bytes!`); `label` names
    /// it in messages.
    pub fn from_static(bytes: &'static [u8], label: &str) -> Result<Self, CheckpointError> {
        let file = std::iter::once(TensorFile::from_static(bytes, label, 0));
        Ok(Self::of(Inner::new(label.to_string(), file)?))
    }

    /// Makes the set from files of another container, whose tensors are at the places in `entries`.
    pub(super) fn of_entries(
        origin: String,
        files: Vec<TensorFile>,
        entries: Vec<Vec<(String, Entry)>>,
    ) -> Result<Self, CheckpointError> {
        Ok(Self::of(Inner::new(origin, files.into_iter().zip(entries).map(Ok))?))
    }

    fn of(inner: Inner) -> Self {
        Self {
            inner: Arc::new(inner),
            #[cfg(feature = "cuda")]
            stages: Stages::default(),
        }
    }

    /// The directory or file, for messages.
    pub fn origin(&self) -> &str {
        &self.inner.origin
    }

    /// Every tensor, in the order of names.
    pub fn iter(&self) -> impl Iterator<Item = TensorInfo<'_>> {
        self.inner.entries.iter().map(|(name, e)| info(name, e))
    }

    /// What the header says of a tensor, if it is there.
    pub fn info(&self, name: &str) -> Option<TensorInfo<'_>> {
        self.inner.entries.get_key_value(name).map(|(name, e)| info(name, e))
    }

    /// The path of the file that holds a tensor, or the label of an embedded one.
    pub fn file_of(&self, name: &str) -> Option<&str> {
        self.inner.entries.get(name).map(|entry| self.inner.label(entry.file))
    }

    /// The float dtype that most bytes of the checkpoint have; `None` without floats.
    pub fn float_dtype(&self) -> Option<DType> {
        let mut bytes: BTreeMap<u8, (usize, DType)> = BTreeMap::new();
        for e in self.inner.entries.values() {
            if let Some(dtype) = decode::dtype_of(e.dtype).filter(|d| d.is_float()) {
                bytes.entry(dtype as u8).or_insert((0, dtype)).0 += e.range.len();
            }
        }
        bytes.into_values().max_by_key(|(bytes, _)| *bytes).map(|(_, dtype)| dtype)
    }

    /// Bytes of tensors that have been loaded so far, as they are stored.
    pub fn bytes_read(&self) -> u64 {
        self.inner.bytes_read.load(Ordering::Relaxed)
    }

    /// Loads a part of a tensor, and reads no more than the rows that it crosses.
    pub(super) fn load_slice(
        &self,
        name: &str,
        ranges: &[Range<usize>],
        wanted: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        #[cfg(feature = "cuda")]
        if device.is_cuda() && self.inner.entry(name)?.change == Change::None {
            let shape: Vec<usize> = ranges.iter().map(|r| r.len()).collect();
            return self.stream(&[TensorSlice::new(name, ranges)], wanted, device)?.reshape(shape);
        }
        let (file, entry) = self.stored(name)?;
        check_ranges(name, ranges, &entry.shape)?;
        let elements: usize = entry.shape.iter().product();
        let size = entry.range.len().checked_div(elements).unwrap_or(0);
        let at =
            |run: &Range<usize>| entry.range.start + run.start * size..entry.range.start + run.end * size;
        let shape: Vec<usize> = ranges.iter().map(|r| r.len()).collect();
        let runs = runs(ranges, &entry.shape);
        let (tensor, read) = match runs.as_slice() {
            [run] => (self.decode(name, entry, &file.bytes()[at(run)], &shape, wanted)?, at(run)),
            runs => {
                let mut bytes = Vec::with_capacity(shape.iter().product::<usize>() * size);
                runs.iter().for_each(|run| bytes.extend_from_slice(&file.bytes()[at(run)]));
                (self.decode(name, entry, &bytes, &shape, wanted)?, entry.range.clone())
            }
        };
        file.release(&read);
        tensor.to_device(device)
    }

    /// Loads a whole tensor.
    fn load(&self, name: &str, wanted: DType, device: &Device) -> candle_core::Result<Tensor> {
        let whole: Vec<_> = self.inner.entry(name)?.shape.iter().map(|&dim| 0..dim).collect();
        self.load_slice(name, &whole, wanted, device)
    }

    /// The file of a tensor, and its place there.
    pub(super) fn stored(&self, name: &str) -> candle_core::Result<(&TensorFile, &Entry)> {
        self.find(name).ok_or_else(|| self.inner.missing(name).into())
    }

    /// The same as [`stored`](Self::stored), for tensors that may be missing. It returns no error, because an error is
    /// expensive if backtraces are on, and tens of thousands of modules are asked for tensors of formats that they do
    /// not have.
    pub(super) fn find(&self, name: &str) -> Option<(&TensorFile, &Entry)> {
        let entry = self.inner.entries.get(name)?;
        Some((self.inner.files.get(entry.file)?, entry))
    }

    /// Bytes of all tensors, as they are stored.
    pub fn bytes(&self) -> u64 {
        self.inner.entries.values().map(|entry| entry.range.len() as u64).sum()
    }

    /// Bytes of all files.
    #[cfg(feature = "cuda")]
    pub(super) fn file_bytes(&self) -> usize {
        self.inner.files.iter().map(|file| file.bytes().len()).sum()
    }

    /// Whether two tensors of one dtype have the same bytes; they are read up to the first difference.
    pub(super) fn same_bytes(&self, a: &str, b: &str) -> candle_core::Result<bool> {
        const PIECE: usize = 1 << 22;
        let a = self.stored(a)?;
        let b = self.stored(b)?;
        let left = a.0.bytes()[a.1.range.clone()].chunks(PIECE);
        let same = left.eq(b.0.bytes()[b.1.range.clone()].chunks(PIECE));
        [a, b].into_iter().for_each(|(file, entry)| file.release(&entry.range));
        Ok(same)
    }

    /// Counts bytes that were read.
    pub(super) fn count(&self, bytes: usize) {
        self.inner.bytes_read.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Loads a tensor as it is stored, into host memory.
    pub fn tensor(&self, name: &str) -> candle_core::Result<Tensor> {
        let entry = self.inner.entry(name)?;
        let wanted = decode::dtype_of(entry.dtype).unwrap_or(DType::F32);
        self.load(name, wanted, &Device::Cpu)
    }

    /// A [`VarBuilder`] at the root of the checkpoint. Floats are converted to `dtype`, rounding
    /// to nearest even; a module that needs another dtype asks for it by name.
    pub fn var_builder(&self, dtype: DType, device: &Device) -> VarBuilder<'static> {
        VarBuilder::from_backend(Box::new(self.clone()), dtype, device.clone())
    }

    /// Decodes bytes of a tensor, or of a part of it.
    fn decode(
        &self,
        name: &str,
        e: &Entry,
        bytes: &[u8],
        shape: &[usize],
        wanted: DType,
    ) -> candle_core::Result<Tensor> {
        self.inner.bytes_read.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        let first = if e.change == Change::None { wanted } else { DType::F32 };
        let decoded = decode::tensor(bytes, e.dtype, shape, first);
        let decoded = decoded.unwrap_or_else(|| Err(self.wrong_dtype(name, e, wanted).into()))?;
        e.change.apply(name, decoded, wanted)
    }

    /// The error of a tensor that does not convert.
    pub(super) fn wrong_dtype(&self, name: &str, e: &Entry, wanted: DType) -> CheckpointError {
        let hint = match decode::dtype_of(e.dtype) {
            None => "; quantised checkpoints are not supported in this form",
            Some(_) => "",
        };
        CheckpointError::Tensors(format!(
            "tensor `{name}` of {} has dtype {}, which cannot be loaded as {}{hint}",
            self.inner.label(e.file),
            e.dtype,
            wanted.as_str()
        ))
    }

    /// Shows the stored bytes of every tensor to `look`, in the order of names.
    pub(super) fn visit(&self, mut look: impl FnMut(&str, Dtype, &[u8])) {
        for (name, e) in &self.inner.entries {
            if let Some(file) = self.inner.files.get(e.file) {
                look(name, e.dtype, &file.bytes()[e.range.clone()]);
                file.release(&e.range);
            }
        }
    }
}

fn info<'a>(name: &'a str, entry: &'a Entry) -> TensorInfo<'a> {
    TensorInfo { name, shape: &entry.shape, dtype: decode::dtype_of(entry.dtype) }
}

type Opened = Result<(TensorFile, Vec<(String, Entry)>), CheckpointError>;

impl Inner {
    fn new(origin: String, opened: impl Iterator<Item = Opened>) -> Result<Self, CheckpointError> {
        let mut inner =
            Self { origin, files: Vec::new(), entries: BTreeMap::new(), bytes_read: AtomicU64::new(0) };
        for opened in opened {
            let (file, entries) = opened?;
            inner.files.push(file);
            for (name, entry) in entries {
                let second = entry.file;
                if let Some(old) = inner.entries.insert(name.clone(), entry) {
                    let label = |i: usize| inner.label(i).to_string();
                    let first = label(old.file);
                    let second = label(second);
                    return Err(CheckpointError::Tensors(format!(
                        "tensor `{name}` is in both {first} and {second}; remove one of the files"
                    )));
                }
            }
        }
        Ok(inner)
    }

    fn label(&self, file: usize) -> &str {
        self.files.get(file).map_or(&self.origin, |f| f.label())
    }

    /// Every tensor of the index is in the shard that it names.
    fn check_index(&self, index: &ShardIndex) -> Result<(), CheckpointError> {
        let wrong = |(name, &file): (&String, &usize)| match self.entries.get(name) {
            Some(e) if e.file == file => None,
            _ => Some(format!("{name} ({})", self.label(file))),
        };
        let lacking: Vec<String> = index.weight_map.iter().filter_map(wrong).collect();
        if lacking.is_empty() {
            return Ok(());
        }
        Err(CheckpointError::Tensors(format!(
            "{}: {} tensors are not in the shards that the index names: {}; download the checkpoint again",
            index.file,
            lacking.len(),
            abbreviate(&lacking)
        )))
    }

    fn entry(&self, name: &str) -> Result<&Entry, CheckpointError> {
        self.entries.get(name).ok_or_else(|| self.missing(name))
    }

    fn missing(&self, name: &str) -> CheckpointError {
        CheckpointError::Tensors(format!("tensor `{name}` is missing from {}", self.origin))
    }
}

/// The runs of neighbouring elements of a box, ascending.
pub(super) fn runs(ranges: &[Range<usize>], shape: &[usize]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = std::iter::once(0..1).collect();
    for (range, &dim) in ranges.iter().zip(shape) {
        if *range == (0..dim) {
            runs.iter_mut().for_each(|run| *run = run.start * dim..run.end * dim);
            continue;
        }
        // If a dimension is cut, each element of the dimensions before it has its own run.
        let parts = runs.into_iter().flatten();
        runs = parts.map(|at| at * dim + range.start..at * dim + range.end).collect();
    }
    runs
}

impl SliceSource for TensorFiles {
    fn slice(
        &self,
        name: &str,
        ranges: &[Range<usize>],
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        self.load_slice(name, ranges, dtype, device)
    }

    #[cfg(feature = "cuda")]
    fn pack(&self, parts: &[TensorSlice], dtype: DType, device: &Device) -> candle_core::Result<Tensor> {
        if device.is_cuda() {
            return self.stream(parts, dtype, device);
        }
        cat(self, parts, dtype, device)
    }
}

impl SimpleBackend for TensorFiles {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        _: candle_nn::Init,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        let entry = self.inner.entry(name)?;
        if entry.shape != shape.dims() {
            candle_core::bail!(
                "tensor `{name}` of {}: expected shape {:?}, got {:?}",
                self.inner.label(entry.file),
                shape.dims(),
                entry.shape
            )
        }
        self.load(name, dtype, device)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> candle_core::Result<Tensor> {
        self.load(name, dtype, device)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.inner.entries.contains_key(name)
    }
}
