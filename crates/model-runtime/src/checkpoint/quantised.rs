//! A quantised checkpoint: layers that read its integers get them unchanged, and all others get floats.
//!
//! Some weights `M.weight` are not in the file as floats. Under their names, the matrix that the integers stand for is
//! computed when it is asked for. So a checkpoint can be used even if no kernel reads some of its matrices quantised (a
//! product that is absorbed into another, modules of one product in different formats).

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{DType, Device, Result, Shape, Tensor, bail};
use candle_nn::var_builder::SimpleBackend;
use moe_kernels::QuantScheme;
use moe_kernels::quant::{LogicalRows, QuantPart, QuantRows};
#[cfg(feature = "cuda")]
use moe_kernels::quant::{StoredBytes, StoredPart, StoredTensor};
#[cfg(feature = "cuda")]
use moe_quant::suffixes;
use moe_quant::{Format, PackedExpert, QuantConfig, Reader, UNREAD_TENSORS, layout};
use rayon::prelude::*;
use safetensors::tensor::{Dtype, TensorView};

use super::file::TensorFile;
use super::slice::check_ranges;
#[cfg(feature = "cuda")]
use super::slice::{TensorSlice, cat};
use super::{CheckpointError, SliceSource, TensorFiles, TensorSpec, Verified};

/// The tensors of a checkpoint of which some matrices are quantised. Cloning shares the files. If the config says that
/// they are [dequantised](QuantConfig::dequantised), all are shown as floats.
#[derive(Clone)]
pub struct QuantTensors {
    files: TensorFiles,
    config: Arc<QuantConfig>,
    /// The modules that may be quantised, with N and K: the matrices that the model expects.
    modules: Arc<HashMap<String, (usize, usize)>>,
}

impl fmt::Debug for QuantTensors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "QuantTensors({}, {})", self.files.origin(), self.config.method())
    }
}

/// The tensors of a module: the end of the name of each, its file and its range of bytes there.
pub(super) type Tensors<'a> = Vec<(String, &'a TensorFile, Range<usize>)>;

/// The module of a weight: its name without the last part.
pub(super) fn module_of(name: &str) -> Option<&str> {
    name.strip_suffix(".weight")
}

impl QuantTensors {
    /// The files as `config` describes them. `expected` are the tensors of the model in floats, in their stored shapes:
    /// its matrices may be quantised.
    pub fn new<'a>(
        files: TensorFiles,
        config: QuantConfig,
        expected: impl IntoIterator<Item = &'a TensorSpec>,
    ) -> Self {
        let matrix = |spec: &TensorSpec| match (module_of(&spec.name), spec.shape.as_slice()) {
            (Some(module), &[n, k]) => Some((module.to_string(), (n, k))),
            _ => None,
        };
        let modules = expected.into_iter().filter_map(matrix).collect();
        Self { files, config: Arc::new(config), modules: Arc::new(modules) }
    }

    /// Whether the file has a tensor, or a quantised matrix in the place of one.
    pub fn has(files: &TensorFiles, name: &str) -> bool {
        let packed =
            |suffix: &&str| module_of(name).is_some_and(|m| files.info(&format!("{m}.{suffix}")).is_some());
        let in_pack = || {
            module_of(name)
                .and_then(PackedExpert::of)
                .is_some_and(|expert| files.find(&expert.codes()).is_some())
        };
        files.info(name).is_some() || ["qweight", "weight_packed"].iter().any(packed) || in_pack()
    }

    /// The format in which the file holds a module's matrix.
    fn format(&self, module: &str) -> Result<Format> {
        if !self.modules.contains_key(module) {
            return Ok(Format::Plain);
        }
        let packed = self.packed(module);
        let dtype = |suffix: &str| match &packed {
            Some(expert) => self.files.find(&expert.stored(suffix)?).map(|(_, e)| e.dtype),
            None => self.files.find(&format!("{module}.{suffix}")).map(|(_, e)| e.dtype),
        };
        Ok(self.config.format_in_file(module, dtype)?)
    }

    /// The place of a module's matrix in a pack of experts, if the file has such packs.
    fn packed(&self, module: &str) -> Option<PackedExpert> {
        PackedExpert::of(module).filter(|expert| self.files.find(&expert.codes()).is_some())
    }

    /// A module's matrix, and the places of its tensors; `None` if the file has it in floats.
    pub(super) fn reader(&self, module: &str) -> Result<Option<(Reader<'_>, Tensors<'_>)>> {
        let (Some(&shape), format) = (self.modules.get(module), self.format(module)?) else {
            return Ok(None);
        };
        if format == Format::Plain {
            return Ok(None);
        }
        let tensors = RefCell::new(Vec::new());
        if let Some(expert) = self.packed(module) {
            return self.packed_reader(module, &expert, format, shape).map(Some);
        }
        let find = |suffix: &str| {
            let (file, entry) = self.files.find(&format!("{module}.{suffix}"))?;
            tensors.borrow_mut().push((suffix.to_string(), file, entry.range.clone()));
            TensorView::new(entry.dtype, entry.shape.clone(), &file.bytes()[entry.range.clone()]).ok()
        };
        let reader = Reader::new(module, format, shape, find)?;
        Ok(Some((reader, tensors.into_inner())))
    }

    /// The matrix [n, k] of an expert in a pack.
    fn packed_reader(
        &self,
        module: &str,
        expert: &PackedExpert,
        format: Format,
        (n, k): (usize, usize),
    ) -> Result<(Reader<'_>, Tensors<'_>)> {
        let tensors = RefCell::new(Vec::new());
        let find = |suffix: &str| {
            let (file, entry) = self.files.find(&expert.stored(suffix)?)?;
            let part = expert.part(suffix, &entry.shape).filter(|_| entry.dtype == Dtype::U8)?;
            let range = entry.range.start + part.range.start..entry.range.start + part.range.end;
            tensors.borrow_mut().push((suffix.to_string(), file, range.clone()));
            TensorView::new(entry.dtype, part.shape, file.bytes().get(range)?).ok()
        };
        let reader = Reader::new(module, format, (n * expert.matrices, k), find)?;
        let reader = reader.turns(expert.turn, expert.matrices)?;
        Ok((reader, tensors.into_inner()))
    }

    /// Gives back the mapped pages of a module's tensors.
    pub(super) fn release(&self, tensors: &Tensors) {
        tensors.iter().for_each(|(_, file, range)| file.release(range));
    }

    /// Counts the bytes of a module's tensors as read.
    pub(super) fn count(&self, tensors: &Tensors) {
        self.files.count(tensors.iter().map(|(.., range)| range.len()).sum());
    }

    /// The buffers through which data from the files reaches a device.
    #[cfg(feature = "cuda")]
    pub(super) fn staging_of(&self, device: &Device) -> Result<Arc<moe_kernels::cuda::Staging>> {
        self.files.staging(device)
    }

    /// Whether the file has a bias that is all zeros: programs that write GPTQ checkpoints give every quantised layer
    /// one.
    fn is_zero(&self, bias: &str) -> bool {
        let Some((file, entry)) = self.files.find(bias) else { return false };
        let size = (entry.dtype.bitsize() / 8).max(1);
        let mut values = file.bytes()[entry.range.clone()].chunks(size);
        // A float of any dtype is zero if all bits except the sign, the last one, are zero.
        let is_zero = values.all(|value| {
            matches!(value.split_last(), Some((0 | 0x80, rest)) if rest.iter().all(|byte| *byte == 0))
        });
        file.release(&entry.range);
        is_zero
    }

    /// The same as [`TensorFiles::verify`], except that each quantised matrix has the tensors of its format. In
    /// addition, the files may have scales of matrices that are not quantised here ([`UNREAD_TENSORS`]) and biases of
    /// zeros.
    ///
    /// # Errors
    /// All tensors that are missing, or of another shape or dtype.
    pub fn verify(
        &self,
        expected: impl IntoIterator<Item = TensorSpec>,
        ignored: &[&str],
    ) -> std::result::Result<Verified, CheckpointError> {
        let expected: Vec<_> = expected.into_iter().collect();
        let names: HashSet<_> = expected.iter().map(|spec| spec.name.as_str()).collect();
        // The loop is parallel, because there may be tens of thousands of modules. The first error is the same as on
        // one thread.
        let specs: Vec<_> = expected.par_iter().map(|spec| self.specs(spec, &names)).collect();
        let specs = specs.into_iter().collect::<std::result::Result<Vec<_>, _>>()?;
        let ignored = [ignored, UNREAD_TENSORS].concat();
        let mut verified = self.files.verify(specs.into_iter().flatten(), &ignored)?;
        let left_out = self.left_out_by_header(&expected)?;
        if let Some(first) = left_out.first() {
            verified.notes.push(format!(
                "{}: the header ({}) says that {} modules are not quantised, {first} among them, but the file holds them \
                 quantised: they are read like the other ones. In quantization_config of config.json, {} leave modules out",
                self.files.origin(),
                self.config.method(),
                left_out.len(),
                self.config.leaving_out()
            ));
        }
        Ok(verified)
    }

    /// Modules that are quantised in the file although the header says that they are not.
    fn left_out_by_header<'a>(
        &self,
        expected: &'a [TensorSpec],
    ) -> std::result::Result<Vec<&'a str>, CheckpointError> {
        let is_left_out = |module: &str| -> Result<bool> {
            let format = self.format(module)?;
            Ok(self.config.is_left_out(module, format)?)
        };
        let modules = expected.par_iter().filter_map(|spec| module_of(&spec.name));
        let left_out = modules.map(|module| Ok(is_left_out(module)?.then_some(module)));
        let left_out: Result<Vec<Option<&str>>> = left_out.collect();
        Ok(left_out.map_err(CheckpointError::of_tensors)?.into_iter().flatten().collect())
    }

    /// The tensors that the file must have in the place of `spec`; `names` are the names of all tensors that the model
    /// expects.
    fn specs(
        &self,
        spec: &TensorSpec,
        names: &HashSet<&str>,
    ) -> std::result::Result<Vec<TensorSpec>, CheckpointError> {
        let wrong =
            |e: &dyn fmt::Display| CheckpointError::Quantised(format!("{}: {e}", self.files.origin()));
        let module = module_of(&spec.name);
        let format = module.map_or(Ok(Format::Plain), |m| self.format(m)).map_err(|e| wrong(&e))?;
        let (Some(module), false) = (module, format == Format::Plain) else { return Ok(vec![spec.clone()]) };
        if self.config.method() == QuantConfig::PACKED_EXPERTS
            && let Some(expert) = PackedExpert::of(module)
        {
            let is_there =
                |e: &usize| expert.module(*e).is_some_and(|module| self.modules.contains_key(&module));
            let experts = (0..).take_while(is_there).count();
            let tensors = expert.tensors([spec.shape[0], spec.shape[1]], experts);
            return Ok(tensors.into_iter().map(|t| TensorSpec { name: t.name, shape: t.shape }).collect());
        }
        let mut specs = Vec::new();
        let tensors = layout(format, spec.shape[0], spec.shape[1]);
        for tensor in tensors.map_err(|e| wrong(&format!("{module}: {e}")))? {
            let name = format!("{module}.{}", tensor.suffix);
            let shape = match self.files.find(&name) {
                Some((_, entry)) => {
                    tensor.check(module, entry.dtype, &entry.shape).map_err(|e| wrong(&e))?;
                    entry.shape.clone()
                }
                None if !tensor.required => continue,
                None => tensor.shapes.into_iter().next().unwrap_or_default(),
            };
            specs.push(TensorSpec { name, shape });
        }
        let bias = format!("{module}.bias");
        if !names.contains(bias.as_str()) && self.is_zero(&bias) {
            specs.push(TensorSpec { name: bias, shape: vec![spec.shape[0]] });
        }
        Ok(specs)
    }
}

impl SimpleBackend for QuantTensors {
    fn get(&self, s: Shape, name: &str, h: candle_nn::Init, dtype: DType, device: &Device) -> Result<Tensor> {
        match self.floats(name, None, dtype, device)? {
            Some(tensor) if tensor.dims() == s.dims() => Ok(tensor),
            Some(tensor) => bail!("tensor `{name}`: expected shape {:?}, got {:?}", s.dims(), tensor.dims()),
            None => self.files.get(s, name, h, dtype, device),
        }
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        match self.floats(name, None, dtype, device)? {
            Some(tensor) => Ok(tensor),
            None => self.files.get_unchecked(name, dtype, device),
        }
    }

    fn contains_tensor(&self, name: &str) -> bool {
        Self::has(&self.files, name)
    }
}

impl SliceSource for QuantTensors {
    fn slice(&self, name: &str, ranges: &[Range<usize>], dtype: DType, device: &Device) -> Result<Tensor> {
        match self.floats(name, Some(ranges), dtype, device)? {
            Some(tensor) => Ok(tensor),
            None => self.files.slice(name, ranges, dtype, device),
        }
    }

    fn scheme(&self, module: &str) -> Result<QuantScheme> {
        Ok(self.config.held(self.format(module)?))
    }

    #[cfg(feature = "cuda")]
    fn staging(&self, device: &Device) -> Result<Option<Arc<moe_kernels::cuda::Staging>>> {
        self.staging_of(device).map(Some)
    }

    #[cfg(feature = "cuda")]
    fn pack(&self, parts: &[TensorSlice], dtype: DType, device: &Device) -> Result<Tensor> {
        if device.is_cuda() {
            return self.float_pack(parts, dtype, device);
        }
        cat(self, parts, dtype, device)
    }

    fn quantised(&self, module: &str, ranges: Option<&[Range<usize>]>) -> Result<Option<QuantPart<'_>>> {
        if self.config.is_dequantised() {
            return Ok(None);
        }
        let Some((mut reader, tensors)) = self.reader(module)? else { return Ok(None) };
        let mut inputs = 0..reader.inputs();
        if let Some(ranges) = ranges {
            let (n, _) = reader.shape();
            check_ranges(module, ranges, &[n, inputs.end])?;
            if ranges[1] != inputs {
                let part = reader.clone().columns(ranges[1].clone())?;
                // With act-order a rank keeps the scales of all groups, in the order of the whole matrix. So its sums
                // have the same bits as with the whole matrix.
                (reader, inputs) = match reader.perm() {
                    Some(_) => (reader, ranges[1].clone()),
                    None => (part, 0..ranges[1].len()),
                };
            }
            reader = reader.rows(ranges[0].clone())?;
        }
        let rows = Box::new(Stored { reader, of: self, tensors, is_mapped: AtomicBool::new(false) });
        Ok(Some(QuantPart { rows, inputs }))
    }
}

/// A matrix whose pages are given back when it has been packed.
struct Stored<'a> {
    reader: Reader<'a>,
    of: &'a QuantTensors,
    tensors: Tensors<'a>,
    /// Whether rows were read, which maps pages.
    is_mapped: AtomicBool,
}

impl QuantRows for Stored<'_> {
    fn shape(&self) -> (usize, usize) {
        self.reader.shape()
    }

    fn scheme(&self) -> QuantScheme {
        self.reader.scheme()
    }

    fn perm(&self) -> Option<&[u32]> {
        self.reader.perm()
    }

    fn read(&self, rows: Range<usize>, out: &mut LogicalRows) -> Result<()> {
        self.is_mapped.store(true, Ordering::Relaxed);
        self.reader.read(rows, out)
    }

    #[cfg(feature = "cuda")]
    fn stored(&self) -> std::result::Result<Vec<StoredPart<'_>>, String> {
        self.reader.stored_in(self)
    }
}

/// The bytes are read from the file without mapping its pages, as in the reading of floats.
#[cfg(feature = "cuda")]
impl StoredBytes for Stored<'_> {
    fn read_bytes(&self, tensor: StoredTensor, first: usize, out: &mut [u8]) -> Result<()> {
        let mut tensors = self.tensors.iter();
        let Some((name, file, range)) = tensors.find(|(name, ..)| suffixes(tensor).contains(&name.as_str()))
        else {
            bail!("a quantised matrix has no {tensor:?}")
        };
        let start = range.start + first;
        if start + out.len() > range.end {
            bail!("{name} has {} bytes; {} bytes from {first} on were asked for", range.len(), out.len())
        }
        Ok(file.read_at(&(start..start + out.len()), out)?)
    }
}

impl Drop for Stored<'_> {
    fn drop(&mut self) {
        if *self.is_mapped.get_mut() {
            self.of.release(&self.tensors);
        }
        self.of.count(&self.tensors);
    }
}
